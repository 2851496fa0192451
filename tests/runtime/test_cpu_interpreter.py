"""Tests the CPU backend's counters, launches, aborts and traces with small hand-made programs."""

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_support import until
from cpu_support import DIMS, PAGES, RandomCheckpoint, fill
from handmade import make_program

from megakernel.errors import MegakernelError
from megakernel.isa import Dtype, StepTable, slot_work
from megakernel.isa.record import phase_number
from megakernel.model import load_config
from megakernel.program import Program
from megakernel.runtime import Chunk, SampleRow, build_step, registered, registry
from megakernel.runtime.cpu.backend import CpuBackend
from megakernel.trace import EPILOGUE, PROLOGUE, IntervalKind

CONFIG = RandomCheckpoint(DIMS).config


# (requested threads, ranks) -> workers of each rank on a machine with four cores.
WORKERS = {(None, 1): 4, (1, 1): 1, (3, 1): 3, (16, 1): 4, (16, 2): 2, (2, 8): 1}


def forward_program(workers: int) -> Program:
    """A whole forward pass in two row blocks. Tiles begin inside heads and inside panels of 16 packed columns."""
    return make_program(CONFIG, DIMS, workers, tile=44)


def mixed_table() -> StepTable:
    """A prefill of 34 rows in both row blocks, and a decode row with a long context."""
    count = DIMS.bucket.pages_per_seq
    prefill = Chunk(0, 0, list(range(34)), range(count), [SampleRow(33)])
    return build_step(DIMS, [prefill, Chunk(1, 300, [7], range(count, 2 * count), [SampleRow(0)])])


@pytest.fixture
def checkpoint() -> RandomCheckpoint:
    return RandomCheckpoint(DIMS)


@pytest.fixture
def make(checkpoint: RandomCheckpoint) -> Iterator[Callable[..., CpuBackend]]:
    made: list[CpuBackend] = []

    def backend(threads: int = 2, **options: Any) -> CpuBackend:
        made.append(CpuBackend(checkpoint, DIMS, PAGES, threads=threads, **options))
        fill(made[-1])
        return made[-1]

    yield backend
    for b in made:
        b.close()


def test_the_wait_for_progress_begins_with_the_launch(make: Callable[..., CpuBackend]) -> None:
    """A launch whose first instruction takes 0.2 s is not aborted for lack of progress."""
    backend = make(1)
    backend.delay(0, 0, 0, 0.2)
    launch = backend.launch(forward_program(1), mixed_table(), trace=True)
    assert launch.trace is not None and len(launch.trace.intervals)


def _threads() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_launch_that_nobody_has_any_more_is_ended() -> None:
    before = _threads()
    backend = CpuBackend(RandomCheckpoint(DIMS), DIMS, PAGES, threads=2)
    backend.delay(1, 9, 1, 600.0)
    backend.start(forward_program(2), mixed_table(), trace=True)
    started = _threads() - before
    assert len(started) == 2
    del backend
    gc.collect()
    until(lambda: not _threads() & started)  # a thread that has ended is listed a little longer


_FORK = """
import sys
sys.path[:0] = [{support!r}]
import os
from cpu_support import DIMS, PAGES, RandomCheckpoint
from megakernel.isa import Dtype
from megakernel.runtime.cpu.backend import CpuBackend
backend = CpuBackend(RandomCheckpoint(DIMS), DIMS, PAGES, threads=2)
if os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
raise SystemExit(3)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_fork_ends_without_the_threads_that_it_lacks() -> None:
    script = _FORK.format(support=str(Path(__file__).parents[1] / "support"))
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, "")


def test_trace_has_one_compute_for_each_instruction(make: Callable[..., CpuBackend]) -> None:
    backend, table, p = make(2), mixed_table(), forward_program(3)
    plain = backend.launch(p, table).logits.copy()
    out = backend.launch(p, table, trace=True)
    np.testing.assert_array_equal(out.logits, plain)
    assert out.trace is not None
    t, header = out.trace.intervals, out.trace.header
    np.testing.assert_array_equal(out.trace.attention, slot_work(table)[None])
    assert (header.program, header.source, header.dropped) == (p.hash, "cpu", 0)
    assert header.tick_s == 1e-9 and header.read_s > 0
    assert (t["end"] >= t["begin"]).all()
    order = np.lexsort((t["begin"], t["worker"], t["rank"]))
    np.testing.assert_array_equal(order, np.arange(len(t)))
    compute = t[t["kind"] == IntervalKind.COMPUTE]
    layers = [PROLOGUE, *range(DIMS.model.layers), EPILOGUE]
    segments = [p.prologue, *[p.body] * DIMS.model.layers, p.epilogue]
    expected = set()
    for (layer, s), w in itertools.product(zip(layers, segments, strict=True), range(p.workers)):
        expected |= {(w, layer, i) for i in range(s.offsets[w], s.offsets[w + 1])}
    assert {(int(c["worker"]), int(c["layer"]), int(c["instruction"])) for c in compute} == expected
    for w in range(p.workers):
        mine = compute[compute["worker"] == w]
        assert (mine["begin"][1:] >= mine["end"][:-1]).all()
    # Each traced wait belongs to a counter for which the record of its instruction waits.
    for wait in t[t["kind"] == IntervalKind.COUNTER_WAIT]:
        s = segments[layers.index(int(wait["layer"]))]
        assert s.records[wait["instruction"], 16 + wait["slot"]] != 0


def test_streams_of_a_thread_that_does_not_run_are_taken_over(make: Callable[..., CpuBackend]) -> None:
    """One of two threads runs the workers 0 and 2. While this thread is stuck in the first QKV tile of worker 0, all
    tiles of the other workers are computed, because the other thread takes over the stream of worker 2."""
    backend, table, p = make(2), mixed_table(), forward_program(3)
    expected = backend.launch(p, table).logits.copy()
    stuck = int(p.body.offsets[0])
    backend.delay(1, stuck, 0, 1.0)
    out = backend.launch(p, table, trace=True)
    np.testing.assert_array_equal(out.logits, expected)
    assert out.trace is not None
    t = out.trace.intervals
    compute = t[(t["kind"] == IntervalKind.COMPUTE) & (t["layer"] == 0)]
    phase = phase_number(p.body.records)
    tiles = compute[phase[compute["instruction"]] == phase[stuck]]
    (stalled,) = tiles[tiles["instruction"] == stuck]
    others = tiles[tiles["worker"] != 0]
    assert set(others["worker"]) == {1, 2} and (others["end"] < stalled["end"]).all()


def test_a_thread_that_does_not_run_is_moved_to_another_core_and_comes_back(make: Callable[..., CpuBackend]) -> None:
    """A thread whose streams were taken over must avoid the other thread's core until the next launch begins."""
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("a thread can only be moved where there are two cores")
    tasks = Path("/proc/self/task")
    before = {task.name for task in tasks.iterdir()}
    backend, table, p = make(2), mixed_table(), forward_program(3)
    threads = [int(task.name) for task in tasks.iterdir() if task.name not in before]

    def moved(seconds: float) -> list[set[int]]:
        """Run a launch with a stuck worker 0, and return the cores that each moved thread may use."""
        backend.delay(1, int(p.body.offsets[0]), 0, seconds)
        backend.launch(p, table, trace=True)
        return [at for thread in threads if (at := os.sched_getaffinity(thread)) != cores]

    until(lambda: [len(at) for at in moved(0.1)] == [len(cores) - 1], 120)  # a busy machine may need many launches
    until(lambda: not moved(0.0))


def test_an_engine_has_no_more_workers_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "cpu_count", lambda: 4)
    workers = {(threads, ranks): registered("cpu").machine(threads, ranks).workers for threads, ranks in WORKERS}
    assert workers == WORKERS


@pytest.mark.parametrize(("asked", "checked"), [(None, Dtype.F32), (Dtype.BF16, Dtype.BF16)])
def test_a_backend_is_asked_for_its_type(monkeypatch: pytest.MonkeyPatch, asked: Dtype | None, checked: Dtype) -> None:
    seen: list[Dtype] = []
    noted = replace(registry.REGISTRY["cpu"], lack=lambda config, dtype: seen.append(dtype))
    monkeypatch.setitem(registry.REGISTRY, "cpu", noted)
    assert registry.choose_backend("cpu", load_config("random:llama-3.2-1b"), asked) == ("cpu", asked)
    assert seen == [checked]


def test_programs_whose_weights_are_not_there_are_refused(make: Callable[..., CpuBackend]) -> None:
    p = forward_program(1)
    backend = CpuBackend(RandomCheckpoint(DIMS, biased=False), DIMS, PAGES, threads=1)
    with pytest.raises(MegakernelError, match="reads B_DOWN, B_GATE_UP, B_O, B_QKV, which random lacks"):
        backend.launch(p, mixed_table())
    backend.close()


def test_a_model_larger_than_memory_is_refused_before_it_is_read(checkpoint: RandomCheckpoint) -> None:
    checkpoint.dims = DIMS.changed(hidden=1 << 20, ffn=1 << 22, layers=100)
    checkpoint.rows = None  # type: ignore[method-assign,assignment]
    with pytest.raises(MegakernelError, match=r"but only .* GiB are available"):
        CpuBackend(checkpoint, checkpoint.dims, PAGES)


def test_pages_that_hold_no_whole_vectors_are_refused(checkpoint: RandomCheckpoint) -> None:
    with pytest.raises(MegakernelError, match=r"8 tokens in a KV page .* multiple of 16 tokens that divides 128"):
        CpuBackend(checkpoint, DIMS.changed(kv_page=8), PAGES)
