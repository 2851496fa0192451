"""Ranks on the CPU backend: the reference's results, and bits that neither threads nor lowerings of equal class change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cpu_support import Array, RandomCheckpoint
from hand_program import make_dims, make_program, make_queue_program

from megakernel import machine
from megakernel.isa import BUFFERS, BY_OPCODE, Buffer, Dims, Dtype, Space, StepTable, from_f32, record, to_f32
from megakernel.model.checkpoint import weight_dims
from megakernel.model.config import LlamaConfig
from megakernel.program import Program
from megakernel.runtime import Chunk, SampleRow, build_step, check_step
from megakernel.runtime.cpu import CpuBackend
from megakernel.runtime.reference import ReferenceBackend
from megakernel.scheduler import compile_program
from megakernel.scheduler.options import Options
from megakernel.trace import IntervalKind

# Groups of three query heads, cut by the ranks; four units of FFN columns and seven of vocabulary, the last not full.
CUT = LlamaConfig(203, 72, 104, 2, 9, 3, 24, 200, attention_bias=True, mlp_bias=True)
# One KV head; on eight ranks some have neither heads nor FFN columns.
FEW = LlamaConfig(75, 48, 72, 2, 4, 1, 16, 200, tied=True)
LOWERINGS = [(o, residual) for o in ("sharded", "replicated") for residual in ("dealt", "replicated")]
PAGES = 40


def random_checkpoint(config: LlamaConfig, dtype: Dtype = Dtype.F32) -> RandomCheckpoint:
    return RandomCheckpoint(weight_dims(config, dtype), config.tied)


@contextmanager
def cpu(config: LlamaConfig, dims: Dims, threads: int = 2, **options: Any) -> Iterator[CpuBackend]:
    dtype = Dtype(dims.dtype)
    backend = CpuBackend(random_checkpoint(config, dtype), dims, PAGES, dtype=dtype, threads=threads, **options)
    yield backend
    backend.close()


# -- one instruction at a time


def hand_dims(config: LlamaConfig, tp: int, o: str, residual: str, **changes: Any) -> Dims:
    lowering = {"tp": tp, "replicated_o": int(o == "replicated"), "one_hop": int(residual == "replicated")}
    return make_dims(config, row_block=4, tokens=22, logit_rows=6, **lowering, **changes)


def hand_table(dims: Dims) -> StepTable:
    """A prefill over several row blocks, decode rows deep in their sequences (one split), padding."""
    row = SampleRow
    chunks = [
        Chunk(2, 0, list(range(9, 20)), [0, 7], [row(10), row(3, store=False, target=7)]),
        Chunk(0, 137, [5], list(range(8, 17)), [row(0, temperature=0.8, seed=3)]),
        Chunk(1, 30, [6, 3, 2], [17, 18, 19], [row(2)]),
    ]
    table = build_step(dims, chunks)
    check_step(table)
    return table


def fill(backends: tuple[CpuBackend, ReferenceBackend]) -> None:
    """The same noise in every float buffer of every rank of both."""
    rng = np.random.default_rng(4)
    dims = backends[1].dims
    for buffer, spec in BUFFERS.items():
        kind = spec.resolve_dtype(dims)
        if spec.space is Space.WEIGHT or kind is Dtype.I32:
            continue
        for layer in range(dims.layers if spec.layered else 1):
            for rank in range(dims.tp):
                there = backends[1].buffer(buffer, layer, rank)
                if rank == 0 or spec.space is not Space.OUTPUT:  # outputs of all ranks lie in one memory
                    noise = from_f32(rng.standard_normal(there.shape, dtype=np.float32), kind)
                for backend in backends:
                    backend.buffer(buffer, layer, rank)[: len(noise)] = noise


def compare(cpu: CpuBackend, reference: ReferenceBackend, what: str) -> None:
    """All copies of all buffers."""
    dims = reference.dims
    bf16 = dims.dtype == Dtype.BF16
    for buffer, spec in BUFFERS.items():
        if spec.space is Space.WEIGHT or buffer is Buffer.SPLITS:
            continue
        for layer in range(dims.layers if spec.layered else 1):
            for rank in range(dims.tp):
                expected = reference.buffer(buffer, layer, rank)
                got = cpu.buffer(buffer, layer, rank)[: len(expected)]
                if spec.space is Space.OUTPUT:  # the rows that are read on this rank
                    own = dims.own_logit_rows if buffer is Buffer.LOGITS else dims.logit_rows if rank == 0 else 0
                    got, expected = (a[rank * own : (rank + 1) * own] for a in (got, expected))
                tolerance = 2**-7 if bf16 else 1e-4
                a, b = (to_f32(x) if x.dtype != np.int32 else x for x in (got, expected))
                message = f"{what}: {buffer.name} of layer {layer} on rank {rank}"
                np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=message)


@pytest.mark.parametrize("dtype", [Dtype.F32, Dtype.BF16], ids=lambda d: d.name)
@pytest.mark.parametrize(("o", "residual"), LOWERINGS)
@pytest.mark.parametrize(("config", "tp"), [(CUT, 4), (FEW, 8)], ids=["cut", "few"])
def test_every_instruction_does_what_the_reference_does(
    config: LlamaConfig, tp: int, o: str, residual: str, dtype: Dtype
) -> None:
    """On every rank, and nowhere else."""
    dims = hand_dims(config, tp, o, residual, dtype=int(dtype))
    table, program = hand_table(dims), make_program(dims)
    reference = ReferenceBackend(random_checkpoint(config, dtype), dims, PAGES, dtype=dtype)
    with cpu(config, dims) as backend:
        fill((backend, reference))
        for segment in (program.prologue, program.body, program.epilogue):
            for rank in range(tp):
                done: set[int] = set()
                for words in segment.stream(rank):
                    opcode = int(record.opcode(words))
                    if opcode in done and BY_OPCODE[opcode].name != "attention":
                        continue
                    done.add(opcode)
                    for b in (backend, reference):
                        b.execute(words, 1 if segment is program.body else 0, table, rank)
                    compare(backend, reference, f"{BY_OPCODE[opcode].name} on rank {rank}")
        np.testing.assert_array_equal(backend.link_bytes, reference.link_bytes)


# -- whole programs


def compiled(config: LlamaConfig, tokens: int, *, tp: int, workers: int = 2, **options: Any) -> Program:
    return compile_program(
        config,
        machine.host(workers),
        dtype=Dtype.F32,
        tokens=tokens,
        logit_rows=tokens,
        max_seqs=4,
        max_context=config.max_context,
        tp=tp,
        options=Options(**options),
    )


def steps(config: LlamaConfig) -> list[list[Chunk]]:
    """Two prompts and the start of a third; then two that go on from what was sampled, and more of the third."""
    rng = np.random.default_rng(2)
    vocab = config.vocab
    first, second, third = (rng.integers(0, vocab, n).tolist() for n in (17, 5, 21))
    pages = [[3, 14], [0, 9], [1, 5], [8, 2]]
    end = len(first), len(second)
    return [
        [
            Chunk(0, 0, first, pages[0], [SampleRow(16), SampleRow(4, store=False)]),
            Chunk(3, 0, second, pages[3], [SampleRow(4, temperature=0.9, seed=5)]),
            Chunk(1, 0, third[:9], pages[1]),
        ],
        [
            Chunk(3, end[1], [-1], pages[3], [SampleRow(0, temperature=0.9, seed=5)]),
            Chunk(1, 9, third[9:], pages[1], [SampleRow(11)]),
            Chunk(0, end[0], [-1], pages[0], [SampleRow(0)]),
        ],
    ]


def run(backend: Any, config: LlamaConfig, make: Any) -> list[tuple[Array, Array]]:
    """Logits and tokens of every step; `make` gives a program for a number of token rows."""
    out = []
    for chunks in steps(config):
        program = make(sum(len(c.tokens) for c in chunks) + 3)
        table = build_step(program.dims, chunks)
        check_step(table)
        launched = backend.launch(program, table)
        live = int((table.logit_rows >= 0).sum())
        out.append((launched.logits[:live].copy(), launched.tokens[:live].copy()))
    return out


def run_compiled(config: LlamaConfig, threads: int = 2, **options: Any) -> list[tuple[Array, Array]]:
    with cpu(config, compiled(config, 1, **options).dims, threads) as backend:
        return run(backend, config, lambda tokens: compiled(config, tokens, **options))


def same_bits(a: list[tuple[Array, Array]], b: list[tuple[Array, Array]]) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x[0], y[0])
        np.testing.assert_array_equal(x[1], y[1])


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("config", [CUT, FEW], ids=["cut", "few"])
def test_ranks_compute_what_one_computes(config: LlamaConfig, tp: int) -> None:
    """Within rounding; with the bits of their class on any number of threads, whoever keeps the residual."""
    one = run_compiled(config, tp=1)
    for o in ("sharded", "replicated"):
        found = [run_compiled(config, n, tp=tp, o=o, residual="dealt") for n in (1, 2, 3)]
        found.append(run_compiled(config, tp=tp, o=o, residual="replicated"))
        for (logits, tokens), (expected, chosen) in zip(found[0], one, strict=True):
            np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
            np.testing.assert_array_equal(tokens, chosen)
        for other in found[1:]:
            same_bits(other, found[0])
