"""Writes step tables, from arrays of rows and sampling parameters, or from a list of chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import Dims, StepTable, ceil_div
from .attention_items import Dealt, deal_items, moves, write_items

Ints = NDArray[np.signedinteger[Any]]

FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_INTS = ("prompt_length", "top_k", "choice")
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class SampleRow:
    """Requests the logits at token `index` of a chunk (new tokens of one sequence), and says how the next token is
    chosen. By default, it is the most probable token.

    If `target` >= 0, no token is sampled, and the log-probability of token `target` is returned. If `store` is true,
    the sampled token is written to HISTORY, which has the tokens of all sequences. With penalties, the choice depends
    on the sequence's earlier tokens in HISTORY, so the same step must not write any of these tokens.
    """

    index: int
    prompt_length: int = 0
    target: int = -1
    store: bool = True
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    choice: int = 0
    bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def penalised(self) -> bool:
        """Whether penalties make the choice of a token depend on the tokens in HISTORY."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


class Sampling:
    """The sampling parameters of many logit rows, one array per parameter. A row has the same index (its place) in all
    arrays. The elements at the last index keep the defaults, which padding rows use.

    The keys of `columns` are names of step-table fields.
    """

    def __init__(self, places: int) -> None:
        self.columns: dict[str, NDArray[Any]] = {
            **{name: np.zeros(places, np.int32) for name in (*_INTS, "seed_low", "seed_high")},
            **{name: np.full(places, getattr(SampleRow, name), np.float32) for name in FLOATS},
        }
        self.penalised = np.zeros(places, np.bool_)
        self.bias_count = np.zeros(places, np.int32)
        self.bias_ids: NDArray[np.int32] = np.zeros((places, 0), np.int32)
        self.bias_values: NDArray[np.float32] = np.zeros((places, 0), np.float32)

    def set(self, place: int, row: SampleRow) -> None:
        """Set the parameters at `place` to those of `row`."""
        for name in (*_INTS, *FLOATS):
            self.columns[name][place] = getattr(row, name)
        low, high = np.array([row.seed & _WORD, row.seed >> 32 & _WORD], np.uint32).view(np.int32)
        self.columns["seed_low"][place], self.columns["seed_high"][place] = low, high
        self.penalised[place] = row.penalised
        pairs = len(row.bias)
        if (more := pairs - self.bias_ids.shape[1]) > 0:
            wider = ((0, 0), (0, more))
            self.bias_ids, self.bias_values = np.pad(self.bias_ids, wider), np.pad(self.bias_values, wider)
        self.bias_count[place] = pairs
        if pairs:
            self.bias_ids[place, :pairs], self.bias_values[place, :pairs] = list(row.bias), list(row.bias.values())


@dataclass(eq=False)
class Lineup:
    """Which sequences a step processes, without token ids and positions. Each sequence has one chunk of tokens, and a
    slot: its row in HISTORY. Some rows of a chunk get logits, and are called logit rows."""

    # -- one element for each chunk
    slot: Ints
    count: Ints  # number of tokens in the chunk

    # -- one element for each logit row, in the order of token rows
    chunk: Ints  # index of the chunk that contains the row
    index: Ints  # index of the row's token within its chunk
    place: Ints  # index of the row's parameters in the arrays of `Sampling`
    target: Ints  # token whose log-probability is returned; -1: a token is sampled
    store: NDArray[np.bool_]  # whether the sampled token is written to HISTORY


@dataclass(eq=False, slots=True)
class StepRows:
    """The token rows of a step. If the same sequences continue, consecutive steps have the same Lineup object."""

    lineup: Lineup
    start: Ints  # for each chunk, the position of its first token in its sequence
    tokens: Ints  # token ids, chunk by chunk; -1 means the token in HISTORY[slot][position]

    @property
    def position(self) -> Ints:
        """For each logit row, the position that the predicted token will have in its sequence."""
        return self.start[self.lineup.chunk] + self.lineup.index + 1


def fits(capacity: str, wanted: int, limit: int) -> None:
    """Raise MegakernelError, which names `capacity`, if a step needs more than its program's limit."""
    if wanted > limit:
        raise MegakernelError(f"the step needs {capacity} = {wanted}, but the program was compiled for at most {limit}")


def fill_rows(table: StepTable, rows: StepRows, sampling: Sampling) -> None:
    """Write a step table's fields except pages and attention items. Raises MegakernelError if the rows do not fit."""
    dims, live, lineup = table.dims, len(rows.tokens), rows.lineup
    fits("tokens", live, dims.bucket.tokens)
    fits("logit_rows", len(lineup.chunk), dims.bucket.logit_rows)
    table.row_seq[:live], table.row_seq[live:] = np.repeat(lineup.slot, lineup.count), -1
    table.positions[live:] = table.token_ids[live:] = 0
    slot = lineup.slot[lineup.chunk]
    first = np.cumsum(lineup.count) - lineup.count
    place = _padded(lineup.place, dims.bucket.logit_rows)  # -1 for padding: the last place
    for name, column in sampling.columns.items():
        getattr(table, name)[:] = column[place]
    table.logit_rows[:] = _padded(first[lineup.chunk] + lineup.index, dims.bucket.logit_rows)
    table.target[:] = _padded(lineup.target, dims.bucket.logit_rows)
    table.sample_slot[:] = _padded(np.where(lineup.store, slot, -1), dims.bucket.logit_rows)
    table.history_slot[:] = _padded(np.where(sampling.penalised[lineup.place], slot, -1), dims.bucket.logit_rows)
    table.sample_position[len(lineup.chunk) :] = 0
    table.mask[:] = table.mask_count[:] = 0
    _fill_bias(table, lineup.place, sampling)
    move_rows(table, rows)


def move_rows(table: StepTable, rows: StepRows, before: StepRows | None = None) -> None:
    """Write only tokens and positions to a table that `fill_rows` has filled for the same lineup. `before` are the rows
    that the table contains now, if they are known. Tokens are then written only if they have changed."""
    live, lineup, position = len(rows.tokens), rows.lineup, rows.start
    if live > len(lineup.slot):
        first = np.cumsum(lineup.count) - lineup.count
        position = np.arange(live) + np.repeat(rows.start - first, lineup.count)
    table.positions[:live] = position
    if before is None or rows.tokens is not before.tokens:
        table.token_ids[:live] = np.where(rows.tokens < 0, -1 - table.row_seq[:live], rows.tokens)
    table.sample_position[: len(lineup.chunk)] = rows.position


def _padded(values: NDArray[Any], length: int) -> NDArray[np.int64]:
    out = np.full(length, -1)
    out[: len(values)] = values
    return out


def _fill_bias(table: StepTable, place: Ints, sampling: Sampling) -> None:
    n, counts = len(place), sampling.bias_count[place]
    ends = np.cumsum(counts)
    begins, pairs = ends - counts, int(counts.sum())
    fits("bias_entries", pairs, table.dims.bucket.bias_entries)
    table.bias_begin[:n], table.bias_end[:n] = begins, ends
    table.bias_begin[n:] = table.bias_end[n:] = 0
    at = np.repeat(place, counts), np.arange(pairs) - np.repeat(begins, counts)
    table.bias_ids[:pairs], table.bias_values[:pairs] = sampling.bias_ids[at], sampling.bias_values[at]


class SequencePages:
    """The KV pages of all sequences. Each sequence has a slot; its page ids are the first `count[slot]` of `ids[slot]`.

    After a change of a slot, set `changed[:, slot]`. There are two flags per slot, because `Steps` writes two tables
    alternately, and each must get the change.
    """

    def __init__(self, dims: Dims) -> None:
        self.ids = np.zeros((dims.bucket.max_seqs, dims.bucket.pages_per_seq), np.int32)
        self.count = np.zeros(dims.bucket.max_seqs, np.int32)
        self.changed = np.ones((2, dims.bucket.max_seqs), np.bool_)


@dataclass
class _Kept:
    """One of the two step tables, and what it contains. `rows` is None if the last attempt to write it failed."""

    table: StepTable
    rows: StepRows | None = None
    dealt: Dealt | None = None


class Steps:
    """Writes the step tables of an engine. There are two, used alternately: a launch reads one while the other is
    written.

    Writing is fast, because most decode steps process the same sequences as the step before, and each sequence
    continues by one token. Then only tokens and positions are written. The attention items (pieces of attention work)
    are computed again only when a sequence begins a KV block (of 128 tokens), or when its window leaves one.
    """

    def __init__(self, pages: SequencePages, sampling: Sampling) -> None:
        self._pages, self._sampling = pages, sampling
        self._kept: list[_Kept | None] = [None, None]
        self._turn = 0  # which of the two tables is written next: 0 or 1

    def build(self, dims: Dims, rows: StepRows) -> StepTable:
        """Return a step's table, valid until the call after the next. Raises MegakernelError if the rows do not fit."""
        last, kept = self._kept[1 - self._turn], self._kept[self._turn]
        changed = self._pages.changed[self._turn]
        if kept is None or kept.table.dims is not dims:
            kept = _Kept(StepTable(dims))
            changed[:] = True
        self._kept[self._turn] = new = _Kept(kept.table)
        table, lineup = kept.table, rows.lineup
        before = last.rows if last and last.table.dims is dims else None
        if last and before and before.lineup is lineup and len(rows.tokens) == len(rows.start):
            by_one = rows.start.tobytes() == (before.start + 1).tobytes()
            if by_one and not moves(dims, rows.start):
                new.dealt = last.dealt  # each sequence goes on by one token, in the same KV blocks
        if not new.dealt:
            new.dealt = deal_items(dims, lineup.slot, rows.start, lineup.count)
        if new.dealt is not kept.dealt:
            write_items(table, new.dealt)
        if kept.rows and kept.rows.lineup is lineup:
            move_rows(table, rows, kept.rows)
        else:
            fill_rows(table, rows, self._sampling)
        if len(stale := changed.nonzero()[0]):
            table.block_tables[stale] = self._pages.ids[stale]
            changed[:] = False
        new.rows, self._turn = rows, 1 - self._turn
        return table


@dataclass(frozen=True)
class Chunk:
    """The tokens of one sequence that a step processes. They are consecutive: a part of the prompt, or the newest
    token, perhaps followed by tokens that speculative decoding proposes.

    `slot` is the sequence's row in HISTORY and in the table of KV pages. A token of -1 stands for the token in
    HISTORY[slot][position]. `pages` are the sequence's KV pages, enough for `start + len(tokens)` tokens.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    pages: Sequence[int]
    samples: Sequence[SampleRow] = ()


def build_step(dims: Dims, chunks: Sequence[Chunk]) -> StepTable:
    """Return the step table that runs `chunks`, each in its own slot. tests/support/step_check.py lists the rules.

    Token rows are in the order of the chunks, and logit rows in the order of the chunks' samples. All other rows are
    padding. Raises MegakernelError if the chunks exceed a capacity of the program; the message names the field of Dims.
    Also raises it if a token is outside the vocabulary."""
    lengths = [len(chunk.tokens) for chunk in chunks]
    if not all(lengths):
        raise MegakernelError("a chunk has no tokens")
    samples = [(number, sample) for number, chunk in enumerate(chunks) for sample in chunk.samples]
    sampling = Sampling(len(samples) + 1)
    for place, (_, sample) in enumerate(samples):
        sampling.set(place, sample)
    columns = [(number, one.index, place, one.target, one.store) for place, (number, one) in enumerate(samples)]
    of, index, at, target, store = np.array(columns, np.int32).reshape(-1, 5).T
    slot = np.array([chunk.slot for chunk in chunks], np.int32)
    lineup = Lineup(slot, np.array(lengths, np.int32), of, index, at, target, store > 0)
    start = np.array([chunk.start for chunk in chunks], np.int32)
    tokens = np.fromiter(chain.from_iterable(chunk.tokens for chunk in chunks), np.int32, sum(lengths))
    fits("tokens", len(tokens), dims.bucket.tokens)
    if len(chunks):
        fits("max_seqs", int(lineup.slot.max()) + 1, dims.bucket.max_seqs)
        fits("max_context", int((start + lineup.count).max()), dims.bucket.max_context)
        if tokens.max() >= dims.model.vocab:
            raise MegakernelError(f"token {tokens.max()} is outside the vocabulary of {dims.model.vocab} tokens")
    if len(np.unique(lineup.slot)) != len(chunks):
        raise MegakernelError("two chunks of a step have the same slot (the same sequence): join them into one chunk")
    table = StepTable(dims)
    for chunk in chunks:
        needed = ceil_div(chunk.start + len(chunk.tokens), dims.bucket.kv_page)
        if len(chunk.pages) < needed:
            raise MegakernelError(
                f"the sequence in slot {chunk.slot} has {len(chunk.pages)} KV pages, but its tokens need {needed}"
            )
        table.block_tables[chunk.slot, :needed] = chunk.pages[:needed]
    write_items(table, deal_items(dims, lineup.slot, start, lineup.count))
    fill_rows(table, StepRows(lineup, start, tokens), sampling)
    return table


def even_step(dims: Dims, tokens: int, context: int) -> StepTable:
    """Return a step of `tokens` new tokens, divided evenly among as many sequences as the program allows. Afterwards,
    each sequence has `context` tokens in the KV cache, or only its new ones if these are more. The last token of each
    sequence gets logits. But if the program has fewer logit rows than sequences, only the first sequences get them."""
    many, chunks = min(tokens, dims.bucket.max_seqs), []
    for n in range(many):
        rows = min(tokens // many + (n < tokens % many), dims.bucket.max_context)
        start = max(context - rows, 0)
        sampled = [SampleRow(rows - 1, prompt_length=start + rows)] if n < dims.bucket.logit_rows else []
        chunks.append(Chunk(n, start, [0] * rows, range(dims.bucket.pages_per_seq), sampled))
    return build_step(dims, chunks)
