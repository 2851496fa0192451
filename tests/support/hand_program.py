"""Programs made by hand for a model: independent of the scheduler, so that a backend's tests do not rest on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from handmade import handmade
from program_parts import segment

from megakernel.isa import Dims, Dtype
from megakernel.model import families
from megakernel.model.checkpoint import weight_dims
from megakernel.model.config import ModelConfig
from megakernel.program import Program


def make_dims(config: ModelConfig, **overrides: Any) -> Dims:
    """Small defaults: 24 token rows in row blocks of 8, pages of 16 tokens, splits possible."""
    sizes = {"kv_page": 16, "row_block": 8, "tokens": 24, "logit_rows": 24, "max_seqs": 8, "items": 64, "partials": 64}
    sizes |= {"max_context": config.max_context, "attention_slots": 3, "bias_entries": 16}
    return replace(weight_dims(config, Dtype.F32), **sizes | overrides)


def make_program(config: ModelConfig, dims: Dims, workers: int = 1, tile: int = 32, queue: str = "none") -> Program:
    """A forward pass. `queue`: what `handmade` says."""
    return handmade(dims, workers, tile, queue, families.forward(config, dims))


def make_queue_program(config: ModelConfig, dims: Dims, workers: int = 1, tile: int = 32) -> Program:
    """The same with the whole body in one queue for each rank, which every worker claims from with one drain."""
    program = make_program(config, dims, workers, tile, "body")
    return replace(program, body=segment(*(program.body.stream(i)[-1:] for i in range(dims.tp * workers))))
