"""Compiles a program for a model, a machine and a bucket, in steps: candidates, tasks, counters,
placement, records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megakernel.errors import MegakernelError
from megakernel.isa import Buffer, Dtype, Units
from megakernel.isa import record as rec
from megakernel.machine import Machine
from megakernel.model.config import ModelConfig
from megakernel.program import Program
from megakernel.runtime.targets import TARGETS
from megakernel.scheduler.candidates import Candidates, program_dims, with_matmul, with_tiles
from megakernel.scheduler.derive import derive
from megakernel.scheduler.encode import encode
from megakernel.scheduler.lower import lower
from megakernel.scheduler.options import Options
from megakernel.scheduler.place import place
from megakernel.scheduler.sync import synchronise
from megakernel.scheduler.tasks import Tasks

# The maximum number of row blocks of all ranks of a program. It keeps the time to compile under a minute, and counter
# numbers small enough for a record.
_MAX_BLOCKS = 4096
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
) -> Program:
    """Compile one bucket of `tokens` token rows, of which `logit_rows` rows get logits, for `tp` ranks.

    `max_seqs` and `max_context` (tokens) are the engine's limits. The backend that launches the program must have the
    same limits and the same `options.matmul`, so an engine decides `matmul` with `with_matmul` before it compiles any
    bucket. `weight_bits` gives the bits per element of weight matrices that are not stored in `dtype`. With
    `quantised_kv`, K and V are stored in Q8_0, and the backend must do the same. The result depends only on the
    arguments. Raises MegakernelError for arguments out of range.
    """
    sizes = {"tokens": tokens, "logit_rows": logit_rows, "max_seqs": max_seqs, "max_context": max_context}
    _check(config, machine, tp=tp, **sizes)
    options = with_matmul(options, config, machine, tp=tp, tokens=tokens)
    units, shape = TARGETS[machine.target].chosen(options.matmul), options.shape
    if options.pairs == "on":
        machine = _in_pairs(machine, units)
    rows, cols = (getattr(shape, name) or getattr(machine, name) for name in ("tile_rows", "tile_cols"))
    machine = with_tiles(replace(machine, tile_rows=rows, tile_cols=cols), config, tp=tp, units=units)
    most = _MAX_BLOCKS // tp * machine.tile_rows
    for name, value in (("tokens", tokens), ("logit_rows", logit_rows)):
        if value > most:
            raise MegakernelError(f"cannot compile {value} {name} for machine {machine.name}: the limit is {most}")
    dims = program_dims(
        config,
        machine,
        dtype=dtype,
        **sizes,
        tp=tp,
        units=units,
        sms=2 if options.pairs == "on" else 1,
        claims=shape.claims if options.claimed else 1,
        quantised_kv=quantised_kv,
    )
    candidate = Candidates(config, machine, options, weight_bits).fastest(dims)
    return build_program(lower(candidate, machine, shape), machine, options)


def build_program(tasks: Tasks, machine: Machine, options: Options = _DEFAULT) -> Program:
    """Synchronise, place and encode the tasks."""
    sync = synchronise(tasks, derive(tasks), machine.workers, overlap_ranks=options.overlap_ranks)
    placed = [place(segment, tasks.dims, machine, options) for segment in tasks.segments]
    return encode(tasks, sync, placed, machine.name, machine.workers, options.claimed)


def _in_pairs(machine: Machine, units: Units) -> Machine:
    """Return `machine` with each worker made of two SMs. It has half as many workers, and tiles may have twice the
    rows.
    """
    if units is not Units.TENSOR:
        raise MegakernelError(
            "cannot compile for pairs of SMs: only programs for the matrix units of a GPU can use them"
        )
    if machine.workers % 2:
        raise MegakernelError(f"cannot compile for pairs of SMs: {machine.workers} is an odd number of workers")
    return replace(machine, workers=machine.workers // 2, tile_rows=2 * machine.tile_rows)


def _check(config: ModelConfig, machine: Machine, *, tp: int, **sizes: int) -> None:
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
