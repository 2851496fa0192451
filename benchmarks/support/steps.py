"""Makes programs, and backends with random weights, for several scripts."""

from __future__ import annotations

from typing import Any

from megakernel.isa import Dims, Dtype
from megakernel.machine import Machine
from megakernel.model import ModelConfig
from megakernel.model.random_checkpoint import RandomCheckpoint
from megakernel.program import Program
from megakernel.runtime import create
from megakernel.scheduler import Spec, compile_program


def compiled(
    config: ModelConfig, machine: Machine, tokens: int, *, context: int, seqs: int = 1, **more: Any
) -> Program:
    """Compile a program for steps of `tokens` tokens, with logits for one row per sequence. The default dtype is
    bf16."""
    sizes = {"tokens": tokens, "logit_rows": seqs, "max_seqs": seqs, "max_context": context}
    return compile_program(Spec(config, machine, **{"dtype": Dtype.BF16} | sizes | more))


def backend(name: str, config: ModelConfig, dims: Dims, *, pages: int = 0, **more: Any) -> Any:
    """Create a backend with `pages` KV pages (by default, enough for one sequence)."""
    checkpoint = RandomCheckpoint("random", config, seed=0)
    return create(name, checkpoint, dims, pages or dims.bucket.pages_per_seq, **more)
