"""Builds simple programs for any forward pass without the scheduler, so that tests do not depend on the scheduler.

The tiles of a phase are assigned to a rank's workers in turn, or appended to the rank's queue, one row block after
another. A tile waits until the previous phase has finished the tile's row block. To do so, it waits for a counter: each
phase has one counter per row block, and the phase before attention has one per row block and head group. A counter has
the same index on every rank.

A finished tile signals its phase's counter. If every rank computes all rows in this phase and in the next one, the tile
signals the counter on its own rank. If the next phase runs only on the rank that owns the row block, the tile signals
the counter on that rank. Otherwise it signals the counters on all ranks."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from sizes import config_of, least_dims

from megakernel.isa import BUFFERS, DRAIN, JOIN, Dims, Dtype, Forward, Operation, Phase, Result, Rows, ceil_div
from megakernel.isa.record import ALL_RANKS, OWNER, WORDS, Records, counter_word, encode
from megakernel.model import families
from megakernel.model.config import ModelConfig
from megakernel.program import SEGMENTS, Program, Segment
from megakernel.scheduler import passes


def record(phase: Phase, *operands: int, waits: Sequence[int] = (), signals: Sequence[int] = ()) -> Records:
    """Return one record of a phase. `waits` and `signals` are encoded words, as `counter_word` returns them."""
    if len(operands) != len(phase.operands):
        raise ValueError(f"{phase.name} takes the operands {phase.operands}, not {operands}")
    return encode(phase.number, operands, waits, signals)


def segment(*streams: Sequence[Records]) -> Segment:
    records = [r for stream in streams for r in stream]
    offsets = np.cumsum([0, *map(len, streams)]).astype(np.int32)
    return Segment(np.array(records, np.int32).reshape(-1, WORDS), offsets)


def small_dims(**changes: float) -> Dims:
    sizes = {"vocab": 20, "hidden": 16, "ffn": 24, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 4}
    sizes |= {"dtype": int(Dtype.F32), "kv_block": 128, "kv_page": 16, "row_block": 4, "tokens": 7, "logit_rows": 3}
    sizes |= {"max_seqs": 2, "max_context": 128, "items": 8, "attention_slots": 2, "partials": 8, "bias_entries": 1}
    return Dims.of(**{"rms_eps": 1e-5} | sizes | changes)  # type: ignore[arg-type]


def rank_dims(tp: int, **changes: int) -> Dims:
    """Return dimensions that split unevenly: the shares of the ranks differ in size, and some can be empty."""
    sizes = {"vocab": 150, "ffn": 70, "row_block": 2, "hidden": 8, "layers": 2, "heads": 3, "kv_heads": 3}
    return small_dims(tp=tp, **sizes | changes)


def llama(d: Dims, norm: str = "own") -> Forward:
    """Return the forward pass of a Llama model with these dimensions and without biases."""
    return passes.apply(families.forward(config_of(d)), d.split, norm)


def handmade(
    dims: Dims | None = None, workers: int = 2, tile: int = 8, queue: str = "none", forward: Forward | None = None
) -> Program:
    """Return a program with `tile` columns per matmul tile and one head group per KV head. `queue` says which
    instructions of the layers are in a queue on each rank: "none", "attention" (one instruction per attention slot) or
    "body" (all of them). With "body", each worker's stream has two drain instructions, which claim instructions from
    the queue: the first ends after a third of the queue, the second at its end."""
    dims = dims or small_dims()
    return _Builder(dims, forward or llama(dims), workers, tile, queue).program()


def make_dims(config: ModelConfig, **overrides: Any) -> Dims:
    """Return small dimensions for a model: 24 token rows in row blocks of 8, and KV pages of 16 tokens. There are 64
    attention partials, so that attention over a long context can be split."""
    sizes = {"kv_page": 16, "row_block": 8, "tokens": 24, "logit_rows": 24, "max_seqs": 8, "items": 64, "partials": 64}
    sizes |= {"max_context": config.max_context, "attention_slots": 3, "bias_entries": 16}
    return least_dims(config, Dtype.F32).changed(**sizes | overrides)


def make_program(config: ModelConfig, dims: Dims, workers: int = 1, tile: int = 32, queue: str = "none") -> Program:
    """Return a handmade program for a model's forward pass. `queue` has the same meaning as in `handmade`."""
    return handmade(dims, workers, tile, queue, passes.apply(families.forward(config), dims.split))


def make_queue_program(config: ModelConfig, dims: Dims, workers: int = 1, tile: int = 32) -> Program:
    """Return a program that has all layer instructions of a rank in one queue. Inside the layers, a worker's stream has
    only one instruction, which claims from this queue until its end."""
    program = make_program(config, dims, workers, tile, "body")
    return replace(program, body=segment(*(program.body.stream(i)[-1:] for i in range(dims.split.tp * workers))))


class _Builder:
    """Collects the streams and queues of all ranks, and counts the arrivals at each counter."""

    def __init__(self, dims: Dims, forward: Forward, workers: int, tile: int, queue: str) -> None:
        self.dims, self.forward, self.workers, self.tile, self.queue = dims, forward, workers, tile, queue
        self.ranks = [dims.ranks[rank] for rank in range(dims.split.tp)]
        most, block = dims.bucket.tokens, dims.bucket.row_block
        self.blocks = [(row, min(block, most - row)) for row in range(0, most, block)]
        self.streams: list[list[list[Records]]] = [[[] for _ in range(dims.split.tp * workers)] for _ in SEGMENTS]
        self.queues: list[list[Records]] = [[] for _ in range(dims.split.tp)]
        # Keys: (part of the program, 1 for a counter of the next layer and otherwise 0, rank, counter).
        self.arrivals: Counter[tuple[int, int, int, int]] = Counter()
        self.everyone = ALL_RANKS if dims.split.tp > 1 else 0
        self.dealt = dims.split.tp > 1 and not dims.split.replicated_residual
        self.segment, self.counters = 0, 0
        self.turns = [0] * dims.split.tp

    def grid(self, size: int) -> int:
        first, self.counters = self.counters, self.counters + size
        return first

    def arrive(self, counter: int, to: int, count: int, ahead: bool = False) -> None:
        for rank in range(self.dims.split.tp) if to == ALL_RANKS else [to]:
            self.arrivals[self.segment, int(ahead), rank, counter] += count

    def signal(self, counter: int, to: int, ahead: bool = False) -> int:
        """Count one arrival at a counter and return the word that signals it."""
        self.arrive(counter, to, 1, ahead)
        return counter_word(counter, rank=to, next_layer=ahead)

    def add(self, rank: int, words: Records) -> None:
        """Append an instruction to the rank's queue, or to the stream of one of its workers in turn."""
        attention = self.forward.by_number[int(words[0])].operation is Operation.ATTENTION
        if self.segment == 1 and (self.queue == "body" or (self.queue == "attention" and attention)):
            self.queues[rank].append(words)
        else:
            self.streams[self.segment][rank * self.workers + self.turns[rank] % self.workers].append(words)
        self.turns[rank] += 1

    def add_to_each_worker(self, rank: int, *records: Records) -> None:
        for worker in range(self.workers):
            self.streams[self.segment][rank * self.workers + worker] += records

    def program(self) -> Program:
        # The counters for which the first phase of a layer and the first phase of the epilogue wait.
        entry = self.grid(len(self.blocks))
        for number, phases in enumerate(self.forward.segments):
            self.segment, before = number, entry if number else None
            for phase, following in pairwise((*phases, self.forward.body[0])):
                ends = number < 2 and phase is phases[-1]
                into = entry if ends else self.grid(len(self.blocks) * self._groups(phase))
                self._phase(phase, following, before, into, ahead=ends and number == 1)
                before = into
            if self.queue == "body" and number == 1:
                for rank, records in enumerate(self.queues):
                    ends_at = (len(records) // 3, len(records))
                    self.add_to_each_worker(rank, *(record(DRAIN, 0, end) for end in ends_at))
        if self.dims.split.tp > 1:
            self._exit_barrier()
        totals = np.zeros((3, 2, self.dims.split.tp, self.counters), dtype=np.int32)
        for where, count in self.arrivals.items():
            totals[where] = count
        prologue, body, epilogue = totals
        return Program(
            self.dims,
            self.forward,
            "hand",
            self.dims.split.tp,
            self.workers,
            self.counters,
            *(segment(*streams) for streams in self.streams),
            prologue[0] + body[0],
            body[0] + body[1],
            body[1] + epilogue[0],
            *([segment(*self.queues)] if any(self.queues) else []),
        )

    def _groups(self, phase: Phase) -> int:
        """Return the number of counters per row block: one per KV head if attention follows, otherwise one."""
        return max(d.split.rank_kv_heads for d in self.ranks) if phase.result is Result.HEADS else 1

    def _to(self, phase: Phase, following: Phase, d: Dims, row: int) -> int:
        """Return the rank whose counter a finished tile signals, or `everyone` for all ranks."""
        if following.rows is Rows.OWN:
            return d.owner(row) if self.dealt else self.everyone
        return d.split.rank if phase.rows is following.rows is Rows.EVERY else self.everyone

    def _phase(self, phase: Phase, following: Phase, before: int | None, into: int, ahead: bool) -> None:
        if phase.operation is Operation.ATTENTION:
            assert before is not None
            self._attention(phase, following, before, into)
            return
        for d in self.ranks:
            for block, operands in self._tiles(phase, d):
                waits, to = [], self._to(phase, following, d, operands[0])
                if before is not None:
                    logit_norm = phase.operation is Operation.NORM and phase.rows is Rows.LOGIT
                    waits = [counter_word(before, indexed=True) if logit_norm else counter_word(before + block)]
                counter = into + block
                if phase.result is Result.HEADS:
                    counter, to = into + block * d.split.rank_kv_heads + self._head_group(d, operands[2]), d.split.rank
                signals = [self.signal(counter, to, ahead)]
                self.add(d.split.rank, record(phase, *operands, waits=waits, signals=signals))

    def _tiles(self, phase: Phase, d: Dims) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the row block and the operands of each instruction that a rank has in a phase. All rows that get logits
        count as one row block."""
        own, count = d.split.rank * d.own_logit_rows, d.bucket.logit_rows
        runs = [(i, row, rows) for i, (row, rows) in enumerate(self.blocks)]
        if phase.rows is Rows.OWN:
            runs = [run for run in runs if d.split.rank in d.owners(run[1])]
        elif phase.rows is Rows.LOGIT:
            step = count if phase.is_matmul else ceil_div(count, 2)
            runs = [(0, row, min(step, count - row)) for row in range(0, count, step)]
        elif phase.rows is Rows.SAMPLED:
            runs = [(0, own, min(d.own_logit_rows, count - own))] if own < count else []
        if "col" not in phase.operands:
            yield from ((block, (row, rows)) for block, row, rows in runs)
            return
        reduces = phase.operation is Operation.REDUCE and phase.output is not None
        width = BUFFERS[phase.output].shape(d, 0)[1] if reduces else phase.width(d.split)
        tile = d.model.head_dim if phase.result is Result.HEADS else self.tile
        for block, row, rows in runs:
            for col in range(0, width, tile):
                yield block, (row, rows, col, min(tile, width - col))

    @staticmethod
    def _head_group(d: Dims, col: int) -> int:
        head = col // d.model.head_dim
        if head < d.split.rank_heads:
            return (d.split.first_head + head) // d.model.group_size - d.split.first_kv_head
        return (head - d.split.rank_heads) % d.split.rank_kv_heads

    def _attention(self, phase: Phase, following: Phase, before: int, into: int) -> None:
        owned = self.dealt and following.rows is Rows.OWN
        for d in self.ranks[: self.dims.split.head_ranks]:
            to = OWNER if owned else self.everyone if following.rows is Rows.OWN else d.split.rank
            waits, signals = [counter_word(before, indexed=True)], [counter_word(into, rank=to, indexed=True)]
            for slot in range(d.bucket.attention_slots):
                operands = slot, 1, d.split.rank_kv_heads
                self.add(d.split.rank, record(phase, *operands, waits=waits, signals=signals))
            for i, (row, rows) in enumerate(self.blocks):
                self.arrive(into + i, d.owner(row) if owned else to, rows * d.split.rank_kv_heads)
            if self.queue == "attention":
                self.add_to_each_worker(d.split.rank, record(DRAIN, 0, d.bucket.attention_slots))

    def _exit_barrier(self) -> None:
        gather, leave = self.grid(1), self.grid(1)
        for rank in range(self.dims.split.tp):
            self.arrive(gather, rank, self.workers)
            self.add_to_each_worker(rank, record(JOIN, signals=[counter_word(gather, rank=rank)]))
            done = [self.signal(leave, ALL_RANKS)]
            meet = record(JOIN, waits=[counter_word(gather)], signals=done)
            self.streams[self.segment][rank * self.workers].append(meet)
            self.add_to_each_worker(rank, record(JOIN, waits=[counter_word(leave)]))
