"""Tests of tensor-parallel ranks on the CPU backend. The ranks agree with the reference. The number of threads, the use
of queues and the choice of the ranks that store the residual do not change any bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from compiled import compiled as compiled_for
from cpu_support import Array, RandomCheckpoint, bits, check_stops
from handmade import make_dims, make_program, make_queue_program
from mixed import PAGES, Mixed
from mutate import edit, rows_of
from sizes import least_dims
from twins import CpuTwins

from megakernel import machine
from megakernel.errors import MegakernelError
from megakernel.isa import Buffer, Dims, Dtype, Operation, StepTable, record
from megakernel.model.config import ModelConfig
from megakernel.program import Program
from megakernel.runtime import Chunk, SampleRow, build_step
from megakernel.runtime.cpu.backend import CpuBackend
from megakernel.runtime.reference import ReferenceBackend
from megakernel.scheduler.options import Options
from megakernel.trace import IntervalKind

# Three query heads share a KV head and may be on different ranks. Ranks divide the FFN
# columns in four groups of 32 and the vocabulary in seven. The last group of each is smaller.
CUT = ModelConfig(203, 72, 104, 2, 9, 3, 24, 520, qkv_bias=True, o_bias=True, mlp_bias=True)
# There is one KV head. With eight ranks, some have neither attention heads nor FFN columns.
FEW = ModelConfig(75, 48, 72, 2, 4, 1, 16, 520, tied=True)
LOWERINGS = [(o, residual) for o in ("sharded", "replicated") for residual in ("dealt", "replicated")]


def random_checkpoint(config: ModelConfig, dtype: Dtype = Dtype.F32) -> RandomCheckpoint:
    return RandomCheckpoint(least_dims(config, dtype), config.tied, config.mlp_bias)


@contextmanager
def cpu(config: ModelConfig, dims: Dims, threads: int = 2, **options: Any) -> Iterator[CpuBackend]:
    dtype = Dtype(dims.model.dtype)
    backend = CpuBackend(random_checkpoint(config, dtype), dims, PAGES, threads=threads, **options)
    yield backend
    backend.close()


def hand_dims(config: ModelConfig, tp: int, o: str, residual: str, **changes: Any) -> Dims:
    lowering = {"tp": tp, "replicated_o": int(o == "replicated"), "replicated_residual": int(residual == "replicated")}
    return make_dims(config, **{"row_block": 4, "tokens": 22, "logit_rows": 6, **lowering, **changes})


def hand_table(dims: Dims) -> StepTable:
    """Return a step with a prefill of several row blocks, a decode row whose attention is split, the end of another
    prompt, and padding rows."""
    row = SampleRow
    chunks = [
        Chunk(2, 0, list(range(9, 20)), [0, 7], [row(10), row(3, store=False, target=7)]),
        Chunk(0, 500, [5], range(8, 40), [row(0, temperature=0.8, seed=3)]),
        Chunk(1, 30, [6, 3, 2], [1, 2, 3], [row(2)]),
    ]
    table = build_step(dims, chunks)
    assert (table.item_split >= 0).any()
    return table


@pytest.mark.parametrize(
    ("config", "tp", "o", "residual", "dtype"),
    [
        *((config, tp, *lowering, Dtype.F32) for config, tp in ((CUT, 4), (FEW, 8)) for lowering in LOWERINGS),
        *(
            (config, tp, o, o.replace("sharded", "dealt"), Dtype.BF16)
            for config, tp in ((CUT, 4), (FEW, 8))
            for o in ("sharded", "replicated")
        ),
    ],
)
def test_instructions_as_in_the_reference(config: ModelConfig, tp: int, o: str, residual: str, dtype: Dtype) -> None:
    """Each instruction changes the same buffers on the same ranks as on the reference backend, and no others. The test
    runs the attention instructions and, on each rank, the first two instructions of every other phase."""
    program = make_program(config, hand_dims(config, tp, o, residual, dtype=int(dtype)))
    table = hand_table(program.dims)
    twins = CpuTwins(random_checkpoint(config, dtype), program.forward, program.dims)
    twins.start_equal()
    tolerance = 2**-7 if dtype is Dtype.BF16 else 1e-4
    for segment in (program.prologue, program.body, program.epilogue):
        layer = 1 if segment is program.body else 0
        for number in dict.fromkeys(record.phase_number(segment.records).tolist()):
            attention = program.forward.by_number[number].operation is Operation.ATTENTION
            for rank in range(tp):
                streams = map(segment.stream, range(rank * program.workers, (rank + 1) * program.workers))
                mine = [words for stream in streams for words in stream if words[0] & 0xFF == number]
                for words in mine if attention else mine[:2]:
                    twins.execute_both(words, layer, table, rank)
            twins.assert_equal(tolerance, tolerance)
    twins.backend.close()


@cache
def compiled(config: ModelConfig, tokens: int, *, tp: int, **options: Any) -> Program:
    limits = {"max_context": config.max_context}
    return compiled_for(config, machine.host(2), tokens, tokens, tp, Options(**options), dtype=Dtype.F32, **limits)


def run(config: ModelConfig, threads: int = 2, **options: Any) -> tuple[Array, list[int]]:
    """Return the logits and the tokens of steps that mix prompts and decode rows."""
    programs = [compiled(config, tokens, **options) for tokens in (25, 25, 5)]
    with cpu(config, programs[0].dims, threads) as backend:
        mixed = Mixed(backend, *programs)
        return mixed.run(), mixed.tokens


@pytest.mark.parametrize("config", [CUT, FEW], ids=["cut", "few"])
def test_ranks_compute_what_one_computes(config: ModelConfig) -> None:
    """Several ranks give the logits of one rank up to rounding, and the same tokens. Only dividing or replicating the O
    projection's weights changes the bits. The number of threads, the ranks that store the residual, and the place where
    norms are computed do not."""
    one = run(config, tp=1, norm="own")
    for norm in ("next", "inside"):
        np.testing.assert_array_equal(run(config, tp=1, norm=norm)[0], one[0])
    for o in ("sharded", "replicated"):
        found = [run(config, n, tp=8, o=o, residual="dealt", norm="own") for n in (1, 3)]
        for residual in ("dealt", "replicated"):
            found.append(run(config, tp=8, o=o, residual=residual, norm="next"))
        found.append(run(config, tp=8, o=o, residual="replicated", norm="inside"))
        np.testing.assert_allclose(found[0][0], one[0], rtol=1e-4, atol=1e-4 * np.abs(one[0]).max())
        for logits, tokens in found:
            np.testing.assert_array_equal(logits, found[0][0])
            assert tokens == one[1]


@pytest.mark.parametrize(("o", "residual"), LOWERINGS)
def test_streams_and_queues_give_what_the_reference_gives(o: str, residual: str) -> None:
    """Launches with fixed streams agree with the reference, and launches that claim instructions from queues give the
    same bits. Each program is launched three times, because the number of claims is not reset between launches."""
    dims = hand_dims(CUT, 4, o, residual)
    program, table = make_program(CUT, dims, 2), hand_table(dims)
    reference = ReferenceBackend(random_checkpoint(CUT), dims, PAGES)
    expected = reference.launch(program, table)
    with cpu(CUT, dims, 3) as backend:
        for buffer, rank in product((Buffer.X, Buffer.H, Buffer.Q, Buffer.ATTN, Buffer.ACT, Buffer.ROPE), range(4)):
            backend.buffer(buffer, rank=rank)[:] = np.nan  # must not be read before it is written
        out = backend.launch(program, table)
        np.testing.assert_allclose(out.logits, expected.logits, rtol=1e-4, atol=1e-4 * np.abs(expected.logits).max())
        np.testing.assert_array_equal(out.tokens, expected.tokens)
        found = bits(out)
        for again in [program] * 2 + [make_queue_program(CUT, dims, 5)] * 3:
            assert bits(backend.launch(again, table)) == found


def test_partial_drains_share_a_queue() -> None:
    """A drain instruction makes a worker claim and run instructions from a queue. Worker 0 has two drain instructions
    for one queue. The first drain claims only from the first half of the queue. So worker 0 runs instructions of the
    second half only in its second drain."""
    dims = hand_dims(CUT, 1, "sharded", "dealt")
    whole, table = make_queue_program(CUT, dims, 2), hand_table(dims)
    half = len(whole.queues.records) // 2
    last = whole.body.records[-1]
    first = last.copy()
    first[record.OPERAND_WORD + 1] = half
    body = replace(whole.body, records=np.stack([first, last, last]), offsets=np.array([0, 2, 3]))
    with cpu(CUT, dims) as backend:
        expected = backend.launch(whole, table).logits.copy()
        program = replace(whole, body=body)
        for _ in range(2):
            np.testing.assert_array_equal(backend.launch(program, table).logits, expected)
        trace = backend.launch(program, table, trace=True).trace
    assert trace is not None
    t = trace.intervals
    ran = t[(t["kind"] == IntervalKind.COMPUTE) & (t["layer"] < dims.model.layers)]
    numbers = range(len(body.records), len(body.records) + len(whole.queues.records))
    for layer in range(dims.model.layers):
        claimed = ran[(ran["layer"] == layer) & (ran["instruction"] >= len(body.records))]
        assert set(claimed["instruction"]) == set(numbers)
        done = ran[(ran["layer"] == layer) & (ran["instruction"] == 0)][0]
        mine = claimed[claimed["worker"] == 0]
        late = mine["instruction"] >= len(body.records) + half
        assert (mine["end"][~late] <= done["begin"]).all() and (mine["begin"][late] >= done["end"]).all()


@pytest.mark.parametrize("make", [make_program, make_queue_program])
def test_a_deadlock_names_rank_worker_and_counter(make: Any) -> None:
    dims = hand_dims(CUT, 4, "sharded", "dealt")
    good, table = make(CUT, dims, 2), hand_table(dims)
    name = "queues" if make is make_queue_program else "body"
    at = rows_of(good, name, "o_partial")[0]
    word = int(getattr(good, name).records[at, record.SIGNAL_WORD])
    bad = edit(good, name, at, record.SIGNAL_WORD)
    rank, counter = word >> record.RANK_SHIFT & record.RANK_MASK, (word & record.COUNTER_MASK) - 1
    expected = good.totals_first[rank, counter]
    message = (
        rf"rank {rank} worker \d waits in body record \d+ \(o_reduce, layer 0\) for counter {counter} of block 0: "
        rf"value {expected - 1}, expected {expected}"
    )
    with cpu(CUT, dims, deadlock_s=0.2) as backend:
        first = backend.launch(good, table).logits.copy()
        for _ in range(2):
            with pytest.raises(MegakernelError, match=message):
                backend.launch(bad, table)
        for program in (good, make(CUT, dims, 3)):
            np.testing.assert_array_equal(backend.launch(program, table).logits, first)


def test_a_launch_that_is_stopped_leaves_a_working_backend() -> None:
    dims = hand_dims(CUT, 4, "replicated", "dealt")
    program, table = make_queue_program(CUT, dims, 2), hand_table(dims)
    with cpu(CUT, dims) as backend:
        check_stops(backend, program, table, lambda: backend.delay(1, len(program.body.records) // 2, 1, 600.0))
        assert not any(backend.buffer(Buffer.SPLITS, rank=rank).any() for rank in range(4))
        backend.delay(1, len(program.body.records) // 2, 1, 600.0)
        backend.start(program, table, trace=True)
        backend.close()
        backend.close()
        with pytest.raises(MegakernelError, match="closed"):
            backend.launch(program, table)


def test_copies_to_other_ranks_show_as_stores() -> None:
    """In a trace, a copy to other ranks is a STORE interval, which begins when the computation of its rows ends. Inside
    the layers, only norms copy their rows, and only if the residual's rows are divided among the ranks ("dealt"). With
    a replicated residual, no instruction copies rows."""
    for residual in ("dealt", "replicated"):
        dims = hand_dims(CUT, 2, "sharded", residual)
        program = make_program(CUT, dims, 2)
        with cpu(CUT, dims) as backend:
            trace = backend.launch(program, hand_table(dims), trace=True).trace
        assert trace is not None
        t = trace.intervals
        np.testing.assert_array_equal(np.lexsort((t["begin"], t["worker"], t["rank"])), np.arange(len(t)))
        assert set(t["rank"]) == {0, 1}
        stores = t[(t["kind"] == IntervalKind.STORE) & (t["layer"] < dims.model.layers)]
        stored = set(record.phase_number(program.body.records[stores["instruction"]]).tolist())
        norms = {phase.number for phase in program.forward.body if phase.operation is Operation.NORM}
        assert stored == (norms if residual == "dealt" else set())
        for s in stores:
            same = (t["instruction"] == s["instruction"]) & (t["layer"] == s["layer"])
            compute = t[same & (t["kind"] == IntervalKind.COMPUTE)]
            assert compute["end"] == s["begin"]


def test_weights_that_ranks_have_in_common_are_held_once() -> None:
    def held(tp: int, o: str) -> dict[Buffer, int]:
        with cpu(FEW, hand_dims(FEW, tp, o, "dealt")) as backend:
            lib, engine = backend._lib, backend._engine
            return {
                b: len({lib.mk_bound(engine, r, b, 0) for r in range(tp)})
                for b in (Buffer.EMBED, Buffer.ATTN_NORM, Buffer.W_O, Buffer.W_QKV, Buffer.LOGITS, Buffer.HISTORY)
            }

    assert list(held(2, "replicated").values()) == [1, 1, 1, 2, 1, 2]
    assert list(held(2, "sharded").values()) == [1, 1, 2, 2, 1, 2]


def test_null_backend_runs_programs_without_weights() -> None:
    dims = hand_dims(CUT, 8, "replicated", "replicated")
    checkpoint = random_checkpoint(CUT)
    checkpoint.rows = None  # type: ignore[method-assign,assignment]
    backend = CpuBackend(checkpoint, dims, PAGES, threads=2, null=True)
    for make in (make_program, make_queue_program):
        program = make(CUT, dims, 3)
        for _ in range(3):
            out = backend.launch(program, hand_table(dims))
            assert not out.tokens.any() and not out.logprobs.any()
    assert backend.name == "null" and not backend.buffer(Buffer.SPLITS).any()
    backend.close()
