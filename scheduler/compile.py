"""One call from a model, a machine and a bucket to a program."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import BY_NAME, Dtype
from ..isa import record as rec
from ..isa.record import Records
from ..machine import Machine
from ..model.config import LlamaConfig
from ..program import Program, Segment
from .choose import choose, settle, tiles
from .derive import BODY, EPILOGUE, derive
from .lower import Phase, Tasks, lower, program_dims
from .options import Options
from .place import Placed, place
from .sync import Join, Words, synchronise

# Row blocks of all ranks of a program: keeps compiling under a minute, and counters far below what a record can name.
_MAX_BLOCKS = 4096
_RANKS, _RANKS_TEXT = (1, 2, 4, 8), "1, 2, 4 or 8"
_DEFAULT = Options()
# Attention slots for each worker where it claims them: the work of a slot is then an even share of a step's at best.
_CLAIMS_PER_WORKER = 4


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
    options: Options = _DEFAULT,
) -> Program:
    """Compile one bucket: `tokens` token rows of which `logit_rows` rows get logits, for `tp` ranks.

    `max_seqs` and `max_context` (tokens) are the engine's limits and must agree with the backend that launches
    the program, and so must `options.matmul`: an engine settles it first. The result depends on the arguments only.
    Raises MegakernelError for arguments out of range.
    """
    sizes = {"tokens": tokens, "logit_rows": logit_rows, "max_seqs": max_seqs, "max_context": max_context}
    _check(config, machine, tp=tp, **sizes)
    options = settle(options, config, machine, tp=tp, tokens=tokens)
    dots = machine.pages > 0 and options.matmul == "dots"
    machine = tiles(machine, config, tp=tp, dots=dots)
    _check_blocks(machine, tp, tokens=tokens, logit_rows=logit_rows)
    dims = program_dims(
        config,
        machine,
        dtype=dtype,
        **sizes,
        tp=tp,
        dots=dots,
        slots=machine.workers * (1 if options.queue == "none" else _CLAIMS_PER_WORKER),
    )
    return build_program(lower(choose(dims, machine, options), machine), machine, options)


def build_program(tasks: Tasks, machine: Machine, options: Options = _DEFAULT) -> Program:
    """Synchronise and place tasks, and encode them."""
    sync = synchronise(tasks, derive(tasks), machine.workers, overlap_ranks=options.overlap_ranks)
    # What waits for whole phases must come after them in every stream.
    interleave = options.interleave and options.overlap_ranks
    segments, queues = [], Segment(np.zeros((0, rec.WORDS), np.int32), np.zeros(1, np.int32))
    for number, phases in enumerate(tasks.segments):
        placed = place(phases, tasks.dims, machine, interleave=interleave)
        joins = [join for join in sync.joins if join.segment == number]
        body = _encode(phases, placed, sync.waits[number], sync.signals[number], joins, machine.workers)
        if number == BODY and options.queue != "none":
            body, queues = _with_queue(body, tasks.dims.tp, machine.workers, options.queue)
        segments.append(_streams(body, tasks.dims.tp * machine.workers))
    if sync.barrier:
        segments[EPILOGUE] = _with_barrier(segments[EPILOGUE], sync.barrier, machine.workers)
    ranks = tasks.dims.tp
    return Program(
        dims=tasks.dims,
        machine=machine.name,
        ranks=ranks,
        workers=machine.workers,
        counters=sync.totals_first.shape[-1],
        prologue=segments[0],
        body=segments[1],
        epilogue=segments[2],
        totals_first=sync.totals_first,
        totals_middle=sync.totals_middle,
        totals_last=sync.totals_last,
        queues=queues,
    )


def _check(config: LlamaConfig, machine: Machine, *, tp: int, **sizes: int) -> None:
    if tp not in _RANKS:
        raise MegakernelError(f"cannot compile for tensor parallel size {tp}: it must be {_RANKS_TEXT}")
    for name, value in sizes.items():
        if value < 1:
            raise MegakernelError(f"cannot compile a program with {name} = {value}: it must be at least 1")
    if config.layers > rec.LAYER_MASK:
        raise MegakernelError(f"cannot compile {config.layers} layers: a program holds at most {rec.LAYER_MASK}")
    if machine.col_unit % 2:
        raise MegakernelError(
            f"machine {machine.name}: col_unit is {machine.col_unit}, but tiles must not cut a RoPE pair: make it even"
        )


def _check_blocks(machine: Machine, tp: int, **rows: int) -> None:
    most = _MAX_BLOCKS // tp * machine.tile_rows
    for name, value in rows.items():
        if value > most:
            raise MegakernelError(f"cannot compile {value} {name} for machine {machine.name}: at most {most}")


def _records(phase: Phase, waits: Words, signals: Words) -> Records:
    out = np.zeros((len(phase), rec.WORDS), dtype=np.int32)
    out[:, 0] = phase.instruction.opcode
    for i, name in enumerate(phase.instruction.operands):
        out[:, rec.OPERAND_WORD + i] = phase.columns[name]
    rec.waits(out)[:] = waits
    rec.signals(out)[:] = signals
    return out


def _join(waits: Words, signals: Words) -> Records:
    """[1, WORDS]: one `join`."""
    return rec.encode(BY_NAME["join"].opcode, (), waits, signals)[None]


@dataclass(frozen=True)
class _Placed:
    """Records of a segment, with the stream and the place in the order of all streams of each."""

    records: Records
    stream: NDArray[np.int64]  # rank * workers + worker
    order: NDArray[np.float64]


def _encode(
    phases: list[Phase],
    placed: list[Placed],
    waits: list[Words],
    signals: list[Words],
    joins: list[Join],
    workers: int,
) -> _Placed:
    """A join runs where its first consumer does."""
    records = [_records(*columns) for columns in zip(phases, waits, signals, strict=True)]
    records += [_join(join.waits, join.signal) for join in joins]
    order: list[NDArray[np.float64]] = [p.order.astype(np.float64) for p in placed]
    stream = [phase.rank * workers + p.worker for phase, p in zip(phases, placed, strict=True)]
    for join in joins:
        first = join.tasks[np.argmin(placed[join.phase].order[join.tasks])]
        order.append(np.array([placed[join.phase].order[first] - 0.5]))
        stream.append(stream[join.phase][[first]])
    return _Placed(np.concatenate(records), np.concatenate(stream), np.concatenate(order))


def _streams(placed: _Placed, count: int) -> Segment:
    """Each stream's records in order."""
    sorting = np.lexsort((placed.order, placed.stream))
    offsets = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(np.bincount(placed.stream, minlength=count), out=offsets[1:])
    return Segment(placed.records[sorting], offsets)


def _with_queue(body: _Placed, ranks: int, workers: int, what: str) -> tuple[_Placed, Segment]:
    """The body with a queue for each rank instead of its attention or all of its instructions.

    Every worker of the rank drains the queue where it begins. Attention follows all that its items may wait for
    and precedes all that waits for it, in the order of all streams, so all of it may be claimed at once.
    """
    rank = body.stream // workers
    claimed = np.ones(len(rank), bool) if what == "body" else rec.opcode(body.records) == BY_NAME["attention"].opcode
    queues = _streams(_Placed(body.records[claimed], rank[claimed], body.order[claimed]), ranks)
    lengths = np.repeat(np.diff(queues.offsets), workers)
    drains = np.zeros((ranks * workers, rec.WORDS), dtype=np.int32)
    drains[:, 0] = BY_NAME["drain"].opcode
    drains[:, rec.OPERAND_WORD + BY_NAME["drain"].operands.index("end")] = lengths
    begin = np.full(ranks, np.inf)
    np.minimum.at(begin, rank[claimed], body.order[claimed])
    used, left = lengths > 0, ~claimed
    rest = _Placed(
        np.concatenate([body.records[left], drains[used]]),
        np.concatenate([body.stream[left], np.flatnonzero(used)]),
        np.concatenate([body.order[left], np.repeat(begin, workers)[used]]),
    )
    return rest, queues


def _with_barrier(epilogue: Segment, counters: tuple[int, int], workers: int) -> Segment:
    """Every stream ends after every instruction of every rank.

    All workers of a rank meet at the first counter, where one of them says so to all ranks' second.
    """
    gather, leave = counters
    none = np.zeros(0, np.int32)
    ends = []
    for stream in range(len(epilogue.offsets) - 1):
        rank, worker = divmod(stream, workers)
        ends.append(_join(none, np.array([rec.counter_word(gather, rank=rank)], np.int32)))
        if worker == 0:
            all_ranks = np.array([rec.counter_word(leave, rank=rec.ALL_RANKS)], np.int32)
            ends.append(_join(np.array([rec.counter_word(gather)], np.int32), all_ranks))
        ends.append(_join(np.array([rec.counter_word(leave)], np.int32), none))
    after = np.repeat(
        np.arange(len(epilogue.offsets) - 1), [3 if s % workers == 0 else 2 for s in range(len(epilogue.offsets) - 1)]
    )
    records = np.insert(epilogue.records, epilogue.offsets[1:][after], np.concatenate(ends), axis=0)
    added = np.concatenate([[0], np.cumsum(np.bincount(after))])
    return Segment(records, (epilogue.offsets + added).astype(np.int32))
