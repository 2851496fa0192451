"""Provides model shapes and a machine with tiny tiles, and compiles programs for them."""

from dataclasses import replace
from typing import Any

import numpy as np

from megakernel import machine
from megakernel.isa import Dtype
from megakernel.isa.record import Records, phase_number
from megakernel.model.config import ModelConfig
from megakernel.program import Program
from megakernel.scheduler import Spec, compile_program
from megakernel.scheduler.options import Options

LLAMA_70B = ModelConfig(
    vocab=128256, hidden=8192, ffn=28672, layers=80, heads=64, kv_heads=8, head_dim=128, max_context=131072
)
SMOLLM2 = ModelConfig(vocab=49152, hidden=576, ffn=1536, layers=30, heads=9, kv_heads=3, head_dim=64, max_context=8192)
TINY = ModelConfig(vocab=97, hidden=8, ffn=40, layers=1, heads=1, kv_heads=1, head_dim=8, max_context=64)
SMALL = ModelConfig(vocab=37, hidden=24, ffn=20, layers=3, heads=6, kv_heads=3, head_dim=4, max_context=64)


def small_machine(workers: int, tile_rows: int = 4) -> machine.Machine:
    """Return a machine whose tiles are so small that tiny models have many of them. The machine's memory is so fast
    compared with its arithmetic that a panel (the row blocks that share one pass over the weights) is one row block."""
    tiled = machine.host(workers).with_tiles(rows=tile_rows, cols=8, col_unit=2)
    return replace(tiled, matrix_flops=1e9, memory_bytes_per_s=1e12)


def random_model(rng: np.random.Generator, most: int) -> ModelConfig:
    """Return a random model with fewer than `most` FFN columns and vocabulary entries."""
    kv_heads, group, head_dim = (int(rng.integers(1, n)) for n in (5, 4, 3))
    vocab, ffn = (int(rng.integers(2, most)) for _ in range(2))
    hidden, layers = int(rng.integers(1, 30)), int(rng.integers(1, 4))
    return ModelConfig(vocab, hidden, ffn, layers, kv_heads * group, kv_heads, 2 * head_dim, max_context=64)


def compiled(
    config: ModelConfig,
    target: machine.Machine,
    tokens: int,
    logit_rows: int = 1,
    tp: int = 1,
    options: Options = Options(),  # noqa: B008
    **more: Any,
) -> Program:
    """Compile a program, in bfloat16 and for short contexts unless `more`, further fields of Spec, say otherwise."""
    more = {"dtype": Dtype.BF16, "max_seqs": 4, "max_context": 64} | more
    return compile_program(Spec(config, target, tokens=tokens, logit_rows=logit_rows, tp=tp, options=options, **more))


def of(program: Program, phase: str) -> Records:
    """Return the records of a phase in all streams. The phase must belong to the layers or to the epilogue."""
    wanted = program.forward.by_name[phase]
    records = (program.epilogue if wanted in program.forward.epilogue else program.body).records
    return records[phase_number(records) == wanted.number]
