"""Counters, launches, aborts and traces of the CPU backend, on small programs made by hand."""

from __future__ import annotations

import _thread
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cpu_support import DIMS, PAGES, Array, Item, RandomCheckpoint, make_table, program, set_items
from program_parts import record, segment

from megakernel.errors import MegakernelError
from megakernel.isa import Buffer, Dtype, StepTable, slot_work
from megakernel.isa.record import counter_word as word
from megakernel.program import Program
from megakernel.runtime.cpu import CpuBackend
from megakernel.trace import EPILOGUE, PROLOGUE, IntervalKind

# Two row blocks, 32 + 8 rows; two layers are first and middle block, the epilogue is the last.
BLOCKS = ((0, 32), (32, 8))
# Counters of a block: X ready and H ready by row block, then the grids [row block][KV head] of q, k, v and [row
# block] of ATTN, then by row block OUT done, H2 ready, ACT ready; Y, and logit tiles.
X, H, QKV, ATTN, OUT, H2, ACT, Y, LOGITS, COUNTERS = 0, 2, 4, 8, 10, 12, 14, 16, 17, 18


def forward_program(workers: int) -> Program:
    """The whole forward pass of DIMS, spread over workers round-robin; every dependence has a counter."""
    d = DIMS
    streams = {name: [[] for _ in range(workers)] for name in ("prologue", "body", "epilogue")}
    turn = dict.fromkeys(streams, 0)

    def emit(segment_name: str, *args: object, **words: object) -> None:
        streams[segment_name][turn[segment_name] % workers].append(record(*args, **words))  # type: ignore[arg-type]
        turn[segment_name] += 1

    for b, (row, rows) in enumerate(BLOCKS):
        for name in ("embed", "rope"):
            emit("prologue", name, row, rows, signals=[word(X + b)])
    for b, (row, rows) in enumerate(BLOCKS):
        emit("body", "attn_norm", row, rows, waits=[word(X + b)], signals=[word(H + b)])
    for b, (row, rows) in enumerate(BLOCKS):
        for col, cols, groups in ((0, 80, [0, 1]), (80, 112, [0, 1]), (192, 48, [0, 1])):
            signals = [word(QKV + 2 * b + g) for g in groups]
            emit("body", "qkv_rope", row, rows, col, cols, waits=[word(H + b)], signals=signals)
    for slot in range(d.attention_slots):
        grids = {"waits": [word(QKV, indexed=True)], "signals": [word(ATTN, indexed=True)]}
        emit("body", "attention", slot, 1, 2, **grids)
    for b, (row, rows) in enumerate(BLOCKS):
        for col, cols in ((0, 48), (48, 24)):
            emit("body", "o_proj", row, rows, col, cols, waits=[word(ATTN + b)], signals=[word(OUT + b)])
        emit("body", "mlp_norm", row, rows, waits=[word(OUT + b)], signals=[word(H2 + b)])
        for col, cols in ((0, 64), (64, 40)):
            emit("body", "gate_up_silu", row, rows, col, cols, waits=[word(H2 + b)], signals=[word(ACT + b)])
        for col, cols in ((0, 32), (32, 40)):
            done = [word(X + b, next_layer=True)]
            emit("body", "down_proj", row, rows, col, cols, waits=[word(ACT + b)], signals=done)
    emit("epilogue", "final_norm", 0, 5, waits=[word(X, indexed=True)], signals=[word(Y)])
    for col, cols in ((0, 112), (112, 91)):
        emit("epilogue", "lm_head", 0, 5, col, cols, waits=[word(Y)], signals=[word(LOGITS)])
    emit("epilogue", "sample", 0, 5, waits=[word(LOGITS)])

    inner = {H: 1, H + 1: 1, OUT: 2, OUT + 1: 2, H2: 1, H2 + 1: 1, ACT: 2, ACT + 1: 2}
    inner |= {QKV + i: 3 for i in range(4)} | {ATTN + b: rows * d.kv_heads for b, (_, rows) in enumerate(BLOCKS)}
    residual = {X: 2, X + 1: 2}
    totals = [inner | residual, inner | residual, {**residual, Y: 1, LOGITS: 2}]
    return program(d, workers, COUNTERS, [segment(*streams[s]) for s in streams], totals)


def mixed_table() -> StepTable:
    """A prefill of 34 rows over both row blocks, a decode row deep in its sequence whose attention is split."""
    table = make_table(DIMS, {0: (0, 34), 1: (300, 1)})
    items = [Item(0, 0, 32, 0, 2), Item(1, 32, 2, 0, 1), Item(1, 34, 1, 0, 2, (0, 1), 0, 3)]
    items += [Item(2, 32, 2, 1, 1), Item(2, 34, 1, 0, 2, (1, 2), 0, 3), Item(3, 34, 1, 0, 2, (2, 3), 0, 3)]
    items += [Item(3, 35, 5, 0, 2)]
    set_items(table, items)
    for i in (1, 3):
        table.item_wait_block[i], table.item_wait_blocks[i] = 0, 2
    table.logit_rows[:4] = [33, 34, -1, 2]
    table.sample_slot[1], table.sample_position[1] = 1, 301
    return table


@pytest.fixture
def checkpoint() -> RandomCheckpoint:
    return RandomCheckpoint(DIMS)


@pytest.fixture
def make(checkpoint: RandomCheckpoint) -> Iterator[Callable[..., CpuBackend]]:
    made: list[CpuBackend] = []

    def backend(threads: int = 2, **options: object) -> CpuBackend:
        made.append(CpuBackend(checkpoint, DIMS, PAGES, dtype=Dtype.F32, threads=threads, **options))  # type: ignore[arg-type]
        rng = np.random.default_rng(3)
        for buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
            for layer in range(DIMS.layers):
                view = made[-1].buffer(buffer, layer)
                view[:] = rng.standard_normal(view.shape, dtype=np.float32)
        return made[-1]

    yield backend
    for b in made:
        b.close()


def in_order(backend: CpuBackend, p: Program, table: StepTable) -> Array:
    """LOGITS of the program run instruction by instruction in emission order (the streams are dealt round-robin)."""

    def dealt(segment_name: str) -> list[Array]:
        s = getattr(p, segment_name)
        streams = [list(s.stream(w)) for w in range(p.workers)]
        n = len(s.records)
        return [streams[i % p.workers][i // p.workers] for i in range(n)]

    for r in dealt("prologue"):
        backend.execute(r, 0, table)
    for layer in range(DIMS.layers):
        for r in dealt("body"):
            backend.execute(r, layer, table)
    for r in dealt("epilogue"):
        backend.execute(r, 0, table)
    return backend.buffer(Buffer.LOGITS).copy()


@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_launches_give_the_bits_of_sequential_execution(
    make: Callable[..., CpuBackend], workers: int, threads: int
) -> None:
    p, table = forward_program(workers), mixed_table()
    expected = in_order(make(1), p, table)
    backend = make(threads)
    for launch in range(20):
        for buffer in (Buffer.X, Buffer.H, Buffer.Q, Buffer.ATTN, Buffer.ACT, Buffer.Y, Buffer.LOGITS, Buffer.ROPE):
            backend.buffer(buffer)[:] = np.nan
        out = backend.launch(p, table)
        np.testing.assert_array_equal(out.logits[[0, 1, 3]], expected[[0, 1, 3]], err_msg=f"launch {launch}")
        assert not out.logits[[2, 4]].any()
        assert out.tokens[1] == expected[1].argmax() == backend.buffer(Buffer.HISTORY)[1, 301]
    assert not backend.buffer(Buffer.SPLITS).any()


def test_a_missing_signal_is_reported(make: Callable[..., CpuBackend]) -> None:
    backend, table = make(2, deadlock_s=0.2), mixed_table()
    good, bad = forward_program(2), forward_program(2)
    first = backend.launch(good, table).logits.copy()
    which = next(i for i, r in enumerate(bad.body.records) if r[24] == word(H2 + 1))
    bad.body.records[which, 24] = 0
    message = rf"gate_up_silu, layer 0\) for counter {H2 + 1} of block 0: value 0, expected 1"
    for _ in range(2):
        with pytest.raises(MegakernelError, match=message):
            backend.launch(bad, table)
    for p in (good, forward_program(7)):
        np.testing.assert_array_equal(backend.launch(p, table).logits, first)


def test_ctrl_c_stops_a_launch_and_the_next_one_works(make: Callable[..., CpuBackend]) -> None:
    backend, table, p = make(2), mixed_table(), forward_program(2)
    first = backend.launch(p, table).logits.copy()
    backend.delay(1, 9, 1, 600.0)
    timer = threading.Timer(0.2, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        backend.launch(p, table, trace=True)
    backend.delay(0, 0, 0, 0.0)
    assert not backend.buffer(Buffer.SPLITS).any()
    for _ in range(3):
        np.testing.assert_array_equal(backend.launch(p, table).logits, first)


def test_one_launch_at_a_time(make: Callable[..., CpuBackend]) -> None:
    backend, table, p = make(2), mixed_table(), forward_program(2)
    expected = backend.launch(p, table).logits.copy()
    backend.delay(1, 9, 1, 600.0)
    stuck = backend.start(p, table, trace=True)
    with pytest.raises(MegakernelError, match="has not ended"):
        backend.start(p, table)
    for _ in range(2):
        stuck.abort()  # again: nothing to do
    backend.delay(0, 0, 0, 0.0)
    launch = backend.start(p, table)
    np.testing.assert_array_equal(launch.wait().logits, expected)
    backend.start(p, table)
    backend.close()


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_launch_that_nobody_has_any_more_is_ended() -> None:
    before = _threads()
    backend = CpuBackend(RandomCheckpoint(DIMS), DIMS, PAGES, dtype=Dtype.F32, threads=2)
    backend.delay(1, 9, 1, 600.0)
    backend.start(forward_program(2), mixed_table(), trace=True)
    assert _threads() == before + 2
    del backend
    gc.collect()
    assert _threads() == before


PATHS = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
_FORK = """
import sys
sys.path[:0] = {tests!r}
from test_cpu_interpreter import *
import os
backend = CpuBackend(RandomCheckpoint(DIMS), DIMS, PAGES, dtype=Dtype.F32, threads=2)
if os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
raise SystemExit(3)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_fork_ends_without_the_threads_that_it_lacks() -> None:
    script = _FORK.format(tests=PATHS)
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
    layers = [PROLOGUE, *range(DIMS.layers), EPILOGUE]
    segments = [p.prologue, *[p.body] * DIMS.layers, p.epilogue]
    expected = {
        (w, layer, i)
        for layer, s in zip(layers, segments, strict=True)
        for w in range(p.workers)
        for i in range(s.offsets[w], s.offsets[w + 1])
    }
    assert {(int(c["worker"]), int(c["layer"]), int(c["instruction"])) for c in compute} == expected
    for w in range(p.workers):
        mine = compute[compute["worker"] == w]
        assert (mine["begin"][1:] >= mine["end"][:-1]).all()
    # A wait names a word that is there, and ends before its instruction starts.
    for wait in t[t["kind"] == IntervalKind.COUNTER_WAIT]:
        s = segments[layers.index(int(wait["layer"]))]
        assert s.records[wait["instruction"], 16 + wait["slot"]] != 0


def test_a_stall_delays_only_what_depends_on_it(make: Callable[..., CpuBackend]) -> None:
    """Worker 1's copy of row block 1 stalls; row block 0 on worker 0 has no part in it."""
    chain = [
        [record("attn_norm", 0, 32, signals=[word(0)]), record("mlp_norm", 0, 32, waits=[word(0)])],
        [record("attn_norm", 32, 8, signals=[word(1)]), record("mlp_norm", 32, 8, waits=[word(1)])],
    ]
    empty = segment([], [])
    p = program(replace(DIMS, tokens=40), 2, 2, [empty, segment(*chain), empty], [{0: 1, 1: 1}, {}, {}])
    p = replace(p, totals_middle=p.totals_first)
    backend, table = make(2), mixed_table()
    backend.delay(1, 2, 0, 0.1)
    trace = backend.launch(p, table, trace=True).trace
    assert trace is not None
    t = trace.intervals
    stalled = t[(t["instruction"] == 2) & (t["layer"] == 0)][0]
    assert stalled["end"] - stalled["begin"] >= 1e8
    assert (t[t["worker"] == 0]["end"] <= stalled["end"]).all()
    assert (t[(t["worker"] == 1) & ~((t["instruction"] == 2) & (t["layer"] == 0))]["begin"] >= stalled["end"]).all()


def test_null_backend_runs_the_program_without_weights(checkpoint: RandomCheckpoint) -> None:
    backend = CpuBackend(checkpoint, DIMS, PAGES, dtype=Dtype.F32, threads=2, null=True)
    p, table = forward_program(5), mixed_table()
    for _ in range(5):
        out = backend.launch(p, table)
        assert not out.tokens.any() and not out.logprobs.any()
    assert backend.name == "null" and not backend.buffer(Buffer.SPLITS).any()
    backend.close()


def test_programs_for_another_model_are_refused(make: Callable[..., CpuBackend]) -> None:
    backend, p = make(1), forward_program(1)
    for field in ("hidden", "page", "max_context", "dtype"):
        other = replace(p, dims=replace(p.dims, **{field: getattr(p.dims, field) * 2 + 1}))
        with pytest.raises(MegakernelError, match=f"{field} = "):
            backend.launch(other, mixed_table())
    bad = forward_program(1)
    bad.body.records[0, 0] = 99
    with pytest.raises(MegakernelError, match="unknown opcode 99"):
        backend.launch(bad, mixed_table())
    with pytest.raises(MegakernelError, match="compiled for 2 ranks, the backend has 1"):
        backend.launch(replace(p, ranks=2), mixed_table())
    table = mixed_table()
    table.block_tables[0, 0] = PAGES
    with pytest.raises(MegakernelError, match=f"outside the pool of {PAGES}"):
        backend.launch(p, table)
    with pytest.raises(MegakernelError, match="no room"):
        backend.write_history(0, DIMS.max_context, np.zeros(2, np.int32))


def test_a_model_larger_than_memory_is_refused_before_it_is_read(checkpoint: RandomCheckpoint) -> None:
    checkpoint.dims = replace(DIMS, hidden=1 << 20, ffn=1 << 22, layers=100)
    checkpoint.load = None  # type: ignore[method-assign,assignment]
    with pytest.raises(MegakernelError, match="GiB are available"):
        CpuBackend(checkpoint, checkpoint.dims, PAGES, dtype=Dtype.F32)


def test_pages_that_hold_no_whole_vectors_are_refused(checkpoint: RandomCheckpoint) -> None:
    with pytest.raises(MegakernelError, match="pages of 16 n tokens"):
        CpuBackend(checkpoint, replace(DIMS, page=8), PAGES, dtype=Dtype.F32)


def test_a_closed_backend_refuses_launches(make: Callable[..., CpuBackend]) -> None:
    backend = make(2)
    backend.launch(forward_program(2), mixed_table())
    backend.close()
    backend.close()
    with pytest.raises(MegakernelError, match="closed"):
        backend.launch(forward_program(2), mixed_table())
