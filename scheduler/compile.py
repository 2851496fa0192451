"""Compiles a program for a model, a machine and a maximum step size: lists the phases (operations), cuts them into tile
tasks, lets tasks wait for each other by counters, assigns tasks to workers, and encodes them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from megakernel.errors import MegakernelError
from megakernel.isa import Buffer, Dtype
from megakernel.isa import record as rec
from megakernel.machine import Machine
from megakernel.model.config import ModelConfig
from megakernel.program import Program
from megakernel.scheduler.candidates import fastest
from megakernel.scheduler.cost import panel_blocks
from megakernel.scheduler.derive import derive
from megakernel.scheduler.encode import encode
from megakernel.scheduler.options import Options
from megakernel.scheduler.place import place
from megakernel.scheduler.sync import synchronise
from megakernel.scheduler.tasks import Stages, Tasks

_RANKS, _RANKS_TEXT = (1, 2, 4, 8), "1, 2, 4 or 8"
_DEFAULT = Options()


def compile_program(
    config: ModelConfig,
    machine: Machine,
    *,
    dtype: Dtype,
    tokens: int,
    logit_rows: int,
    max_seqs: int,
    max_context: int,
    tp: int = 1,
    options: Options = _DEFAULT,
    weight_bits: Mapping[Buffer, float] | None = None,
    quantised_kv: bool = False,
    q8_activations: bool = False,
    stages: Stages | None = None,
) -> Program:
    """Compile a program for steps of up to `tokens` token rows, of which `logit_rows` get logits, on `tp` ranks.

    `max_seqs` and `max_context` (tokens) are the engine's limits. The backend that launches the program must have the
    same limits and the same `options.matmul`, so an engine decides `matmul` with `with_matmul` before it compiles its
    first program. `weight_bits` gives the bits per element of weight matrices that are not stored in `dtype`. With
    `quantised_kv`, K and V are stored in Q8_0. With `q8_activations`, the inputs of quantised weights are rounded to 8
    bits. The backend must do the same. The result depends only on these arguments; `stages` keeps what calls with
    other `options` can use again. Raises MegakernelError for arguments out of range."""
    _check(config, machine, tp, tokens=tokens, logit_rows=logit_rows, max_seqs=max_seqs, max_context=max_context)
    tasks = fastest(
        config,
        machine,
        dtype=dtype,
        tokens=tokens,
        logit_rows=logit_rows,
        max_seqs=max_seqs,
        max_context=max_context,
        tp=tp,
        options=options,
        weight_bits=weight_bits,
        quantised_kv=quantised_kv,
        q8_activations=q8_activations,
        stages=stages,
    )
    return build_program(tasks, options, stages)


def build_program(tasks: Tasks, options: Options = _DEFAULT, stages: Stages | None = None) -> Program:
    """Turn tile tasks into a program: add counters for synchronisation, assign tasks to workers, and encode them."""
    stages = stages or Stages()
    overlap = options.overlap_ranks
    sync = stages.once((tasks, overlap), lambda: synchronise(tasks, derive(tasks, stages), overlap_ranks=overlap))
    blocks = panel_blocks(tasks.dims, tasks.machine, options.panel)
    placed = [
        stages.once(
            (tuple(segment), tasks.dims, blocks, overlap, options.interleave),
            partial(place, segment, tasks.dims, tasks.machine, options),
        )
        for segment in tasks.segments
    ]
    return encode(tasks, sync, placed, options.claimed)


def _check(config: ModelConfig, machine: Machine, tp: int, **sizes: int) -> None:
    if tp not in _RANKS:
        raise MegakernelError(f"cannot compile for tensor parallel size {tp}: it must be {_RANKS_TEXT}")
    for name, value in sizes.items():
        if value < 1:
            raise MegakernelError(f"cannot compile a program with {name} = {value}: it must be at least 1")
    if config.layers > rec.MOST_LAYERS:
        raise MegakernelError(f"cannot compile {config.layers} layers: a program holds at most {rec.MOST_LAYERS}")
    if machine.col_unit % 2:
        raise MegakernelError(
            f"machine {machine.name}: col_unit is {machine.col_unit}, but tiles must not cut a RoPE pair: make it even"
        )
