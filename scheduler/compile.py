"""One call from a model, a machine and a bucket to a program."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import BY_NAME, Dtype
from ..isa.record import LAYER_MASK, OPERAND_WORD, SIGNAL_WORD, SIGNALS, WAIT_WORD, WAITS, WORDS, Records
from ..machine import Machine
from ..model.config import LlamaConfig
from ..program import Program, Segment
from .derive import derive
from .lower import Phase, Tasks, lower, program_dims
from .place import Placed, place
from .sync import Join, Words, synchronise

# Row blocks of a program: keeps compiling under a minute, and counters far below what a record can name.
_MAX_BLOCKS = 4096


def compile_program(
    config: LlamaConfig,
    machine: Machine,
    *,
    dtype: Dtype,
    tokens: int,
    logit_rows: int,
    max_seqs: int,
    max_context: int,
    tp: int = 1,
) -> Program:
    """Compile one bucket: `tokens` token rows of which `logit_rows` rows get logits.

    `max_seqs` and `max_context` (tokens) are the engine's limits and must agree with the backend that launches
    the program. The result depends on the arguments only. Raises MegakernelError for arguments out of range.
    """
    _check(config, machine, tokens=tokens, logit_rows=logit_rows, max_seqs=max_seqs, max_context=max_context, tp=tp)
    dims = program_dims(
        config,
        machine,
        dtype=dtype,
        tokens=tokens,
        logit_rows=logit_rows,
        max_seqs=max_seqs,
        max_context=max_context,
    )
    return build_program(lower(dims, machine), machine, ranks=tp)


def build_program(tasks: Tasks, machine: Machine, *, ranks: int = 1) -> Program:
    """Synchronise and place tasks, and encode them."""
    sync = synchronise(tasks, derive(tasks))
    segments = [
        _segment(
            phases,
            place(phases, tasks.dims, machine),
            sync.waits[number],
            sync.signals[number],
            [join for join in sync.joins if join.segment == number],
            ranks * machine.workers,
        )
        for number, phases in enumerate(tasks.segments)
    ]
    return Program(
        dims=tasks.dims,
        machine=machine.name,
        ranks=ranks,
        workers=machine.workers,
        counters=sync.totals_first.shape[-1],
        prologue=segments[0],
        body=segments[1],
        epilogue=segments[2],
        totals_first=sync.totals_first.reshape(ranks, -1),
        totals_middle=sync.totals_middle.reshape(ranks, -1),
        totals_last=sync.totals_last.reshape(ranks, -1),
    )


def _check(config: LlamaConfig, machine: Machine, *, tp: int, **sizes: int) -> None:
    if tp != 1:
        raise MegakernelError(f"cannot compile for tensor parallel size {tp}: only 1 is supported yet, use tp=1")
    for name, value in sizes.items():
        if value < 1:
            raise MegakernelError(f"cannot compile a program with {name} = {value}: it must be at least 1")
    for name in ("tokens", "logit_rows"):
        if sizes[name] > _MAX_BLOCKS * machine.tile_rows:
            most = _MAX_BLOCKS * machine.tile_rows
            raise MegakernelError(f"cannot compile {sizes[name]} {name} for machine {machine.name}: at most {most}")
    if config.layers > LAYER_MASK:
        raise MegakernelError(f"cannot compile {config.layers} layers: a program holds at most {LAYER_MASK}")
    if machine.col_unit % 2:
        raise MegakernelError(
            f"machine {machine.name}: col_unit is {machine.col_unit}, but tiles must not cut a RoPE pair: make it even"
        )


def _records(phase: Phase, waits: Words, signals: Words) -> Records:
    out = np.zeros((len(phase), WORDS), dtype=np.int32)
    out[:, 0] = phase.instruction.opcode
    for i, name in enumerate(phase.instruction.operands):
        out[:, OPERAND_WORD + i] = phase.columns[name]
    out[:, WAIT_WORD : WAIT_WORD + WAITS] = waits
    out[:, SIGNAL_WORD : SIGNAL_WORD + SIGNALS] = signals
    return out


def _join_records(joins: list[Join]) -> Records:
    out = np.zeros((len(joins), WORDS), dtype=np.int32)
    for record, join in zip(out, joins, strict=True):
        record[0] = BY_NAME["join"].opcode
        record[WAIT_WORD : WAIT_WORD + len(join.waits)] = join.waits
        record[SIGNAL_WORD] = join.signal
    return out


def _segment(
    phases: list[Phase],
    placed: list[Placed],
    waits: list[Words],
    signals: list[Words],
    joins: list[Join],
    streams: int,
) -> Segment:
    """Encode one segment. Streams are indexed rank * workers + worker. A join runs where its first consumer does."""
    records = [_records(*columns) for columns in zip(phases, waits, signals, strict=True)]
    order: list[NDArray[np.float64]] = [p.order.astype(np.float64) for p in placed]
    worker = [p.worker for p in placed]
    for join in joins:
        first = join.tasks[np.argmin(placed[join.phase].order[join.tasks])]
        order.append(np.array([placed[join.phase].order[first] - 0.5]))
        worker.append(placed[join.phase].worker[[first]])
    stream = np.concatenate(worker)
    sorting = np.lexsort((np.concatenate(order), stream))
    offsets = np.zeros(streams + 1, dtype=np.int32)
    np.cumsum(np.bincount(stream, minlength=streams), out=offsets[1:])
    return Segment(np.concatenate([*records, _join_records(joins)])[sorting], offsets)
