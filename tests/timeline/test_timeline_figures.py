"""Tests the timeline's figures: each of them for a trace made by hand, and what must hold in every trace: its parts add
up to the whole, and the work of its instructions is what they declare."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any, NamedTuple

import handmade
import numpy as np
import pytest
import synthetic
from compiled import compiled as small_compiled
from cpu_support import DIMS, RandomCheckpoint
from runner import Piece, Runner
from simulated import step_of

from megakernel import machine as machines
from megakernel.isa import Operation, cost
from megakernel.isa.record import counter_word as word
from megakernel.isa.record import phase_number
from megakernel.isa.traffic import link_bytes
from megakernel.model import ModelConfig
from megakernel.program import Program
from megakernel.scheduler.simulate import simulate
from megakernel.scheduler.simulate.costs import costs_of
from megakernel.targets.hopper import loads
from megakernel.targets.issue import issued
from megakernel.timeline import resolve, summarise
from megakernel.trace import EPILOGUE, PROLOGUE, IntervalKind, Role, Trace

PAGE_WAIT, COUNTER_WAIT = IntervalKind.PAGE_WAIT, IntervalKind.COUNTER_WAIT
LOAD, COMPUTE = IntervalKind.LOAD, IntervalKind.COMPUTE
LOADER, CONSUMER, INPUT_LOADER = Role.LOADER, Role.CONSUMER, Role.INPUT_LOADER


def test_figures_of_a_trace_made_by_hand() -> None:
    """Of two workers, the first computes a norm and, after a load, another one. The loaders and the consumers of the
    second wait, until the first norm has ended, and then compute two tiles. A tick is a second."""
    tile, rows = (0, 32, 0, 32), (0, 32)
    first = [synthetic.record("attn_norm", rows, [], [word(0)]), synthetic.record("mlp_norm", rows)]
    second = [synthetic.record("qkv_rope", tile, [word(0)], []), synthetic.record("o_proj", tile, [word(1)], [])]
    program = synthetic.program(synthetic.dims(1), [[], []], [first, second], [[], []], counters=2)
    intervals = [
        (0, 60, 0, 0, CONSUMER, COMPUTE),
        (80, 95, 1, 0, LOADER, LOAD),
        (95, 100, 1, 0, CONSUMER, COMPUTE),
        (0, 30, 2, 1, LOADER, PAGE_WAIT),
        (5, 48, 3, 1, INPUT_LOADER, COUNTER_WAIT),
        (10, 50, 2, 1, CONSUMER, COUNTER_WAIT),
        (30, 70, 3, 1, LOADER, LOAD),
        (50, 58, 2, 1, CONSUMER, COMPUTE),
        (58, 100, 3, 1, CONSUMER, COMPUTE),
    ]
    made = [(b, e, number, 1, worker, 0, 0, role, kind, 0) for b, e, number, worker, role, kind in intervals]
    s = summarise(resolve(program, synthetic.trace(program, made, tick_s=1.0)))
    assert (s.step_s, s.launches, s.ranks, s.intervals) == (100, 1, 1, 9)
    near = pytest.approx
    assert [(w.busy, w.wait, w.idle) for w in s.per_worker] == [near((0.8, 0, 0.2)), near((0.5, 0.5, 0))]
    assert (s.busy, s.imbalance, s.computing) == near((0.65, 0.8 / 0.65 - 1, (65 + 50) / 200))
    found = {i.name: (i.count, i.total_s, i.median_s, i.share) for i in s.instructions}
    seconds = {"attn_norm": 60, "mlp_norm": 5, "qkv_rope": 8, "o_proj": 42}
    assert found == {name: (1, n, n, near(n / 115)) for name, n in seconds.items()}
    # Counter waits come before page waits, and then those of consumers before others. While a worker computes, no wait
    # counts. From 5 to 10 s, the input loader waits for o_proj, and otherwise a loader or the consumers for qkv_rope.
    waits = {("qkv_rope", 40, 0.8), ("qkv_rope", 5, 0.1), ("o_proj", 5, 0.1)}
    assert {(w.instruction, w.total_s, w.share) for w in s.waits} == waits
    # Of the loads before their instruction begins, from 30 to 58 s and from 80 to 95 s, the first is hidden.
    assert s.overlap.inside_worker == near(28 / 43) and s.overlap.loads_under_compute == near(20 / 55)
    # The first worker's norms run beside tiles from 50 to 60 s and from 95 to 100 s.
    assert s.overlap.phases == near(15 / 100) and s.overlap.across_ranks is None


def test_an_outlier_took_eight_times_the_median_of_its_phase() -> None:
    step = resolve(*synthetic.stalled())
    s = summarise(step)
    [late] = [i for i in s.instructions if i.outliers]
    assert late.outliers == 1 and late.outliers_s == pytest.approx(5e-3, rel=0.01) and late.median_s < 5e-4
    cost = [i.total_s - i.outliers_s for i in s.instructions]
    assert cost == sorted(cost, reverse=True)
    [bar] = [bar for bar in s.waterfall.bars if bar.name == "outliers"]
    assert bar.seconds == pytest.approx(late.outliers_s / len(s.per_worker), rel=1e-3)
    assert [place.interval for place in bar.places] == [int(step.length.argmax())]


class Row(NamedTuple):
    """A record of a trace. The fields are in the order of its bytes."""

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


KINDS = {
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
    trace: Trace
    rows: list[Row]
    summary: dict[str, Any]

    @property
    def tick(self) -> float:
        return float(self.trace.header.tick_s)


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest) -> Case:
    program, trace = KINDS[request.param]()
    rows = [Row(*values) for values in trace.intervals.tolist()]
    return Case(program, trace, rows, asdict(summarise(resolve(program, trace))))


def launches(case: Case) -> dict[int, tuple[int, int]]:
    spans: dict[int, tuple[int, int]] = {}
    for row in case.rows:
        begin, end = spans.get(row.launch, (row.begin, row.end))
        spans[row.launch] = min(begin, row.begin), max(end, row.end)
    return spans


def test_parts_add_up(case: Case) -> None:
    s, spans = case.summary, launches(case)
    steps = sum(end - begin for begin, end in spans.values()) * case.tick
    assert (s["launches"], s["step_s"]) == (len(spans), pytest.approx(steps / len(spans), rel=1e-12))
    each = s["per_worker"]
    assert len(each) == case.program.ranks * case.program.workers
    shares = [(w["busy"], w["wait"], w["idle"]) for w in each]
    assert all(sum(share) == pytest.approx(1) and min(share) >= -1e-9 for share in shares)
    assert sum(w["total_s"] for w in s["waits"]) == pytest.approx(sum(w["wait"] for w in each) * steps, abs=case.tick)
    for shares in ([i["share"] for i in s["instructions"]], [w["share"] for w in s["waits"]]):
        assert not shares or sum(shares) == pytest.approx(1)
    computed = sum(row.end - row.begin for row in case.rows if row.kind in (COMPUTE, IntervalKind.STORE))
    assert sum(i["total_s"] for i in s["instructions"]) == pytest.approx(computed * case.tick)
    ran = {(row.launch, row.layer, row.rank, row.number) for row in case.rows if row.kind == COMPUTE}
    assert sum(i["count"] for i in s["instructions"]) == len(ran)


def test_the_waterfall_adds_up_to_the_step(case: Case) -> None:
    fall, s = case.summary["waterfall"], case.summary
    bars = fall["bars"]
    assert sum(bar["seconds"] for bar in bars) == pytest.approx(s["step_s"], abs=case.tick)
    assert all(bar["seconds"] >= 0 for bar in bars)
    assert bars[0]["kind"] == "least" and bars[0]["seconds"] == min(fall["least_s"], s["step_s"])
    assert fall["least_s"] == max(t for n, t in fall["times"].items() if n not in ("cache", "issue"))
    assert fall["beyond"] == (fall["least_s"] > s["step_s"])
    # Waits and moves have as much of what is left beside the work as they have of the workers' time without work.
    beside = max(0.0, s["step_s"] - max(*fall["times"].values(), s["computing"] * s["step_s"]))
    for share, kinds in ((s["wait"], {"wait"}), (s["busy"] - s["computing"], {"stores", "loads"})):
        seconds = sum(bar["seconds"] for bar in bars if kinds & {bar["kind"], bar["name"]})
        assert seconds == pytest.approx(beside * share / (1 - s["computing"]), abs=case.tick)
    origin = min(row.begin for row in case.rows)
    for bar in bars:
        for place in bar["places"]:
            row = case.rows[place["interval"]]
            assert (row.rank, row.worker) == (place["rank"], place["worker"])
            if bar["kind"] == "wait":
                inside = (row.begin - origin) * case.tick, (row.end - origin) * case.tick
                assert inside[0] - 1e-12 <= place["begin_s"] < place["end_s"] <= inside[1] + 1e-12


def name(program: Program, row: Row) -> str:
    segment = {PROLOGUE: 0, EPILOGUE: 2}.get(row.layer, 1)
    return program.forward.by_number[int(phase_number(program.numbered(segment)[0][row.number]))].name


def test_the_critical_path_is_the_step(case: Case) -> None:
    """The critical path covers the whole launch without holes. Each link is an instruction. It follows either the
    previous instruction of the same worker, or the end of a wait. In the second case, the link before it is the
    instruction whose signal ended the wait."""
    path, rows, tick = case.summary["critical_path"], case.rows, case.tick
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


def declared(case: Case) -> Iterator[tuple[int, Counter[str]]]:
    """Yield the work that instructions declare for all launches, as (rank, amounts by resource). The work of attention
    is in the trace. `issue0` to `issue2` are the seconds that roles need to issue their machine instructions."""
    program, attention, count = case.program, case.trace.attention, len(launches(case))
    machine = machines.MACHINES.get(program.machine)
    for segment in range(3):
        times = count * (program.dims.model.layers if segment == 1 else 1)
        for phase, dims, _, columns in program.by_phase(segment):
            rank, work = dims.split.rank, cost(phase, columns, dims)
            amounts = {"matrix": work.matrix_flops, "vector": work.vector_flops, "memory": work.memory_bytes}
            loaded = None if phase.control else loads(phase, columns, dims)
            amounts["cache"] = np.zeros(1) if loaded is None else loaded.weights + loaded.read
            if phase.operation is Operation.ATTENTION and attention is not None:
                told = attention[:, rank, columns["slot"]].mean(axis=0)
                amounts |= {"matrix": told[:, 0], "memory": told[:, 1], "cache": told[:, 1]}
            sent = link_bytes(phase, columns, dims).sum(axis=0) if dims.split.tp > 1 and not phase.control else []
            for peer, bytes_ in enumerate(sent):
                yield peer, Counter({"link in": times * bytes_})
            if machine and machine.paths and (roles := issued(phase, columns, dims, machine.paths)):
                for n, seconds in enumerate((roles.weight_loader, roles.input_loader, roles.consumers)):
                    amounts[f"issue{n}"] = seconds
            yield rank, Counter({"link out": times * sum(sent)} | {k: times * v.sum() for k, v in amounts.items()})


def test_the_work_is_what_instructions_declare(case: Case) -> None:
    done = [Counter[str]() for _ in range(case.program.ranks)]
    for rank, amounts in declared(case):
        done[rank].update(amounts)
    count, fall = len(launches(case)), case.summary["waterfall"]
    for r in case.summary["resources"]:
        rates = [each[r["name"]] / count / case.summary["step_s"] for each in done]
        assert r["rate"] == pytest.approx(sum(rates) / len(rates), rel=1e-9)
        assert r["fraction"] == pytest.approx(r["rate"] / r["peak"])
        assert r["ranks"] == pytest.approx([rate / r["peak"] for rate in rates])
        assert fall["times"][r["name"]] == pytest.approx(max(rates) / r["peak"] * case.summary["step_s"])
    shown = {r["name"] for r in case.summary["resources"]}
    assert shown == {n for each in done for n, amount in each.items() if amount and "issue" not in n}
    issue = max(each[f"issue{n}"] for each in done for n in range(3)) / case.program.workers / count
    assert fall["times"].get("issue", 0.0) == pytest.approx(issue, rel=1e-9)
    assert bool(issue) == bool(case.program.dims.worker.ring_pages)
