"""From what an engine wants of a step to a valid step table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import Dims, StepTable, ceil_div
from .attention_items import deal_items


@dataclass(frozen=True)
class SampleRow:
    """Logits wanted at token `index` of a chunk, and what to do with them. Defaults sample greedily.

    `target` >= 0 scores that token instead of sampling. `store` writes the token to HISTORY at the position
    after the row's. Rows with penalties read the tokens before that position from HISTORY, so of several such rows of
    one chunk none may store.
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
        """Whether its choice depends on which tokens HISTORY has."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence: a prefill piece, or one decode row with the tokens proposed after it.

    `slot` is its block-table row and HISTORY slot. A token of -1 means HISTORY[slot][position]. `pages` are the
    sequence's page ids from its start, enough for `start + len(tokens)`.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    pages: Sequence[int]
    samples: Sequence[SampleRow] = ()


def build_step(dims: Dims, chunks: Sequence[Chunk]) -> StepTable:
    """The step table that runs `chunks`, each in its own slot; `check_step` says what holds of it.

    Chunks take token rows, and their samples logit rows, in order; the rest is padding. Raises MegakernelError
    naming the capacity (a field of Dims) that a chunk or all of them together exceed, or a token outside the
    vocabulary, which would read what is not the embedding's.
    """
    lengths = [len(chunk.tokens) for chunk in chunks]
    if not all(lengths):
        raise MegakernelError("a chunk has no tokens")
    _fits("tokens", sum(lengths), dims.tokens)
    count = np.array(lengths, np.int32)
    slot = np.array([chunk.slot for chunk in chunks], np.int32)
    start = np.array([chunk.start for chunk in chunks], np.int32)
    first_row = np.cumsum(count) - count
    if len(chunks):
        _fits("max_seqs", int(slot.max()) + 1, dims.max_seqs)
        _fits("max_context", int((start + count).max()), dims.max_context)
    if len(np.unique(slot)) != len(slot):
        raise MegakernelError("two chunks of a step have the same slot: join them into one")

    table = StepTable(dims)
    rows = int(count.sum())
    row_slot = np.repeat(slot, count)
    tokens = np.fromiter(chain.from_iterable(chunk.tokens for chunk in chunks), np.int32, rows)
    _in_vocabulary(tokens, dims)
    table.token_ids[:rows] = np.where(tokens < 0, -1 - row_slot, tokens)
    table.positions[:rows] = np.arange(rows) + np.repeat(start - first_row, count)
    table.row_seq[:rows] = row_slot
    table.row_seq[rows:] = -1
    block_tables = table.block_tables
    for chunk in chunks:
        pages = _pages(chunk, dims)
        block_tables[chunk.slot, : len(pages)] = pages
    deal_items(table, slot, start, count)
    _fill_samples(table, chunks, first_row.tolist())
    return table


class Steps:
    """Builds the tables of successive steps.

    Most steps continue the same sequences by one token each. Such a step's table is a copy of the last one with a few
    words changed, which takes a tenth of the time of `build_step`. On a CPU that time is taken from the launch that
    runs meanwhile.
    """

    def __init__(self) -> None:
        self._table: StepTable | None = None
        self._chunks: Sequence[Chunk] = ()

    def build(self, dims: Dims, chunks: Sequence[Chunk]) -> StepTable:
        """See `build_step`. Until a row enters its next KV block, all attention items stay as they were."""
        last = self._table
        if last is not None and last.dims is dims and _go_on(self._chunks, chunks):
            self._table = _next(last, chunks)
        else:
            self._table = build_step(dims, chunks)
        self._chunks = chunks
        return self._table


def _go_on(last: Sequence[Chunk], chunks: Sequence[Chunk]) -> bool:
    """Whether each chunk is the token after the one that its sequence had in `last`, sampled in the same way.

    While a sequence takes one token a step, its list of pages only grows. A sequence that is admitted gets a new list.
    """
    return len(last) == len(chunks) and all(
        new.pages is old.pages
        and new.slot == old.slot
        and new.start == old.start + 1
        and len(new.tokens) == len(old.tokens) == 1
        and new.samples == old.samples
        for new, old in zip(chunks, last, strict=True)
    )


def _next(last: StepTable, chunks: Sequence[Chunk]) -> StepTable:
    """`last` for chunks that go on where its own ended."""
    dims, rows = last.dims, len(chunks)
    start = np.array([chunk.start for chunk in chunks], np.int32)
    tokens = np.array([chunk.tokens[0] for chunk in chunks], np.int32)
    _fits("max_context", int(start.max()) + 1, dims.max_context)
    _in_vocabulary(tokens, dims)
    table = last.copy()
    slot = table.row_seq[:rows]
    table.token_ids[:rows] = np.where(tokens < 0, -1 - slot, tokens)
    table.positions[:rows] = start
    table.sample_position[: sum(len(chunk.samples) for chunk in chunks)] += 1
    for row in np.flatnonzero(start % dims.kv_page == 0).tolist():
        chunk = chunks[row]
        table.block_tables[chunk.slot, chunk.start // dims.kv_page] = _pages(chunk, dims)[-1]
    if (start % dims.kv_block == 0).any():
        deal_items(table, slot, start, np.ones(rows, np.int32))
    return table


def _pages(chunk: Chunk, dims: Dims) -> Sequence[int]:
    """Those up to its last token. Raises MegakernelError where they are too few."""
    needed = ceil_div(chunk.start + len(chunk.tokens), dims.kv_page)
    if len(chunk.pages) < needed:
        raise MegakernelError(f"slot {chunk.slot} has {len(chunk.pages)} pages of the {needed} it needs")
    return chunk.pages[:needed]


def _in_vocabulary(tokens: NDArray[np.int32], dims: Dims) -> None:
    if len(tokens) and tokens.max() >= dims.vocab:
        raise MegakernelError(f"token {tokens.max()} is outside the vocabulary of {dims.vocab}")


def _fits(capacity: str, wanted: int, limit: int) -> None:
    if wanted > limit:
        raise MegakernelError(f"step needs {capacity} = {wanted}, the program was compiled for {limit}")


_WORD = 0xFFFFFFFF
# Fields of SampleRow that the table has under the same name.
_INTS = ("prompt_length", "target", "top_k", "choice")
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def _fill_samples(table: StepTable, chunks: Sequence[Chunk], first_rows: list[int]) -> None:
    table.logit_rows[:] = table.sample_slot[:] = table.history_slot[:] = table.target[:] = -1
    table.top_p[:] = table.repetition_penalty[:] = 1.0
    samples = [(chunk, row, s) for chunk, row in zip(chunks, first_rows, strict=True) for s in chunk.samples]
    n = len(samples)
    _fits("logit_rows", n, table.dims.logit_rows)
    if not n:
        return
    pairs = np.cumsum([0] + [len(s.bias) for _, _, s in samples])
    _fits("bias_entries", int(pairs[-1]), table.dims.bias_entries)

    table.logit_rows[:n] = [row + s.index for _, row, s in samples]
    table.sample_slot[:n] = [chunk.slot if s.store else -1 for chunk, _, s in samples]
    table.history_slot[:n] = [chunk.slot if s.penalised else -1 for chunk, _, s in samples]
    table.sample_position[:n] = [chunk.start + s.index + 1 for chunk, _, s in samples]
    for names, dtype in ((_INTS, np.int32), (FLOATS, np.float32)):
        columns = np.array([attrgetter(*names)(s) for _, _, s in samples], dtype).T
        for name, column in zip(names, columns, strict=True):
            getattr(table, name)[:n] = column
    table.seed_low[:n] = np.array([s.seed & _WORD for _, _, s in samples], np.uint32).view(np.int32)
    table.seed_high[:n] = np.array([s.seed >> 32 & _WORD for _, _, s in samples], np.uint32).view(np.int32)
    table.bias_begin[:n], table.bias_end[:n] = pairs[:-1], pairs[1:]
    table.bias_ids[: pairs[-1]] = list(chain.from_iterable(s.bias for _, _, s in samples))
    table.bias_values[: pairs[-1]] = list(chain.from_iterable(s.bias.values() for _, _, s in samples))
