"""Shapes, a machine with tiny tiles, and programs compiled from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ground_truth import check

from megakernel import machine
from megakernel.isa import Dtype
from megakernel.model.config import LlamaConfig
from megakernel.program import Program
from megakernel.scheduler import compile_program
from megakernel.scheduler.options import Options


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("tokens", [1, 7])
def test_any_interleaving_gives_the_results_of_program_order(layers: int, workers: int, tokens: int) -> None:
    program = compiled(replace(SMALL, layers=layers), small_machine(workers), tokens, logit_rows=3)
    check(program, seed=layers * 100 + workers * 10 + tokens)


LLAMA_70B = LlamaConfig(
    vocab=128256, hidden=8192, ffn=28672, layers=80, heads=64, kv_heads=8, head_dim=128, max_context=131072
)
SMOLLM2 = LlamaConfig(vocab=49152, hidden=576, ffn=1536, layers=30, heads=9, kv_heads=3, head_dim=64, max_context=8192)
TINY = LlamaConfig(vocab=97, hidden=8, ffn=40, layers=1, heads=1, kv_heads=1, head_dim=8, max_context=64)
SMALL = LlamaConfig(vocab=37, hidden=24, ffn=20, layers=3, heads=6, kv_heads=3, head_dim=4, max_context=64)


def small_machine(workers: int, tile_rows: int = 4) -> machine.Machine:
    """Tiles so small that tiny models have many, and pipelining pays from the first row block."""
    return replace(
        machine.host(workers), tile_rows=tile_rows, tile_cols=8, col_unit=2, matrix_flops=1e9, memory_bytes_per_s=1e12
    )


def compiled(
    config: LlamaConfig,
    target: machine.Machine,
    tokens: int,
    logit_rows: int = 1,
    tp: int = 1,
    options: Options = Options(),  # noqa: B008
) -> Program:
    return compile_program(
        config,
        target,
        dtype=Dtype.BF16,
        tokens=tokens,
        logit_rows=logit_rows,
        max_seqs=4,
        max_context=64,
        tp=tp,
        options=options,
    )
