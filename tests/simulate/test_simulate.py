"""Tests the simulator: exact times of handmade work, and properties that hold for every program."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import predictions_host
import pytest
import small_programs
from commands import Cli
from compiled import compiled
from handmade import handmade, small_dims
from handmade import llama as hand_llama
from simulated import FREE, Node, Task, by_node, ended, hand_run, hand_work, held_up, ordered, step_of, unmet_waits
from synthetic import delayed

from megakernel import machine as machines
from megakernel.errors import MegakernelError
from megakernel.isa import Dtype, Operation, Split, slot_work
from megakernel.machine import ONE_ROW
from megakernel.machine import Path as CodePath
from megakernel.model import load_config
from megakernel.program import Program
from megakernel.roofline import step_work
from megakernel.runtime import even_step
from megakernel.scheduler import Options, describe
from megakernel.scheduler.simulate import simulate
from megakernel.scheduler.simulate.costs import TaskCosts, costs_of
from megakernel.scheduler.simulate.native import Work
from megakernel.scheduler.simulate.work import in_turn_s, make_work
from megakernel.scheduler.tune.fastest import predicted_seconds, usual_step
from megakernel.targets.issue import SAMPLE_GROUP
from megakernel.trace import IntervalKind, Intervals

SERVERS = Path(__file__).parents[2] / "benchmarks" / "machines"

# -- shared rates


def test_two_loads_share_memory() -> None:
    """Two loads share a memory of 100 bytes/s equally until the shorter one ends. The load of 100 bytes ends after 2 s.
    The load of 300 bytes then has 200 left, which take 2 s at the full rate."""
    result, rows = hand_run(hand_work([[Task(weights=100)], [Task(weights=300)]]), memory_bytes_per_s=100)
    assert ended(rows, 0) == pytest.approx(2) and ended(rows, 1) == pytest.approx(4)
    assert result.step_s == pytest.approx(4) and result.memory_bytes == 400


EXCHANGE = [[Task(stores={1: 100})], [Task(stores={0: 100})]]


@pytest.mark.parametrize(
    ("streams", "ranks", "costs", "seconds"),
    [
        ([[Task(weights=100)]], 1, {"memory_bytes_per_s": 100, "worker_bytes_per_s": 25}, 4),
        ([[Task(weights=100)], [Task(weights=100)]], 2, {"memory_bytes_per_s": 100}, 1),
        ([[Task(weights=100, compute=1)] * 2], 1, {"memory_bytes_per_s": 10}, 20),
        (EXCHANGE, 2, {"egress_bytes_per_s": 100}, 1),
        (EXCHANGE, 2, {"egress_bytes_per_s": 100, "switch_bytes_per_s": 100}, 2),
    ],
    ids=[
        "a load alone is as fast as its worker",
        "ranks have memories of their own",
        "arithmetic is no faster than its loads",
        "both links at once",
        "the switch bounds all links together",
    ],
)
def test_slowest_rates_bound(streams: list[list[Task]], ranks: int, costs: dict[str, float], seconds: float) -> None:
    assert hand_run(hand_work(streams, ranks=ranks), **costs)[0].step_s == pytest.approx(seconds)


def test_a_loader_asks_for_one_load_after_the_other() -> None:
    asked = [Task(weights=6.0, ask=2.0, compute=0.5), Task(weights=3.0, reads=3.0, ask=4.0, compute=0.5)]
    assert hand_run(hand_work([asked]))[0].step_s == pytest.approx(2.0 + 4.0, rel=1e-6)
    assert hand_run(hand_work([asked]), memory_bytes_per_s=1.0)[0].step_s == pytest.approx(6.0 + 6.0, rel=1e-6)


def test_what_the_machine_code_can_issue_bounds_a_step() -> None:
    """A step takes longer if the loader or the consumers issue instructions slowly."""
    machine, config = machines.load("h200"), load_config("random:llama-3.2-1b")
    program = compiled(config, machine, 1, max_context=128)
    table, costs = even_step(program.dims, 1, 128), costs_of(machine)
    assert costs.paths is not None
    fast = dict.fromkeys(costs.paths, CodePath(0.0, 0.0))

    def step(**seconds: float) -> float:
        slow = fast | {ONE_ROW + name: CodePath(value, value) for name, value in seconds.items()}
        return simulate(program, machine, table, costs=replace(costs, paths=slow)).step_s

    unbound = step()
    assert unbound < simulate(program, machine, table, costs=costs).step_s
    assert min(step(weight_page=2e-6), step(dot_pair=4e-6), step(dot_unit=8e-6)) > 1.2 * unbound
    groups = math.ceil(128256 / SAMPLE_GROUP)
    assert step(sample_step=9e-6) == pytest.approx(unbound + groups * (9e-6 - costs.latency_s), rel=0.01)


def test_what_the_cache_holds_is_not_read_again() -> None:
    tasks = [Task(weights=100, weight_key=key) for key in (0, 1, 0)]
    for capacity, from_memory in ((200, 200), (150, 300)):
        work = hand_work([tasks], keys=[100, 100])
        result, _ = hand_run(work, memory_bytes_per_s=100, cache_bytes_per_s=1000, cache_bytes=capacity)
        assert (result.memory_bytes, result.cache_bytes) == (from_memory, 300)
        assert result.step_s == pytest.approx(from_memory / 100 + (0.1 if capacity == 200 else 0))


@pytest.mark.parametrize(
    ("stores", "rate", "ends"),
    [
        ([[{1: 100}, {1: 300}], [None, None]], 100, [2, 4]),
        ([[{2: 100}], [{2: 100}], [None]], 100, [2, 2]),
        ([[{1: 60}, {2: 60}], [None, None], [None, None], [{2: 60}, {2: 60}]], 90, [1, 2, 2, 2]),
    ],
    ids=["a sender's port", "a receiver's port", "max-min fair"],
)
def test_links_are_shared(stores: list[list[dict[int, float] | None]], rate: float, ends: list[float]) -> None:
    """Stores share the ports of their sending and receiving ranks. `stores[rank][worker]` maps each receiving rank to
    the number of bytes that this worker sends to it. In the max-min case, every port has 90 bytes/s. Three stores share
    the port of rank 2 (one from rank 0 and two from rank 3), so each gets 30 bytes/s. The store from rank 0 to rank 1
    gets the other 60 bytes/s of rank 0's port."""
    streams = [[Task(stores=sent)] if sent else [] for rank in stores for sent in rank]
    _, rows = hand_run(hand_work(streams, ranks=len(stores)), egress_bytes_per_s=rate)
    assert [ended(rows, number) for number in range(len(ends))] == pytest.approx(ends)


def test_a_small_access_waits_behind_the_bytes_that_are_on_their_way() -> None:
    """A worker begins to load 100 bytes at 10 bytes/s. Of these, as many are on their way as its window has room for.
    A task of another worker has a fixed time of 1 s before its first page and of 2 s after its last, and a signal takes
    3 s. The first and the last of them wait for bytes that are on their way, if `accessing` says that the fixed times
    include accesses to memory; the load ends before the second one."""
    load, producer = Task(weights=100), Task(compute=8, signals=[(0, 0)])
    for accessing, window, waited in ((0, 40, 0), (0b110, 0, 0), (0b110, 40, 4), (0b110, 400, 10)):
        work = hand_work([[load], [producer], [Task(waits=[0])]])
        work.tasks["start_s"][1], work.tasks["end_s"][1], work.tasks["accessing"][1] = 1, 2, accessing
        _, rows = hand_run(work, memory_bytes_per_s=10, window_bytes=window, signal_s=3)
        assert times(rows, IntervalKind.COMPUTE, "begin", 1) == pytest.approx([1 + waited])
        begin = 1 + waited
        left = max(0.0, min(window / 10 * (accessing > 0), 10 - begin))  # when the task begins
        assert times(rows, IntervalKind.COMPUTE, "end", 1) == pytest.approx([begin + 8 + 2 + left])


def test_workers_prepare_while_they_wait() -> None:
    """What a task prepares takes 4 s, beside the wait for its inputs, which arrive after 3 or 8 s."""
    for arrival in (3, 8):
        work = hand_work([[Task(compute=arrival, signals=[(0, 0)])], [Task(waits=[0])]])
        work.tasks["prepare_s"][1] = 4
        _, rows = hand_run(work)
        assert times(rows, IntervalKind.COMPUTE, "begin", 1) == pytest.approx([max(arrival, 4)])


def test_stages_of_a_pipeline_wait_for_each_other() -> None:
    """Of two equally fast stages with room for n steps between them, each works n / (n + 1) of the time."""
    one = np.ones(1)
    for steps in (1.0, 2.0, 7 / 3):
        assert in_turn_s(one, one, steps)[0] == pytest.approx((steps + 1) / steps, rel=1e-6)
    assert in_turn_s(one, 0 * one, 1.0)[0] == 1 == in_turn_s(0 * one, one, 1.0)[0]
    assert in_turn_s(one, one / 2, 50.0)[0] == pytest.approx(1)


def test_inputs_of_a_matmul_are_loaded_again_in_each_lap() -> None:
    """The down projection of 8B has 14 pages of weights for 8 columns, and 4 pages of inputs of two rows, which all
    rings of 13 pages hold together with only 8 pages of weights. The next lap's inputs are late, whatever memory
    delivers."""
    machine, config = machines.load("h100"), replace(load_config("random:llama-3.1-8b"), layers=1)
    program = compiled(config, machine, 2, max_seqs=1, max_context=128)
    costs = costs_of(machine)
    work = make_work(program, even_step(program.dims, 1, 128), costs)
    assert costs.paths is not None
    phases = program.forward.by_number
    names = [phases[n].name if n in phases else "" for n in work.records["phase"].tolist()]
    down = work.tasks[work.records["first_task"][names.index("down_proj")]]
    laps = math.ceil(28 * 2 / 8)
    idle = (laps - 1) * (4 * costs.paths["input_page"].warm + costs.latency_s)
    work_s = 28 * costs.paths["dot_pairs"].warm + 2 * costs.paths["dot_unit"].warm
    assert down["tail_s"] > idle and down["compute_s"] == pytest.approx(work_s + idle)


# -- one worker


def times(rows: Intervals, kind: IntervalKind, edge: str, instruction: int | None = None) -> list[float]:
    """Return the times, in seconds, at which intervals of a kind begin or end, as `edge` says."""
    wanted = rows["kind"] == kind
    if instruction is not None:
        wanted &= rows["instruction"] == instruction
    return (rows[edge][wanted] / 1e9).tolist()


def test_pipelining_hides_loads_stores_and_set_up() -> None:
    """With pipelining, four tasks of 10 s take 40 s plus the first task's set-up and load and the last task's store.
    Without pipelining, every task's set-up, load and store add to the time."""
    work = hand_work([[Task(weights=100, compute=10, stores={0: 1})] * 4])
    costs = {"memory_bytes_per_s": 100, "ring_bytes": 10, "store_s": 3, "dispatch_s": 2, "latency_s": 0.5}
    overlapped, _ = hand_run(work, **costs)
    alone, _ = hand_run(work, in_flight=1, **costs)
    assert overlapped.step_s == pytest.approx(2 + 0.5 + 4 * 10 + 3)
    assert alone.step_s == pytest.approx(4 * (2 + 0.5 + 10 + 3))


def test_the_next_weights_wait_for_pages() -> None:
    """Weights pass through a ring of on-chip memory pages, here with 20 bytes. The first task computes with its 100
    bytes in 10 s. At 8 s, only its last 20 bytes are in the ring. Their pages are freed from then on, so the second
    task's weights begin to load."""
    work = hand_work([[Task(weights=100, compute=10), Task(weights=50, compute=1)]])
    _, rows = hand_run(work, ring_bytes=20)
    assert times(rows, IntervalKind.PAGE_WAIT, "end") == pytest.approx([8])


@pytest.mark.parametrize(
    ("weights", "ahead", "known", "ends"),
    [([100], 0, 10, 18), ([100], 30, 10, 15), ([100], 900, 10, 14), ([100], 30, 3, 10), ([60, 40], 900, 10, 14)],
)
def test_the_cache_gets_what_the_ring_cannot(weights: list[float], ahead: float, known: float, ends: float) -> None:
    """While a task waits for a counter, weights for which the ring (on-chip memory) has no room are prefetched into the
    cache, at most `ahead` bytes, 10 at a time. The ring takes the first 20 of 100 bytes in 2 s. At time `known`, the
    wait ends. Memory must then deliver only the bytes that were not prefetched, and the one page on its way.
    Prefetches go on to the next task."""
    consumers = [Task(weights=n, waits=[0]) for n in weights]
    work = hand_work([[Task(compute=known, signals=[(0, 0)])], consumers])
    rates = {"memory_bytes_per_s": 10, "cache_bytes_per_s": 20, "ring_bytes": 20}
    result, _ = hand_run(work, ahead_bytes=ahead, page_bytes=10, **rates)
    assert result.step_s == pytest.approx(ends)
    assert (result.memory_bytes, result.cache_bytes) == (100, 100)


def test_an_output_holds_pages_until_it_is_stored() -> None:
    """The first task's output occupies 60 of the 100 bytes of the ring (on-chip memory) until it is stored at 13 s.

    Each task has 50 bytes of weights, so the output and one task's weights exceed the ring by 10 bytes. So a task's
    load begins when the previous task has computed with its first 10 bytes and freed them. This is at 2 s for the
    second task, and at 10.2 s for the third.
    """
    tasks = [Task(weights=50, compute=10, output=60, stores={0: 1}), Task(weights=50, compute=1), Task(weights=50)]
    _, rows = hand_run(hand_work([tasks]), ring_bytes=100, store_s=3, in_flight=3)
    assert times(rows, IntervalKind.PAGE_WAIT, "end") == pytest.approx([2, 10.2])


def test_the_next_weights_load_while_inputs_are_waited_for() -> None:
    """The second instruction's weights load from 2 s to 7 s, while the first one waits for its inputs until 10 s."""
    worker = [Task(weights=20, reads=10, compute=1, waits=[0]), Task(weights=50, compute=1)]
    work = hand_work([[Task(compute=10, signals=[(0, 0)])], worker])
    result, rows = hand_run(work, memory_bytes_per_s=10, ring_bytes=100)
    loads = (times(rows, IntervalKind.LOAD, edge, 2)[0] for edge in ("begin", "end"))
    assert [*loads, result.step_s] == pytest.approx([2, 7, 12])


def test_weights_load_before_a_wait_and_activations_after_it() -> None:
    """A consumer loads its 50 bytes of weights in the first 5 s, and its activations after its wait. The producer ends
    at 10 s, its signal takes 1 s, and the 30 bytes of activations take 3 s more."""
    producer = Task(compute=10, signals=[(0, 0)])
    consumer = Task(weights=50, reads=30, compute=1, waits=[0])
    result, rows = hand_run(hand_work([[producer], [consumer]]), memory_bytes_per_s=10, signal_s=1)
    assert result.step_s == pytest.approx(10 + 1 + 3)
    assert times(rows, IntervalKind.LOAD, "end") == pytest.approx([5, 14])
    assert [times(rows, IntervalKind.COUNTER_WAIT, edge)[0] for edge in ("begin", "end")] == pytest.approx([0, 11])


def test_a_signal_to_another_rank_takes_longer() -> None:
    work = hand_work([[Task(compute=10, signals=[(-1, 0)])], [Task(waits=[0])]], ranks=2)
    result, _ = hand_run(work, signal_s=1, remote_signal_s=3)
    assert result.step_s == pytest.approx(13)


def test_a_queue_evens_out_what_streams_do_not() -> None:
    """Four jobs of 3, 1, 1 and 1 s take 4 s if each of two workers has a fixed pair of jobs, and 3 s if the two workers
    claim the jobs from a queue."""
    jobs = [Task(compute=t) for t in (3, 1, 1, 1)]
    static, _ = hand_run(hand_work([jobs[:2], jobs[2:]]), in_flight=1)
    claimed, rows = hand_run(hand_work([[Task(drain=4)], [Task(drain=4)]], queue=jobs), in_flight=1, claim_in_flight=1)
    assert static.step_s == pytest.approx(4) and claimed.step_s == pytest.approx(3)
    assert sorted(rows["worker"][rows["kind"] == IntervalKind.COMPUTE].tolist()).count(0) == 2  # a job and the drain


def test_a_claim_waits_for_the_loads_of_the_instruction_before() -> None:
    """A worker claims its next job when it requests the last bytes of its current one. The set-up of the first two jobs
    ends at 0.5 s. They then compute for 10 and 20 s. The ring (on-chip memory) has room for the last 20 of a job's 100
    bytes when the first 80 bytes are freed: after 8 s for the first job, and 16 s for the second."""
    jobs = [Task(weights=100, compute=t) for t in (10, 20, 10, 10)]
    work = hand_work([[Task(drain=4)], [Task(drain=4)]], queue=jobs)
    _, rows = hand_run(work, ring_bytes=20, dispatch_s=0.5)
    assert [times(rows, IntervalKind.FETCH, "begin", n) for n in (4, 5)] == [[8.5], [16.5]]


def test_a_claim_comes_when_the_last_page_is_asked_for_where_loads_bind() -> None:
    """If memory limits a job, the worker claims its next job when it requests the last bytes of this one.

    The ring of shared memory has room for 20 of the job's 100 bytes. So the worker can request the last 20 bytes when
    80 have arrived: after the set-up (0.5 s), 80 bytes at 10 bytes/s (8 s) and the latency (0.25 s). If the output
    occupies half of the ring, only the last 10 bytes fit beside it, so 90 bytes must have arrived (9 s)."""
    for output, claimed in ((0, 0.5 + 8 + 0.25), (10, 0.5 + 9 + 0.25)):
        work = hand_work([[Task(drain=2)]], queue=[Task(weights=100, compute=1, output=output)] * 2)
        _, rows = hand_run(work, memory_bytes_per_s=10, ring_bytes=20, dispatch_s=0.5, latency_s=0.25)
        assert times(rows, IntervalKind.FETCH, "begin", 2) == pytest.approx([claimed])


# -- programs


def costs_everywhere() -> TaskCosts:
    """Return costs under which every operation takes time, but workers never compete for a shared rate."""
    unshared = {"memory_bytes_per_s": 1e15, "cache_bytes_per_s": 1e15, "egress_bytes_per_s": 1e15, "cache_bytes": 1e30}
    return replace(costs_of(machines.MACHINES["h100"]), switch_bytes_per_s=1e15, worker_bytes_per_s=1e9, **unshared)


def machine_of(program: Program) -> machines.Machine:
    return machines.host(program.workers)


def split(step: int) -> list[tuple[str, Program]]:
    """Return a name and a program that splits the attention to a long context into several items."""
    return [("split", small_programs.make(workers=4, tokens=1, max_seqs=1, max_context=4096))]


def wide(step: int) -> list[tuple[str, Program]]:
    """Return a name and a program in which one QKV tile covers several KV heads, so that these share a counter."""
    program = small_programs.make(workers=4, heads=20, kv_heads=20, cols=256)
    columns = next(c for p, *_, c in program.by_phase(1) if p.operation is Operation.ATTENTION)
    assert columns["group_heads"][0] > 1
    return [("wide", program)]


@pytest.mark.parametrize("programs", [small_programs.small, small_programs.large, split, wide])
def test_no_consumer_begins_before_its_producers_have_stored(programs: Callable[[], Any]) -> None:
    for name, program in programs(8):
        table = step_of(program)
        tasks = ordered(program, table)
        assert (table.item_split >= 0).sum() > 1 or programs is not split
        for costs in (costs_everywhere(), costs_of(machine_of(program))):
            done = simulate(program, machine_of(program), table, costs=costs, trace=True)
            assert done.trace is not None
            assert unmet_waits(program, tasks, done.trace) == [], name


@pytest.mark.parametrize("machine", [machines.MACHINES["h100"], machines.host(2)], ids=["h100", "host"])
@pytest.mark.parametrize("o", ["sharded", "replicated"])
@pytest.mark.parametrize("residual", ["dealt", "replicated"])
def test_ranks_with_equal_parts_are_prepared_as_each_alone(
    machine: machines.Machine, o: str, residual: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks divide three KV heads, and neither the FFN nor the vocabulary into equal parts."""
    small = {"layers": 2, "hidden": 96, "ffn": 160, "heads": 6, "kv_heads": 3, "head_dim": 32, "vocab": 491}
    config = replace(load_config("random:llama-3.2-1b"), **small)
    options = Options(o=o, residual=residual)
    program = compiled(config, machine, 40, 6, 4, options, max_seqs=6, max_context=256)
    together = make_work(program, step_of(program), costs_of(machine))
    monkeypatch.setattr(Split, "parts", property(lambda split: (split.rank,)))
    alone = make_work(program, step_of(program), costs_of(machine))
    for field in fields(Work):
        np.testing.assert_equal(getattr(together, field.name), getattr(alone, field.name), field.name)


def test_a_matmul_that_normalises_its_rows_reads_them_in_float32_and_takes_longer() -> None:
    dims = small_dims().changed(dtype=int(Dtype.BF16))
    costs = costs_of(machines.host(2))
    found = []
    for norm in ("own", "inside"):
        program = handmade(dims, forward=hand_llama(dims, norm))
        work = make_work(program, step_of(program), costs)
        number = program.forward.by_name["gate_up_silu"].number
        found.append(work.tasks[work.records["first_task"][work.records["phase"] == number][0]])
    rows = dims.bucket.row_block
    elements = rows * dims.model.hidden
    assert [one["read_bytes"] for one in found] == [2 * elements, 4 * elements]
    more = 4.0 * rows * dims.model.hidden / costs.vector_flops
    assert found[1]["compute_s"] - found[0]["compute_s"] == pytest.approx(more)
    assert found[0]["weight_bytes"] == found[1]["weight_bytes"]


def llama(queue: str = "none", tp: int = 1, workers: int = 4, o: str = "auto", layers: int = 2) -> Program:
    small = {"layers": layers, "hidden": 256, "ffn": 512, "heads": 8, "kv_heads": 4, "head_dim": 32, "vocab": 512}
    config = replace(load_config("random:llama-3.2-1b"), **small)
    machine = machines.host(workers).with_tiles(rows=16, cols=64)
    return compiled(config, machine, 96, 2, tp, Options(queue=queue, o=o), max_seqs=2, max_context=256)


@pytest.mark.parametrize(("o", "tolerance"), [("sharded", 0.0), ("replicated", 0.01)])
def test_the_bytes_between_ranks_are_the_declared_ones(o: str, tolerance: float) -> None:
    """The simulator moves as many bytes between ranks as describe() reports. If the O projection is replicated, they
    may differ by 1 %, because the step table decides which rank normalises each logit row."""
    program = llama(tp=2, o=o)
    found = simulate(program, machine_of(program), step_of(program)).link_bytes
    assert found == pytest.approx(describe(program)["link_bytes"], rel=tolerance)


@pytest.mark.parametrize(("queue", "tp"), [("none", 1), ("body", 2)])
def test_few_layers_predict_the_time_of_all(queue: str, tp: int) -> None:
    program = llama(queue, tp, layers=9)
    machine = machine_of(program)
    found = predicted_seconds(program, machine)
    assert found == pytest.approx(simulate(program, machine, usual_step(program.dims)).step_s, rel=0.02)
    assert predicted_seconds(program, machine, 1.001 * found) == found
    assert predicted_seconds(program, machine, 0.999 * found) == math.inf
    short = llama(queue, tp, layers=1)
    assert predicted_seconds(short, machine) == simulate(short, machine, usual_step(short.dims)).step_s


def test_the_delay_of_one_instruction_moves_only_what_comes_after_it() -> None:
    """A delay moves only the instructions that depend on the delayed one or follow it on its worker. These costs leave
    no shared rate for which workers compete, so a delay cannot spread through contention."""
    program = llama(workers=3)
    table = step_of(program)
    machine, costs = machine_of(program), costs_everywhere()
    base = simulate(program, machine, table, costs=costs, trace=True)
    assert base.trace is not None
    layers = range(program.dims.model.layers)
    for number in (0, 11, len(program.body.records) - 1):
        with delayed(1, number, 5e-3):
            stalled = simulate(program, machine, table, costs=costs, trace=True)
        assert stalled.trace is not None
        assert unmet_waits(program, ordered(program, table), stalled.trace) == []
        moved = moved_instructions(base.trace.intervals, stalled.trace.intervals)
        late = {(layer, number) for layer in layers}
        assert late <= moved <= late.union(*(held_up(program, table, each) for each in late))
        assert stalled.step_s <= base.step_s + len(layers) * 5e-3 + 1e-9


def moved_instructions(before: Intervals, after: Intervals) -> set[Node]:
    old, new = (by_node(rows[rows["kind"] == IntervalKind.COMPUTE]) for rows in (before, after))
    assert old.keys() == new.keys()
    ends = {node: (np.sort(old[node]["end"]).astype(int), np.sort(new[node]["end"]).astype(int)) for node in old}
    return {node for node, (was, now) in ends.items() if (abs(was - now) > 1).any()}


def test_the_trace_has_every_instruction_once_and_its_roles() -> None:
    program = llama(tp=2, queue="body")
    table = step_of(program)
    done = simulate(program, machine_of(program), table, costs=costs_everywhere(), trace=True)
    assert done.trace is not None
    np.testing.assert_array_equal(done.trace.attention, slot_work(table)[None])
    rows = done.trace.intervals
    compute = rows[rows["kind"] == IntervalKind.COMPUTE]
    assert len(np.unique(compute[["layer", "instruction"]])) == program.instructions
    assert set(rows["role"].tolist()) == {1, 2, 3, 4}
    assert (rows["end"] >= rows["begin"]).all()
    for role in (3, 4):  # the consumers and the storer each do one thing at a time
        for rank, worker in itertools.product(range(2), range(program.workers)):
            mine = rows[(rows["role"] == role) & (rows["rank"] == rank) & (rows["worker"] == worker)]
            mine = mine[np.argsort(mine["begin"], kind="stable")]
            assert (mine["begin"][1:] >= mine["end"][:-1]).all()


def test_the_same_program_takes_the_same_time() -> None:
    program = llama(tp=2, queue="attention")
    table, machine = step_of(program), machine_of(program)
    runs = [simulate(program, machine, table, trace=trace) for trace in (False, True)]
    assert runs[0].step_s == runs[1].step_s


def test_a_deadlock_is_an_error_that_names_who_waits() -> None:
    program = llama()
    totals = program.totals_first.copy()
    totals[0, np.flatnonzero(totals[0])[0]] += 1
    broken = replace(program, totals_first=totals)
    with pytest.raises(MegakernelError, match="never ends: rank 0 worker"):
        simulate(broken, machine_of(program), step_of(program))
    totals -= 2
    with pytest.raises(MegakernelError, match="than the total that the program states"):
        simulate(replace(program, totals_first=totals), machine_of(program), step_of(program))


def test_a_program_of_other_workers_is_refused() -> None:
    with pytest.raises(MegakernelError, match="4 workers per rank"):
        simulate(llama(), machines.host(3), step_of(llama()))


def test_costs_of_machines() -> None:
    h100, h200 = (costs_of(machines.MACHINES[name]) for name in ("h100", "h200"))
    assert h200.memory_bytes_per_s / h100.memory_bytes_per_s == pytest.approx(4.8 / 3.35)
    assert h200.cache_bytes_per_s == h100.cache_bytes_per_s
    assert costs_of(replace(machines.MACHINES["h100"], name="h100x8")) == h100
    assert h100.unpipelined().in_flight == 1 and not costs_of(machines.host(2)).roles
    with pytest.raises(MegakernelError, match="needs l2_bytes"):
        costs_of(replace(machines.MACHINES["h100"], name="mine", cache_bytes=0.0))
    flops = np.array([2.0 * 64 * 256 * 512, 2.0 * 256 * 512])
    h100_itself = machines.MACHINES["h100"]
    assert h100_itself.paths
    code_s, trip_s = h100_itself.paths["hand_off"].cold, h100_itself.paths["l2_trip"].warm
    for taken, accesses in ((h100.signal_s, 3 * trip_s), (h100.remote_signal_s, 2.45e-6)):
        assert taken == pytest.approx(accesses + code_s)
    # A matmul of one row takes as long as a matmul of 64 rows.
    assert np.ptp(h100.seconds(h100.matmul_flops, flops, np.array([64.0, 1.0]))) == 0
    assert FREE.seconds(FREE.matmul_flops, flops, np.array([64.0, 1.0]))[0] > 0


@pytest.mark.parametrize(("cores", "model"), [(16, "random:llama-3.2-1b"), (64, "random:llama-3.1-8b")])
def test_decode_on_servers_of_many_cores_is_near_the_rate_of_memory(cores: int, model: str) -> None:
    """Reading a decode step's bytes at the full rate of memory would take at least 85 % of the step's time."""
    machine, config = machines.load(str(SERVERS / f"server-{cores}.toml")), load_config(model)
    assert (machine.workers, costs_of(machine).roles) == (cores, False)
    program = compiled(config, machine, 1, max_context=1024)
    step_s = simulate(program, machine, even_step(program.dims, 1, 512)).step_s
    needed = step_work(program.forward, program.dims.split, [1], [512], 1, tied=config.tied).bytes
    assert 0.85 <= needed / machine.memory_bytes_per_s / step_s <= 1.0


@pytest.mark.parametrize("machine", [machines.MACHINES["h100"], machines.host(2)], ids=["h100", "host"])
@pytest.mark.parametrize("tokens", [1, 32])
@pytest.mark.parametrize(("tp", "parallel"), [(1, False), (2, False), (2, True)])
def test_weights_of_experts_come_from_memory(machine: machines.Machine, tokens: int, tp: int, parallel: bool) -> None:
    """A step moves the bytes that it cannot avoid, and little more. With 32 rows, all experts of a layer are read."""
    config = replace(load_config("random:qwen3-30b-a3b"), layers=2)
    options = Options(expert_parallel=parallel)
    program = compiled(config, machine, tokens, tokens, tp, options, max_seqs=tokens, max_context=128)
    ranks = (program.dims.ranks[rank].split for rank in range(tp))
    each = [step_work(program.forward, split, [1] * tokens, [128] * tokens, tokens) for split in ranks]
    done = simulate(program, machine, even_step(program.dims, tokens, 128))
    assert 1.0 <= done.memory_bytes / sum(work.bytes for work in each) < 1.05
    assert done.step_s > max(work.bytes for work in each) / machine.memory_bytes_per_s


ARGUMENTS = ["simulate", "--model", "random:llama-3.2-1b", "--machine", "h100"]


def test_the_command_line(cli: Cli) -> None:
    arguments = [*ARGUMENTS, "--tokens", "4", "--context", "300"]
    found = cli.json(*arguments)
    assert {"step_s", "tokens_per_s", "memory_bytes", "timeline"} <= found.keys() and found["fits"]
    assert found["tokens_per_s"] == pytest.approx(4 / found["step_s"])
    assert cli.json(*arguments, "--no-pipelining")["step_s"] > found["step_s"]
    for what in ("waits", "copies", "compute"):
        assert cli.json(*arguments, "--without", what)["step_s"] < found["step_s"], what
    assert "exceeds the model's limit" in cli.fails(*arguments[:-1], "9999999")


def test_it_says_of_a_step_what_the_timeline_says(tmp_path: Path, cli: Cli) -> None:
    """`simulate --json` prints the same figures as its timeline page shows, and as the command `timeline` prints for
    the saved program and trace. A Perfetto file is written too."""
    stem = tmp_path / "saved"
    written = ["--save", str(stem), "-o", str(tmp_path / "t.html"), "--perfetto", str(tmp_path / "t.pftrace")]
    config = replace(load_config("random:llama-3.2-1b"), layers=2)
    program = compiled(config, machines.load("h100"), 3, 3, max_context=128)
    program.save(tmp_path / "short.program")
    for name in ("h200", "h100"):  # saved files name the machine on which the step was simulated, and so its peaks
        step = ["simulate", str(tmp_path / "short.program"), "--machine", name]
        found = cli.json(*step, *written)["timeline"]
        assert cli.json("timeline", f"{stem}.program", f"{stem}.trace") == found and found["machine"] == name
    page = (tmp_path / "t.html").read_text()
    meta = json.loads(page.split('<script id="meta" type="application/json">')[1].split("</script>")[0])
    assert meta["sources"][0]["summary"] == found
    assert (tmp_path / "t.pftrace").stat().st_size > 0
    _, shown, _ = cli.run(*step)
    assert all(f"{share:.1%}" in shown for share in (found["busy"], found["overlap"]["inside_worker"]))
    assert "least time" in shown


def test_what_a_machine_cannot_hold_or_lacks(cli: Cli) -> None:
    model = ["simulate", "--model", "random:llama-3.1-70b", "--machine", "h100", "--workers", "4"]
    status, out, err = cli.run(*model, "--json")
    found = json.loads(out)
    assert not found["fits"] and found["memory"]["needed_bytes"] > found["memory"]["memory_bytes"]
    assert status == 0 and "the step cannot run there" in err
    for wrong, message in ((["--workers", "133"], "132 workers per rank"), (["--tp", "16"], "8 devices in a node")):
        assert message in cli.fails(*ARGUMENTS, *wrong)


def saved(path: Path, model: str, workers: int | None, tokens: int, max_context: int) -> Program:
    """Save a program of an H100, and return it."""
    config, machine = load_config(f"random:{model}"), machines.load("h100", workers)
    program = compiled(config, machine, tokens, max_seqs=1, max_context=max_context)
    program.save(path)
    return program


def test_a_saved_program_of_a_prompt_can_be_simulated(tmp_path: Path, cli: Cli) -> None:
    """The program's 256 token rows belong to one sequence, so `simulate` uses a context of 256 tokens instead of the
    default 128."""
    program = saved(tmp_path / "prompt.mkp", "llama-3.2-1b", None, 256, 512)
    arguments = ["simulate", str(tmp_path / "prompt.mkp"), "--machine", "h100"]
    found = cli.json(*arguments)
    expected = simulate(program, machines.load("h100"), even_step(program.dims, 256, 256)).step_s
    assert found["step_s"] == pytest.approx(expected) and found["tokens_per_s"] == pytest.approx(256 / expected)
    said = cli.fails(*arguments, "--context", "255")
    assert "up to 256 of the 256 tokens, more than the context of 255" in said


def test_a_saved_program_runs_on_the_machine_that_it_names(tmp_path: Path, cli: Cli) -> None:
    file = str(tmp_path / "step.program")
    for processors in (2, 132):
        program = saved(Path(file), "smollm2-135m", processors, 1, 256)
        assert cli.json("simulate", file)["machine"] == "h100"
    assert f"not 132: choose a --machine that {file} fits" in cli.fails("simulate", file, "--machine", "host")
    replace(program, machine="mine").save(Path(file))
    said = cli.fails("simulate", file)
    assert "was compiled for mine, whose rates are unknown: give --machine" in said
    cli.json("simulate", file, "--machine", "h100")


def test_the_memory_of_a_saved_program_is_that_of_tied_embeddings(tmp_path: Path, cli: Cli) -> None:
    """A program file does not record whether input and output embeddings are tied. For a saved program, `simulate`
    therefore reports the memory needed with tied embeddings, which is less than without."""
    shape = "random:llama-3.1-8b"
    config, stem = load_config(shape), tmp_path / "step"
    flags = ["--machine", "h100", "--workers", "4"]
    untied, tied = (
        cli.json("simulate", *what, *flags)["memory"]["needed_bytes"]
        for what in (["--model", shape, "--save", str(stem)], [f"{stem}.program"])
    )
    assert untied - tied == config.vocab * config.hidden * 2


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("model", ["smollm2-135m", "random:llama-3.2-1b"])
@pytest.mark.usefixtures("smollm2")
def test_a_step_takes_no_less_than_the_ceilings_allow(model: str, workers: int) -> None:
    """Predictions lie between the least time that the peak rates allow and twice that time. The cases are decode and
    prefill, on a calibrated CPU and on this CPU with nominal rates."""
    for file in (str(SERVERS / "epyc-2.toml"), machines.HOST):
        for case in predictions_host.cases(model, workers, file, measured=False):
            assert 0 < case.bound_s <= case.predicted.step_s < 2 * case.bound_s, (case.phase, file)
