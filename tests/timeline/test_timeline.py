"""Tests the timeline's numbers with traces whose results are known, and its page, Perfetto file and text against
traces."""

import io
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
from commands import Cli
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb
from rich.console import Console
from synthetic import record

from megakernel import machine
from megakernel.errors import MegakernelError
from megakernel.isa.record import ALL_RANKS
from megakernel.isa.record import counter_word as word
from megakernel.program import Program
from megakernel.program.part import Signals
from megakernel.timeline import compare, page, render, resolve, summarise, write_perfetto
from megakernel.timeline.compare import Comparison
from megakernel.timeline.overlap import compute_bound
from megakernel.timeline.resolve import Resolved
from megakernel.timeline.resources import curves, peaks
from megakernel.timeline.summary import Summary
from megakernel.timeline.waits import Causes
from megakernel.trace import EPILOGUE, PROLOGUE, IntervalKind, Role, Trace
from megakernel.units import bytes_text, figure, scaled, seconds

COMPUTE, WAIT, LOAD, STORE = IntervalKind.COMPUTE, IntervalKind.COUNTER_WAIT, IntervalKind.LOAD, IntervalKind.STORE
Rows = list[tuple[int, ...]]
TRACKS = {COMPUTE: "compute", WAIT: "wait", LOAD: "load", STORE: "store"}
SECOND = 1.0  # a tick of hand-made traces is one second


def chain() -> Program:
    """Return a program for two workers and two layers. Worker 0 has embed, then attn_norm (record 0 of the body) and
    o_proj (1) in each layer. Worker 1 has qkv_rope (2) and join (3) in each layer, then final_norm."""
    tile = (0, 32, 0, 32)
    norm = record("attn_norm", (0, 32), [word(0)], [word(1)])
    body = [
        [norm, record("o_proj", tile, [word(3)], [word(0, next_layer=True)])],
        [record("qkv_rope", tile, [word(1)], [word(2)]), record("join", (), [word(2)], [word(3)])],
    ]
    epilogue = [[], [record("final_norm", (0, 4), [word(0, indexed=True)], [])]]
    dims = synthetic.dims(2, tokens=64, row_block=32)
    return synthetic.program(dims, [[record("embed", (0, 32), [], [word(0)])], []], body, epilogue, counters=4)


def rows(*items: tuple[IntervalKind, int, int, int, int, int], rank: int = 0, role: Role = Role.WORKER) -> Rows:
    """Make trace rows from tuples of (kind, worker, record, layer, begin, end)."""
    return [(b, e, r, 1, w, layer, rank, role, kind, 0) for kind, w, r, layer, b, e in items]


def two_ranks(body: list[list[list[int]]]) -> Program:
    """Return a program for two ranks with one worker each and with these streams in its body."""
    return synthetic.program(synthetic.dims(1), [[], []], body, [[], []], counters=1, ranks=2)


CHAIN = rows(
    (COMPUTE, 0, 0, PROLOGUE, 0, 10),
    (COMPUTE, 0, 0, 0, 10, 20),
    (WAIT, 1, 2, 0, 0, 21),
    (LOAD, 1, 2, 0, 5, 25),
    (COMPUTE, 1, 2, 0, 25, 50),
    (COMPUTE, 1, 3, 0, 50, 50),
    (WAIT, 0, 1, 0, 20, 52),
    (COMPUTE, 0, 1, 0, 52, 60),
    (WAIT, 1, 2, 1, 50, 71),
    (COMPUTE, 0, 0, 1, 60, 70),
    (COMPUTE, 1, 2, 1, 71, 90),
    (COMPUTE, 1, 3, 1, 90, 90),
    (WAIT, 0, 1, 1, 70, 91),
    (COMPUTE, 0, 1, 1, 91, 99),
    (WAIT, 1, 0, EPILOGUE, 90, 99),
    (COMPUTE, 1, 0, EPILOGUE, 99, 100),
)


def step(
    intervals: Rows = CHAIN, p: Program | None = None, target: machine.Machine | None = None, **header: int
) -> Resolved:
    p = p or chain()
    return resolve(p, synthetic.trace(p, intervals, tick_s=SECOND, **header), target)


def summary(intervals: Rows = CHAIN, p: Program | None = None, target: machine.Machine | None = None) -> Summary:
    return summarise(step(intervals, p, target))


def simulated(p: Program) -> Resolved:
    return resolve(p, synthetic.run(p))


def test_waits_name_the_producers_of_their_counters() -> None:
    s = summarise(step(dropped=3))
    assert s.dropped == 3
    found = {(w.instruction, w.cause): (w.count, w.total_s) for w in s.waits}
    assert found == {
        ("qkv_rope", "attn_norm"): (2, 42),
        ("o_proj", "qkv_rope"): (2, 53),  # through the join
        ("final_norm", "o_proj"): (1, 9),  # an INDEXED wait (the step table names its counter)
    }


def test_the_first_layer_waits_for_the_prologue() -> None:
    s = summary(rows((WAIT, 0, 0, 0, 0, 5), (WAIT, 0, 0, 1, 5, 7)))
    assert {w.cause: w.total_s for w in s.waits} == pytest.approx({"embed": 5, "o_proj": 2})


def test_signals_to_every_rank_have_a_cause_there() -> None:
    tile = (0, 32, 0, 32)
    p = two_ranks([[record("o_proj", tile, [], [word(0, rank=ALL_RANKS)])], [record("mlp_norm", (0, 32), [word(0)])]])
    waiting = rows((WAIT, 0, 1, 0, 0, 60), (COMPUTE, 0, 1, 0, 60, 100), rank=1)
    s = summary(rows((COMPUTE, 0, 0, 0, 0, 60)) + waiting, p)
    assert [(w.instruction, w.cause) for w in s.waits] == [("mlp_norm", "o_proj")]
    assert s.exposed_communication == pytest.approx(60 / 200)
    assert summary().exposed_communication == 0


def test_a_remote_wait_under_compute_is_not_exposed() -> None:
    """The input loader of rank 1 waits for rank 0 from tick 20 to tick 60, and its worker computes until tick 35. So 25
    of the 2 x 100 ticks of the two ranks are exposed communication, in one launch and in two equal ones."""
    tile = (0, 32, 0, 32)
    o_proj = [record("o_proj", tile, [], [word(0, rank=ALL_RANKS)])]
    body = [o_proj, [record("qkv_rope", tile), record("mlp_norm", (0, 32), [word(0)], [])]]
    intervals = rows((COMPUTE, 0, 0, 0, 0, 60), role=Role.CONSUMER)
    intervals += rows((COMPUTE, 0, 1, 0, 0, 35), (COMPUTE, 0, 2, 0, 60, 100), rank=1, role=Role.CONSUMER)
    intervals += rows((WAIT, 0, 2, 0, 20, 60), rank=1, role=Role.INPUT_LOADER)
    again = [(b + 1000, e + 1000, r, 7, *rest) for b, e, r, _, *rest in intervals]
    for launches in (intervals, intervals + again):
        assert summary(launches, two_ranks(body)).exposed_communication == pytest.approx(25 / 200)


def test_memory_bound_work_beside_compute_bound_work() -> None:
    p = chain()
    balanced = replace(machine.load("h100"), matrix_flops=1.0, memory_bytes_per_s=1.0)
    bound = [p.forward.by_name[name].number for name in ("qkv_rope", "o_proj")]
    assert compute_bound(step(p=p, target=balanced)) == {*bound}
    starved = replace(balanced, matrix_flops=1e9)
    assert compute_bound(step(p=p, target=starved)) == set()
    apart = rows((COMPUTE, 0, 0, 0, 0, 40), (COMPUTE, 1, 2, 0, 30, 80))
    assert summary(apart, p, balanced).overlap.across_workers == pytest.approx(10 / 40)
    assert summary(apart, p, starved).overlap.across_workers == 0
    both_bound = rows((COMPUTE, 0, 1, 0, 0, 40), (COMPUTE, 1, 2, 0, 0, 40), (COMPUTE, 0, 0, 0, 40, 80))
    assert summary(both_bound, p, balanced).overlap.across_workers == 0
    alone = rows((COMPUTE, 0, 0, 0, 0, 40), (COMPUTE, 0, 1, 0, 30, 80))
    assert summary(alone, p, balanced).overlap.across_workers == 0  # both instructions run on one worker
    assert summary(rows((COMPUTE, 0, 1, 0, 0, 40)), p, balanced).overlap.across_workers is None


def test_critical_path_of_a_known_chain() -> None:
    path = summary().critical_path
    layer = ["attn_norm", "qkv_rope", "join", "o_proj"]
    assert [link.instruction for link in path.links] == ["embed", *layer, *layer, "final_norm"]
    after = "start order wait order wait order wait order wait wait"
    assert " ".join(link.after for link in path.links) == after
    assert path.seconds == 100
    spent = {"qkv_rope": 44, "attn_norm": 20, "o_proj": 16, "embed": 10, "final_norm": 1, "join": 0}
    assert path.by_instruction == spent
    assert path.gap_s == pytest.approx(9)
    assert (path.links[2].begin_s, path.links[2].end_s, path.links[2].worker, path.links[2].layer) == (25, 50, 1, 0)


def test_releasers_are_the_true_ones() -> None:
    """In a simulated trace, every wait has a releaser: the interval whose end signalled the counter last. This includes
    INDEXED waits, whose counter the step's inputs select. On one rank, each wait ends exactly one signal latency after
    its releaser. On several ranks, it ends at least 400 ns after its releaser."""
    p = synthetic.llama(layers=3, workers=5, row_blocks=3, tiles=6)
    for r, least in ((simulated(p), 40), (resolve(*synthetic.node(4, 16)), 400)):
        found, waits = r.releaser, np.flatnonzero(r.kind(WAIT))
        assert len(waits) > least and (found[waits] >= 0).all() and (found[~r.kind(WAIT)] == -1).all()
        late = r.end[waits] - r.end[found[waits]]
        assert (late >= 400).all() if r.rows["rank"].any() else (late == synthetic.SIGNAL_NS).all()
    assert (r.rows["rank"][waits] != r.rows["rank"][found[waits]]).any()


OUTSIDE = ((0, 9, 0), (2, 0, 0), (0, 0, 2))  # (record, worker, layer); the program lacks one of the three


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, t: Trace(replace(t.header, program="0" * 16), t.intervals), "is of program 0000"),
        (lambda p, t: Trace(t.header, t.intervals[:0]), "no intervals"),
        (lambda p, t: replace(t, attention=np.zeros((1, 1, 9, 2))), "attention does not fit"),
        *((lambda p, t, at=at: synthetic.trace(p, rows((COMPUTE, *at, 0, 1))), "interval 0 of") for at in OUTSIDE),
    ],
)
def test_a_trace_that_does_not_fit_is_refused(change, message: str) -> None:
    good = step()
    with pytest.raises(MegakernelError, match=message):
        resolve(good.program, change(good.program, good.trace))


def test_work_is_spread_over_the_intervals_that_did_it() -> None:
    """The FLOPs of an O projection are spread over its COMPUTE interval [0, 60), the bytes of its weights over its LOAD
    interval [0, 20), and the bytes that it sends over its STORE interval [60, 80)."""
    d = synthetic.dims(1, tp=2)
    tile = (0, 32, 0, 64)  # rows of row block 0, whose owner is rank 0
    p = synthetic.program(d, [[], []], [[], [record("o_partial", tile, tp=2)]], [[], []], counters=1, ranks=2)
    own = {"rank": 1, "role": Role.CONSUMER}
    intervals = rows((COMPUTE, 0, 0, 0, 0, 60), **own) + rows((LOAD, 0, 0, 0, 0, 20), rank=1, role=Role.LOADER)
    intervals += rows((STORE, 0, 0, 0, 60, 80), rank=1, role=Role.STORER)
    r = step(intervals, p, machine.load("h100"))
    amounts = curves(r, r.period)  # a bin per tick
    flops, weights, sent = 2 * 32 * 64 * 64, 64 * 64 * 2, 32 * 64 * 2
    matrix, vector, memory, cache, out, into = amounts.transpose(1, 0, 2)
    assert matrix[1, :60] == pytest.approx(flops / 60) and matrix.sum() == pytest.approx(flops)
    assert memory[1, :20] == pytest.approx(weights / 20) and memory.sum() == pytest.approx(weights)
    read = 32 * 64 * 2
    assert cache[1, :20] == pytest.approx((weights + read) / 20) and cache.sum() == pytest.approx(weights + read)
    assert out[1, 60:80] == pytest.approx(sent / 20) and out.sum() == pytest.approx(sent)
    assert into[0, 60:80] == pytest.approx(sent / 20) and into.sum() == pytest.approx(sent) and not vector.any()
    for bins in (1, 3, 7, 64):
        assert curves(r, bins).sum(axis=2) == pytest.approx(amounts.sum(axis=2))


def test_instants_are_a_tick_long_and_give_finite_numbers() -> None:
    r = step(rows((COMPUTE, 0, 1, 0, 5, 5), (COMPUTE, 1, 2, 0, 5, 5)), target=machine.load("h100"))
    spread = curves(r, 4)
    assert np.isfinite(spread).all() and spread.any()
    found = summarise(r)
    assert all(np.isfinite([x.rate, x.fraction, *x.curve]).all() for x in found.resources) and found.resources
    assert [i.share for i in found.instructions] == [0, 0]


def test_a_gap_at_the_end_of_a_worker_leads_to_its_last_interval() -> None:
    r = step()
    bars = {bar.name: bar for bar in summarise(r).waterfall.bars}
    place, *_ = bars["imbalance"].places
    assert (place.worker, place.begin_s, place.end_s) == (0, 99, 100)
    assert r.end[place.interval] == 99


def test_attentions_work_is_that_of_its_items(tmp_path: Path) -> None:
    """The work of an attention instruction is what the trace gives for its attention slot (its list of work items). The
    instruction has slot 1. It runs in two layers of one launch and in one layer of another launch. If a trace has no
    data about slots, the summary says that its figures are without attention."""
    p = synthetic.program(synthetic.dims(2, slots=2), [[]], [[record("attention", (1, 1, 2))]], [[]], counters=1)
    intervals = []
    for at, (launch, layer) in enumerate(((1, 0), (1, 1), (2, 0))):
        begin = 40 * at
        run = rows((LOAD, 0, 0, layer, begin, begin + 10), role=Role.LOADER)
        run += rows((COMPUTE, 0, 0, layer, begin + 20, begin + 40), role=Role.CONSUMER)
        intervals += [(*row[:3], launch, *row[4:]) for row in run]
    told = np.array([[[[7.0, 7.0], [10.0, 600.0]]], [[[7.0, 7.0], [30.0, 90.0]]]])
    plain = synthetic.trace(p, intervals, tick_s=SECOND)
    for saved in (trace := replace(plain, attention=told), plain):
        saved.save(tmp_path / "trace")
        loaded = Trace.load(tmp_path / "trace")
        np.testing.assert_array_equal(loaded.intervals, saved.intervals)
        assert (loaded.attention is None) == (saved.attention is None)
        resolved = resolve(p, loaded)
        matrix, _, memory, *_ = curves(resolved, resolved.period)[0]
        if saved is plain:
            assert not matrix.any() and not memory.any() and summarise(resolved).without_attention
            continue
        computed = [matrix[at : at + 20].sum() for at in (20, 60, 100)]
        read = [memory[at : at + 10].sum() for at in (0, 40, 80)]
        assert (computed, read) == (pytest.approx([10, 10, 30]), pytest.approx([600, 600, 90]))
        assert (matrix.sum(), memory.sum()) == (pytest.approx(50), pytest.approx(1290))
        assert not summarise(resolved).without_attention
    console = Console(file=io.StringIO(), width=120)
    without, whole = (resolve(p, each) for each in (plain, trace))
    render(replace(summarise(without), resources=summarise(whole).resources), console)
    assert "without attention" in console.file.getvalue()
    (tmp_path / "trace").write_bytes((tmp_path / "trace").read_bytes()[:-1])
    with pytest.raises(MegakernelError, match="damaged"):
        Trace.load(tmp_path / "trace")


def test_a_cpu_loads_its_weights_while_it_computes() -> None:
    """If a worker has no loader, the bytes that an instruction loads count in its COMPUTE interval. Its LOAD interval
    is a prefetch during a wait, which loads only a part of these bytes."""
    r = step(rows((LOAD, 1, 2, 0, 0, 10), (COMPUTE, 1, 2, 0, 10, 20)))
    memory = curves(r, r.period)[0, 2]
    assert memory[:10].sum() == 0 and memory[10:20].sum() == memory.sum() > 0


def test_peaks_are_those_of_a_ranks_workers() -> None:
    whole = machine.load("h100")
    half, few = peaks(whole, 66), peaks(whole, 4)
    assert half[:2] == [whole.matrix_flops / 2, whole.vector_flops / 2]
    assert half[3] == whole.cache_bytes_per_s / 2 and half[4:] == [whole.link_bytes_per_s] * 2
    # Half of the SMs can load all that the memory delivers, but four cannot.
    assert half[2] == whole.memory_bytes_per_s and few[2] == 4 * whole.worker_bytes_per_s < half[2]
    assert peaks(whole, 264)[0] == whole.matrix_flops


def stretched(factor: int, keep: int | None = None) -> Resolved:
    return step([(b * factor, e * factor, *rest) for b, e, *rest in CHAIN[:keep]])


def test_two_traces_of_a_program_compared() -> None:
    c = compare(step(), stretched(3))
    assert c.step_s == (100, 300) and c.ratio == pytest.approx(3)
    assert (c.matched, c.only_first, c.only_second) == (8, 0, 0)  # joins have no counterpart
    qkv = next(i for i in c.instructions if i.name == "qkv_rope")
    assert (qkv.count, qkv.first_mean_s, qkv.second_mean_s, qkv.ratio) == (2, 22, 66, pytest.approx(3))
    assert [i.name for i in c.instructions][:2] == ["qkv_rope", "attn_norm"]  # sorted by time in the first trace
    cut = compare(step(), stretched(1, keep=5))
    assert (cut.matched, cut.only_first, cut.only_second) == (3, 5, 0)


def test_two_programs_are_compared_by_operands() -> None:
    many, one, other = map(simulated, (synthetic.llama(), synthetic.llama(workers=1), synthetic.llama(row_blocks=1)))
    for same in (one, resolve(*synthetic.renumbered(one.program, one.trace))):  # phases have names
        c = compare(many, same)
        assert (c.matched, c.only_first, c.only_second) == (many.program.instructions, 0, 0) and c.ratio and c.ratio > 2
    c = compare(many, other)
    assert c.only_first > 0 and c.only_second == 0
    wide = synthetic.program(synthetic.dims(2), [[]], [[record("o_proj", (64, 32, 0, 32))]], [[]], counters=1)
    with pytest.raises(MegakernelError, match="no instruction in common"):
        compare(step(), step(rows((COMPUTE, 0, 0, 0, 0, 1)), wide))


def test_terminal_table() -> None:
    r = simulated(synthetic.llama())
    console = Console(width=120, record=True, file=io.StringIO())
    render(summarise(r), console)
    text = console.export_text()
    assert all(len(line) <= 120 for line in text.splitlines())
    for wanted in ("per step", "gate_up_silu", "qkv_rope ← attn_norm", "FLOP/s", "critical path"):
        assert wanted in text


def test_comparison_on_the_command_line(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command compares two traces, and computes each set of figures once, whatever files it writes."""
    p = synthetic.llama()
    t = synthetic.run(p)
    rest = t.intervals[t.intervals["layer"] != EPILOGUE].copy()
    for name in ("begin", "end"):
        rest[name] *= 2
    second = replace(t, intervals=rest)
    compared = compare(resolve(p, t), resolve(p, second))
    files = {name: tmp_path / name for name in ("a.program", "a.trace", "b.trace", "c.program", "both.html")}
    p.save(files["a.program"])
    t.save(files["a.trace"])
    second.save(files["b.trace"])
    replace(p, machine="h100").save(files["c.program"])
    made: Counter[type] = Counter()
    for kind in (Resolved, Causes, Signals, Summary, Comparison):

        def counting(
            self: object, *args: object, start: Any = kind.__init__, kind: type = kind, **named: object
        ) -> None:
            made[kind] += 1
            start(self, *args, **named)

        monkeypatch.setattr(kind, "__init__", counting)
    start = ["timeline", str(files["a.program"]), str(files["a.trace"]), "--compare"]
    written = ["-o", str(files["both.html"]), "--perfetto", str(tmp_path / "a.pftrace")]
    status, out, _ = cli.run(*start, str(files["b.trace"]), *written)
    # For each of the two traces, signals are decoded twice: to find the cause of each wait, and what ended it.
    assert status == 0 and made == {Resolved: 2, Causes: 2, Signals: 4, Summary: 2, Comparison: 1}
    assert compared.only_first > 0 and f"{compared.only_first} instructions only in the first" in out
    assert "qkv_rope" in out and re.search(r"  × [\d.]+", out) and files["both.html"].stat().st_size > 0
    assert cli.json(*start, str(files["b.trace"]))["comparison"]["ratio"] == compared.ratio
    for wrong, message in (
        ([files["c.program"], files["b.trace"]], "the trace is of program"),
        ([files["b.trace"]] * 3, "PROGRAM TRACE, not 3 files"),
        ([files["a.program"]], "not a trace file"),
    ):
        assert message in cli.fails(*start, *map(str, wrong))


def perfetto(r: Resolved, folder: Path) -> tuple[list[pb.TracePacket], dict[int, pb.TrackDescriptor]]:
    """Write the Perfetto file of a trace, and return the file's packets and its tracks by id."""
    write_perfetto(folder / "t.pftrace", r)
    trace = pb.Trace()
    trace.ParseFromString((folder / "t.pftrace").read_bytes())
    packets = list(trace.packet)
    return packets, {k.track_descriptor.uuid: k.track_descriptor for k in packets if k.HasField("track_descriptor")}


def test_perfetto_holds_the_trace(tmp_path: Path) -> None:
    r = simulated(synthetic.llama())
    packets, tracks = perfetto(r, tmp_path)
    assert [d.process.process_name for d in tracks.values() if d.HasField("process")] == ["rank 0"]

    slices: list[tuple[object, ...]] = []
    open_at: dict[int, tuple[int, pb.TrackEvent]] = {}
    for packet in (k for k in packets if k.HasField("track_event")):
        event = packet.track_event
        if event.type == pb.TrackEvent.TYPE_COUNTER:
            continue
        if event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            assert event.track_uuid not in open_at  # slices of one track must not overlap
            open_at[event.track_uuid] = (packet.timestamp, event)
        else:
            begin, started = open_at.pop(event.track_uuid)
            track = tracks[event.track_uuid]
            worker = int(tracks[track.parent_uuid].name.removeprefix("rank 0 worker "))
            kind = track.name.removesuffix(" 2")
            notes = tuple((a.name, a.int_value) for a in started.debug_annotations if a.HasField("int_value"))
            family = started.categories[0]
            slices.append((worker, begin, packet.timestamp, kind, started.name, family, notes))
    assert not open_at

    expected = []
    for i in range(len(r)):
        name, track = r.phase(i).name, TRACKS[int(r.rows["kind"][i])]
        if track == "wait":
            name = "waits for " + r.causes.names[r.cause[i]]
        notes = (*r.operands(i).items(), ("launch", 1))
        if (layer := r.layer(i)) is not None:
            notes = (*notes, ("layer", layer))
        family = r.phase(i).family.name.lower()
        expected.append((int(r.lane[i]), int(r.begin[i]), int(r.end[i]), track, name, family, notes))
    assert sorted(slices) == sorted(expected)

    events = [k.track_event for k in packets if k.HasField("track_event")]
    starts = sorted(f for e in events for f in e.flow_ids)
    ends = sorted(f for e in events for f in e.terminating_flow_ids)
    assert starts == ends and len(set(starts)) == int(r.kind(WAIT).sum())


def test_loads_that_overlap_get_tracks_of_their_own(tmp_path: Path) -> None:
    loads = rows((LOAD, 0, 0, 0, 0, 20), (LOAD, 0, 1, 0, 10, 30), (LOAD, 0, 0, 1, 20, 40))
    _, tracks = perfetto(step(loads), tmp_path)
    assert [d.name for d in tracks.values() if d.name.startswith("load")] == ["load", "load 2"]


def test_roles_and_resources_in_perfetto(tmp_path: Path) -> None:
    r = resolve(*synthetic.node(2, 3, layers=1, clock_error_s=2e-6))
    packets, tracks = perfetto(r, tmp_path)
    processes = [d for d in tracks.values() if d.HasField("process")]
    assert [d.process.process_name for d in processes] == ["rank 0 (clock ±2 µs)", "rank 1 (clock ±2 µs)"]
    assert {d.name.removesuffix(" 2") for d in tracks.values() if "worker" not in d.name and d.parent_uuid} == {
        *("loader wait", "loader load", "input loader wait", "consumer compute", "storer store"),
        *("matrix", "vector", "memory", "cache", "link out", "link in"),
    }
    expected = curves(r, 2048)
    for rank, process in enumerate(processes):
        matrix = next(u for u, d in tracks.items() if d.parent_uuid == process.uuid and d.name == "matrix")
        assert tracks[matrix].counter.unit_name == "FLOP/s"
        rate = [k for k in packets if k.track_event.track_uuid == matrix]
        samples = [(k.timestamp, k.track_event.double_counter_value) for k in rate]
        work = sum(value * (b - a) * 1e-9 for (a, value), (b, _) in pairwise(samples))
        assert work == pytest.approx(expected[rank, 0].sum(), rel=1e-3)
        assert samples[-1][1] == 0 and samples[-1][0] <= r.period


def test_page_is_one_file_without_references() -> None:
    r = step()
    text = page((r, summarise(r)))
    assert "@@" not in text and "http:" not in text and "https:" not in text
    assert " src=" not in text and 'href="data:,"' in text and text.count("href=") == 1


def test_ranks_have_as_many_digits_in_perfetto(tmp_path: Path) -> None:
    """Names of ranks have equal numbers of digits, because Perfetto sorts processes by name."""
    body = [[record("attn_norm", (0, 1))] for _ in range(11)]
    p = synthetic.program(synthetic.dims(1), [[]] * 11, body, [[]] * 11, counters=1, ranks=11)
    ran = [row for rank in range(11) for row in rows((COMPUTE, 0, rank, 0, 0, 5), rank=rank)]
    _, tracks = perfetto(step(ran, p), tmp_path)
    names = [d.process.process_name for d in tracks.values() if d.HasField("process")]
    assert names == sorted(names) and names[-1] == "rank 10" and "rank 02" in names


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (seconds(999.4e-6), "999 µs"),
        (seconds(999.7e-6), "1 ms"),
        (seconds(999.7e-9), "1 µs"),
        (seconds(1234.5), "1234 s"),
        (scaled(999.7e9), "1 T"),
        (scaled(999.7e9, "FLOP/s"), "1 TFLOP/s"),
        (bytes_text(999.97e6), "1.0 GB"),
        (bytes_text(999), "999 B"),
        (figure("hops", 4096), ("hops", "4,096")),
        (figure("node_bytes_per_s", 3.6e12), ("node", "3.6 TB/s")),
    ],
)
def test_a_number_has_the_unit_of_its_rounded_value(shown: object, expected: object) -> None:
    assert shown == expected
