"""Recomputes every figure on the timeline's page from the saved trace, interval by interval. The tests share no code
with megakernel.timeline: they read the bytes of the trace and the text of the page themselves. From the package they
use only programs and the costs that instructions declare."""

import json
import re
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import handmade
import pytest
import synthetic
from compiled import compiled as small_compiled
from cpu_support import DIMS, RandomCheckpoint
from runner import Piece, Runner
from simulated import step_of

from megakernel import machine as machines
from megakernel.isa import MAX_PHASES, Operation, cost
from megakernel.isa.record import counter_word as word
from megakernel.isa.traffic import link_bytes_each
from megakernel.model import ModelConfig
from megakernel.program import Program
from megakernel.scheduler.simulate import simulate
from megakernel.scheduler.simulate.costs import costs_of
from megakernel.targets.hopper import loads
from megakernel.targets.issue import issued
from megakernel.timeline import page as page_of
from megakernel.timeline import resolve, summarise
from megakernel.trace import Trace

_, PAGE_WAIT, COUNTER_WAIT, LOAD, COMPUTE, STORE = range(6)
LOADER, CONSUMER, INPUT_LOADER = 2, 3, 5
PROLOGUE, EPILOGUE = 0xFFFE, 0xFFFF


class Row(NamedTuple):
    """A record of a trace file. The fields are in the order of its bytes."""

    begin: int
    end: int
    number: int
    launch: int
    worker: int
    layer: int
    rank: int
    role: int
    kind: int
    slot: int


class Read(NamedTuple):
    """The contents of a trace file. `attention` has the FLOPs and bytes of attention by (launch, rank, slot)."""

    tick_s: float
    rows: list[Row]
    attention: dict[tuple[int, int, int], tuple[float, float]]


def read_trace(path: Path) -> Read:
    data = path.read_bytes()
    assert data[:8] == b"MKTRACE1"
    at = 16 + struct.unpack_from("<Q", data, 8)[0]
    header, told = json.loads(data[16:at]), {}
    if shape := header.get("attention"):
        launches, ranks, slots, _ = shape
        numbers = struct.iter_unpack("<2d", data[at : at + 16 * launches * ranks * slots])
        places = ((a, b, c) for a in range(launches) for b in range(ranks) for c in range(slots))
        told = dict(zip(places, numbers, strict=True))
        at += 16 * launches * ranks * slots
    rows = [Row(*values) for values in struct.iter_unpack("<QQIIHHBBBB", data[at:])]
    return Read(header["tick_s"], rows, told)  # type: ignore[arg-type]


def read_page(text: str) -> dict[str, Any]:
    found = re.search(r'<script id="meta" type="application/json">(.*?)</script>', text, re.S)
    assert found
    return dict(json.loads(found[1])["sources"][0])


def sweep(intervals: Iterable[tuple[int, int, Any]]) -> Iterator[tuple[int, int, Counter[Any]]]:
    """Cut time at every begin and end, and yield each part: its begin, its end, and how many intervals of each tag
    cover it."""
    some = [interval for interval in intervals if interval[1] > interval[0]]
    edges = sorted([(b, 1, tag) for b, _, tag in some] + [(e, -1, tag) for _, e, tag in some], key=lambda edge: edge[0])
    active: Counter[Any] = Counter()
    for n, (at, by, tag) in enumerate(edges):
        active[tag] += by
        if n + 1 < len(edges) and edges[n + 1][0] > at:
            yield at, edges[n + 1][0], +active


def compiled(tp: int, tokens: int, **options: Any) -> tuple[Program, Trace]:
    """Run a step of a model with odd sizes on this machine's CPU, and return its program and trace."""
    runner = Runner(RandomCheckpoint(DIMS, biased=False), workers=2, tp=tp, max_context=400, **options)
    try:
        trace = runner.step([Piece(0, 0, list(range(tokens)))], trace=True).trace
    finally:
        runner.close()
    assert trace is not None
    return runner.program(tokens, tokens), trace


def on_h100(program: Program) -> Trace:
    """Simulate a step that uses all token rows of a program, on as many SMs of an H100 as the program has workers."""
    h100 = machines.load("h100")
    machine = replace(h100, workers=program.workers)
    trace = simulate(program, machine, step_of(program), costs=costs_of(h100), trace=True).trace
    assert trace is not None
    return trace


def queued(queue: str, tp: int) -> tuple[Program, Trace]:
    """Simulate a hand-made program with a queue under the costs and roles of an H100, and return it and its trace."""
    program = handmade.handmade(handmade.rank_dims(tp), workers=3, queue=queue)
    return program, on_h100(program)


def for_a_gpu(tokens: int, tp: int) -> tuple[Program, Trace]:
    """Simulate a compiled step on four SMs of an H100, and return its program and trace. The matmuls use dot products
    if `tokens` is small, otherwise matrix units."""
    config = ModelConfig(
        vocab=2048, hidden=1024, ffn=2048, layers=2, heads=8, kv_heads=4, head_dim=128, max_context=256
    )
    h100 = replace(machines.load("h100"), workers=4)
    program = small_compiled(config, h100, tokens, tp=tp, max_context=256)
    return program, on_h100(program)


def twice() -> tuple[Program, Trace]:
    """Return a program and a trace of two launches of it, of which the second takes twice as long as the first."""
    program, trace = synthetic.node(2, 3, layers=1)
    later = trace.intervals.copy()
    gap = 1000 + int(later["end"].max())
    for edge in ("begin", "end"):
        later[edge] = gap + 2 * later[edge]
    later["launch"] += 1
    both = [tuple(row) for part in (trace.intervals, later) for row in part]
    made = synthetic.trace(program, both)
    assert trace.attention is not None
    return program, replace(made, attention=trace.attention.repeat(2, axis=0))


def by_hand() -> tuple[Program, Trace]:
    """Return a hand-made program and trace. In the trace, a loader begins to wait before the consumers do, and the
    releaser of a wait (the instruction whose signal ended it) seems to end after the wait."""
    norm, tile = synthetic.record("attn_norm", (0, 32), [], [word(0)]), (0, 32, 0, 32)
    second = [synthetic.record("qkv_rope", tile, [word(0)], []), synthetic.record("o_proj", tile, [word(1)], [])]
    program = synthetic.program(synthetic.dims(1), [[], []], [[norm], second], [[], []], counters=2)
    rows = [
        (0, 60, 0, 1, 0, 0, 0, CONSUMER, COMPUTE, 0),
        (0, 30, 1, 1, 1, 0, 0, LOADER, PAGE_WAIT, 0),
        (5, 48, 2, 1, 1, 0, 0, INPUT_LOADER, COUNTER_WAIT, 0),
        (10, 50, 1, 1, 1, 0, 0, CONSUMER, COUNTER_WAIT, 0),
        (50, 58, 1, 1, 1, 0, 0, CONSUMER, COMPUTE, 0),
        (58, 100, 2, 1, 1, 0, 0, CONSUMER, COMPUTE, 0),
    ]
    return program, synthetic.trace(program, rows)


KINDS = {
    "made by hand": by_hand,
    "simulated": lambda: (p := synthetic.llama(layers=3), synthetic.run(p)),
    "stalled": synthetic.stalled,
    "ranks with roles": lambda: synthetic.node(2, 3),
    "two launches": twice,
    "attention queued": lambda: queued("attention", 2),
    "body queued": lambda: queued("body", 3),
    "GPU decode": lambda: for_a_gpu(8, 1),
    "GPU prefill": lambda: for_a_gpu(256, 2),
    "CPU decode": lambda: compiled(1, 1),
    "CPU prefill": lambda: compiled(1, 70),
    "CPU queue": lambda: compiled(2, 40, queue="body"),
}


class Case(NamedTuple):
    program: Program
    read: Read
    page: dict[str, Any]
    summary: dict[str, Any]


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    program, trace = KINDS[request.param]()
    folder = tmp_path_factory.mktemp("case")
    trace.save(folder / "t.trace")
    step = resolve(program, trace)
    page = read_page(page_of((step, summarise(step))))
    return Case(program, read_trace(folder / "t.trace"), page, page["summary"])


def segment_of(row: Row) -> int:
    return {PROLOGUE: 0, EPILOGUE: 2}.get(row.layer, 1)


def phase_number(program: Program, row: Row) -> int:
    return int(program.numbered(segment_of(row))[0][row.number, 0]) % (MAX_PHASES + 1)


def name(program: Program, row: Row) -> str:
    return str(program.forward.by_number[phase_number(program, row)].name)


def lanes(case: Case) -> dict[tuple[int, int], list[Row]]:
    found: dict[tuple[int, int], list[Row]] = {
        (rank, worker): [] for rank in range(case.program.ranks) for worker in range(case.program.workers)
    }
    for row in case.read.rows:
        found[row.rank, row.worker].append(row)
    return found


def launches(case: Case) -> dict[int, tuple[int, int]]:
    spans: dict[int, tuple[int, int]] = {}
    for row in case.read.rows:
        begin, end = spans.get(row.launch, (row.begin, row.end))
        spans[row.launch] = min(begin, row.begin), max(end, row.end)
    return spans


ORDER = (COMPUTE, STORE, COUNTER_WAIT, PAGE_WAIT, LOAD)


def states(rows: list[Row]) -> Counter[int]:
    """Return the ticks that a worker spends in each kind of interval. Where kinds overlap, only the first in ORDER
    counts."""
    ticks: Counter[int] = Counter()
    for begin, end, active in sweep([(row.begin, row.end, row.kind) for row in rows]):
        kind = next((k for k in ORDER if k in active), None)
        if kind is not None:
            ticks[kind] += end - begin
    return ticks


def steps(case: Case) -> int:
    return sum(end - begin for begin, end in launches(case).values())


def test_the_step_and_what_the_workers_do(case: Case) -> None:
    s, total = case.summary, steps(case)
    spans = launches(case)
    assert (s["launches"], s["intervals"], s["ranks"]) == (len(spans), len(case.read.rows), case.program.ranks)
    assert s["step_s"] == pytest.approx(total / len(spans) * case.read.tick_s, rel=1e-12)
    busy = []
    for worker in s["per_worker"]:
        ticks = states(lanes(case)[worker["rank"], worker["worker"]])
        busy.append((ticks[COMPUTE] + ticks[STORE] + ticks[LOAD]) / total)
        wait = (ticks[COUNTER_WAIT] + ticks[PAGE_WAIT]) / total
        assert worker["busy"] == pytest.approx(busy[-1], abs=1e-12) and worker["wait"] == pytest.approx(wait, abs=1e-12)
        assert worker["idle"] == pytest.approx(1 - busy[-1] - wait, abs=1e-12)
    mean = sum(busy) / len(busy)
    assert s["busy"] == pytest.approx(mean) and s["imbalance"] == pytest.approx(max(busy) / mean - 1)
    computing = sum(states(rows)[COMPUTE] for rows in lanes(case).values())
    assert s["computing"] == pytest.approx(computing / total / len(busy))


def test_work_by_phase(case: Case) -> None:
    ticks: Counter[str] = Counter()
    ran: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for row in case.read.rows:
        if row.kind in (COMPUTE, STORE):
            ticks[name(case.program, row)] += row.end - row.begin
            ran[name(case.program, row)].add((row.launch, row.layer, row.rank, row.number))
    shown = {i["name"]: i for i in case.summary["instructions"]}
    assert set(shown) == set(ran)
    whole = max(sum(ticks.values()), 1)
    for phase, i in shown.items():
        assert i["count"] == len(ran[phase]) and i["share"] == pytest.approx(ticks[phase] / whole)
        assert i["total_s"] == pytest.approx(ticks[phase] * case.read.tick_s)
        assert i["mean_s"] == pytest.approx(i["total_s"] / i["count"])
    for family, share in case.summary["families"].items():
        assert share == pytest.approx(sum(i["share"] for i in shown.values() if i["family"] == family))


def test_waits_cost_what_workers_were_blocked(case: Case) -> None:
    """A wait costs the ticks in which its worker neither computes nor stores. If several roles of a worker wait at the
    same time, only one wait counts: counter waits come before page waits, then waits of the consumers before others,
    then the earliest."""
    expected: Counter[str] = Counter()
    for rows in lanes(case).values():
        for begin, end, active in sweep([(row.begin, row.end, row) for row in rows]):
            if {row.kind for row in active} & {COMPUTE, STORE}:
                continue
            waits = [row for row in active if row.kind in (COUNTER_WAIT, PAGE_WAIT)]
            if not waits:
                continue
            first = min(waits, key=lambda w: (w.kind == PAGE_WAIT, w.role != CONSUMER, w.begin))
            expected[name(case.program, first)] += end - begin
    shown: Counter[str] = Counter()
    for wait in case.summary["waits"]:
        shown[wait["instruction"]] += round(wait["total_s"] / case.read.tick_s)
    assert shown == expected
    whole = sum(expected.values())
    assert all(w["share"] == pytest.approx(w["total_s"] / case.read.tick_s / whole) for w in case.summary["waits"])
    blocked = sum(w["wait"] for w in case.summary["per_worker"]) * steps(case)
    assert blocked == pytest.approx(whole, abs=1)


def busiest_role(case: Case) -> float:
    """Return the seconds per launch that the busiest role of a worker needs to issue its machine instructions,
    according to the machine file. The seconds of a role are the mean over the workers of a rank. The result is the
    maximum over all ranks and roles."""
    machine = machines.MACHINES.get(case.program.machine)
    if machine is None or machine.paths is None:
        return 0.0
    each: dict[tuple[int, int], Any] = {}
    for segment in range(3):
        for phase, dims, rows, columns in case.program.by_phase(segment):
            roles = issued(phase, columns, dims, machine.paths)
            for n, row in enumerate(rows.tolist()):
                each[segment, row] = roles and (roles.weight_loader[n], roles.input_loader[n], roles.consumers[n])
    total: Counter[tuple[int, int]] = Counter()
    for row in {(r.launch, r.layer, r.rank, r.number): r for r in case.read.rows if r.kind == COMPUTE}.values():
        for role, seconds in enumerate(each.get((segment_of(row), row.number)) or ()):
            total[row.rank, role] += seconds
    return max(total.values(), default=0.0) / case.program.workers / len(launches(case))


def test_the_time_to_issue_is_part_of_the_waterfall(case: Case) -> None:
    fall, expected = case.summary["waterfall"], busiest_role(case)
    assert fall["times"].get("issue", 0.0) == pytest.approx(expected, rel=1e-9)
    assert bool(expected) == bool(case.program.dims.worker.ring_pages)
    before = min(max(t for n, t in fall["times"].items() if n != "issue"), case.summary["step_s"])
    bar = sum(bar["seconds"] for bar in fall["bars"] if bar["name"] == "issue")
    assert bar == pytest.approx(max(0.0, min(expected, case.summary["step_s"]) - before), abs=case.read.tick_s)


def test_outliers_took_eight_times_the_median_of_their_phase(case: Case) -> None:
    lengths: dict[str, list[int]] = defaultdict(list)
    for row in case.read.rows:
        if row.kind == COMPUTE:
            lengths[name(case.program, row)].append(row.end - row.begin)
    late = 0.0
    for i in case.summary["instructions"]:
        usual = median(lengths[i["name"]] or [0])
        far = [t - usual for t in lengths[i["name"]] if usual and t > 8 * usual]
        late += sum(far)
        assert i["median_s"] == pytest.approx(usual * case.read.tick_s) and i["outliers"] == len(far)
        assert i["outliers_s"] == pytest.approx(sum(far) * case.read.tick_s, abs=case.read.tick_s / 2)
    cost = [i["total_s"] - i["outliers_s"] for i in case.summary["instructions"]]
    assert cost == sorted(cost, reverse=True)
    bars = {bar["name"]: bar for bar in case.summary["waterfall"]["bars"]}
    slower = sum(bar["seconds"] for bar in bars.values() if bar["name"] in ("outliers", "work slower than its limits"))
    expected = min(late / len(lanes(case)) / len(launches(case)) * case.read.tick_s, slower)
    assert bars.get("outliers", {"seconds": 0})["seconds"] == pytest.approx(expected, abs=case.read.tick_s)
    for place in bars.get("outliers", {"places": []})["places"]:
        row = case.read.rows[place["interval"]]
        assert row.end - row.begin > 8 * median(lengths[name(case.program, row)])


def test_the_waterfall_adds_up_to_the_step(case: Case) -> None:
    fall, s = case.summary["waterfall"], case.summary
    bars = fall["bars"]
    assert sum(bar["seconds"] for bar in bars) == pytest.approx(s["step_s"], abs=case.read.tick_s)
    assert all(bar["seconds"] >= 0 for bar in bars)
    assert bars[0]["kind"] == "least" and bars[0]["seconds"] == min(fall["least_s"], s["step_s"])
    assert fall["least_s"] == max(t for n, t in fall["times"].items() if n not in ("cache", "issue"))
    assert fall["beyond"] == (fall["least_s"] > s["step_s"])
    mean: Counter[int] = Counter()
    for rows in lanes(case).values():
        mean += states(rows)
    one = len(lanes(case)) * len(launches(case)) / case.read.tick_s
    reached = min(max(fall["times"].values()), s["step_s"])
    computed = mean[COMPUTE] / one
    beside = s["step_s"] - computed
    part = (s["step_s"] - max(reached, computed)) / beside if beside else 0.0
    by_kind: Counter[str] = Counter()
    for bar in bars:
        by_kind[bar["name"] if bar["name"] in ("stores", "loads") else bar["kind"]] += bar["seconds"]
    waiting = (mean[COUNTER_WAIT] + mean[PAGE_WAIT]) / one
    assert by_kind["wait"] == pytest.approx(part * waiting, abs=case.read.tick_s)
    assert by_kind["stores"] == pytest.approx(part * mean[STORE] / one, abs=case.read.tick_s)
    assert by_kind["loads"] == pytest.approx(part * mean[LOAD] / one, abs=case.read.tick_s)
    assert by_kind["work"] == pytest.approx(max(0.0, computed - reached), abs=case.read.tick_s)
    origin = min(row.begin for row in case.read.rows)
    for bar in bars:
        for place in bar["places"]:
            row = case.read.rows[place["interval"]]
            assert (row.rank, row.worker) == (place["rank"], place["worker"])
            if bar["kind"] == "wait":
                inside = (row.begin - origin) * case.read.tick_s, (row.end - origin) * case.read.tick_s
                assert inside[0] - 1e-12 <= place["begin_s"] < place["end_s"] <= inside[1] + 1e-12


def test_the_critical_path_is_the_step(case: Case) -> None:
    """The critical path covers the whole launch without holes. Each link is an instruction. It follows either the
    previous instruction of the same worker, or the end of a wait. In the second case, the link before it is the
    instruction whose signal ended the wait."""
    path, rows, tick = case.summary["critical_path"], case.read.rows, case.read.tick_s
    begin, end = launches(case)[max(row.launch for row in rows)]
    links = path["links"]
    assert path["seconds"] == pytest.approx((end - begin) * tick, rel=1e-12)
    assert sum(path["by_instruction"].values()) + path["gap_s"] == pytest.approx(path["seconds"], rel=1e-12)
    assert links[0]["after"] == "start" and links[0]["begin_s"] - links[0]["gap_s"] == pytest.approx(0, abs=tick / 2)
    assert links[-1]["end_s"] == pytest.approx(path["seconds"], abs=tick / 2)
    spent: Counter[str] = Counter()
    for link in links:
        spent[link["instruction"]] += link["end_s"] - link["begin_s"]
        assert name(case.program, rows[link["interval"]]) == link["instruction"]
        assert link["end_s"] >= link["begin_s"] and link["gap_s"] >= 0
    assert dict(spent) == pytest.approx(path["by_instruction"], abs=tick / 2)
    for before, link in pairwise(links):
        assert link["begin_s"] - link["gap_s"] == pytest.approx(before["end_s"], abs=tick / 2)
        if link["after"] == "order":
            assert (before["rank"], before["worker"]) == (link["rank"], link["worker"])
        else:
            assert link["after"] == "wait"


def test_overlaps(case: Case) -> None:
    overlap = case.summary["overlap"]
    hidden = ahead = under = loaded = 0
    for rows in lanes(case).values():
        own: dict[tuple[int, ...], int] = {}
        for row in rows:
            key = row.launch, row.layer, row.number
            if row.kind == COMPUTE:
                own[key] = min(own.get(key, row.begin), row.begin)
        parts = [(row.begin, row.end, ("is", row.kind)) for row in rows if row.kind != LOAD]
        for row in (row for row in rows if row.kind == LOAD):
            until = min(row.end, own.get((row.launch, row.layer, row.number), row.end))
            parts += [(row.begin, row.end, ("load", 0)), (row.begin, max(until, row.begin), ("ahead", 0))]
        for begin, end, active in sweep(parts):
            computes = ("is", COMPUTE) in active
            covers = computes or ("is", COUNTER_WAIT) in active or ("is", PAGE_WAIT) in active
            ahead += (end - begin) * active["ahead", 0]
            hidden += (end - begin) * active["ahead", 0] * covers
            loaded += (end - begin) * active["load", 0]
            under += (end - begin) * active["load", 0] * computes
    assert overlap["inside_worker"] == (pytest.approx(hidden / ahead) if ahead else None)
    assert overlap["loads_under_compute"] == (pytest.approx(under / loaded) if loaded else None)
    work = [(row.begin, row.end, row) for row in case.read.rows if row.kind == COMPUTE]
    busy = several = ranks = 0
    for begin, end, active in sweep(work):
        phases = {(row.layer, phase_number(case.program, row)) for row in active}
        busy += (end - begin) * bool(active)
        several += (end - begin) * (len(phases) > 1 and len({(row.rank, row.worker) for row in active}) > 1)
        ranks += (end - begin) * (len(phases) > 1 and len({row.rank for row in active}) > 1)
    assert overlap["phases"] == pytest.approx(several / busy)
    assert overlap["across_ranks"] == (pytest.approx(ranks / busy) if case.program.ranks > 1 else None)


def test_resources(case: Case) -> None:
    """The rates of the resources follow from the costs that the executed instructions declare. The FLOPs and bytes of
    attention come from the trace instead."""
    program, done = case.program, Counter[tuple[str, int]]()
    number = {launch: n for n, launch in enumerate(sorted(launches(case)))}
    ran = {(r.launch, r.layer, r.rank, r.number): r for r in case.read.rows if r.kind == COMPUTE}
    declared: dict[tuple[int, int], list[float]] = {}
    for segment in range(3):
        for phase, dims, rows, columns in program.by_phase(segment):
            if phase.control:
                continue
            work, sent = (
                cost(phase, columns, dims),
                link_bytes_each(phase, columns, dims) if dims.split.tp > 1 else None,
            )
            for n, row in enumerate(rows.tolist()):
                each = [work.matrix_flops[n], work.vector_flops[n], work.memory_bytes[n]]
                to = sent[n].tolist() if sent is not None else []
                declared[segment, row] = [*each, loads(phase, columns, dims).all[n], *to]
    for row in ran.values():
        words = program.numbered(segment_of(row))[0][row.number]
        phase = program.forward.by_number[phase_number(program, row)]
        values = declared.get((segment_of(row), row.number))
        if values is None:
            continue
        matrix, vector, memory, cache, *to = values
        if phase.operation is Operation.ATTENTION and case.read.attention:
            slot = phase.columns(words[None])["slot"][0]
            matrix, memory = case.read.attention[number[row.launch], row.rank, int(slot)]
            cache = memory
        amounts = {"matrix": matrix, "vector": vector, "memory": memory, "cache": cache, "link out": sum(to)}
        for resource, amount in amounts.items():
            done[resource, row.rank] += amount
        for peer, amount in enumerate(to):
            done["link in", peer] += amount
    seconds = steps(case) * case.read.tick_s
    for r in case.summary["resources"]:
        rates = [done[r["name"], rank] / seconds for rank in range(program.ranks)]
        assert r["rate"] == pytest.approx(sum(rates) / len(rates), rel=1e-9)
        assert r["fraction"] == pytest.approx(r["rate"] / r["peak"])
        assert r["ranks"] == pytest.approx([rate / r["peak"] for rate in rates])
        assert case.summary["waterfall"]["times"][r["name"]] == pytest.approx(
            max(rates) / r["peak"] * case.summary["step_s"]
        )
        span = max(row.end for row in case.read.rows) + 1 - min(row.begin for row in case.read.rows)
        mean = sum(r["curve"]) / len(r["curve"])
        assert mean * span == pytest.approx(r["fraction"] * steps(case), rel=0.01, abs=1e-4 * span)
    assert {r["name"] for r in case.summary["resources"]} == {n for (n, _), amount in done.items() if amount}
