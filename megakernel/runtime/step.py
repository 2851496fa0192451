"""Builds a valid step table from a list of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ..errors import MegakernelError
from ..isa import Dims, StepTable, ceil_div
from .attention_items import deal_items, write_items
from .rows import Lineup, Rows, fill_rows, fits
from .sampling import SampleRow, Sampling


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence: a part of its prompt, or its newest token, perhaps
    followed by tokens proposed for speculative decoding.

    `slot` is the sequence's row in the block table and in HISTORY. A token of -1 stands for the
    token in HISTORY[slot][position]. `pages` are the sequence's page ids from its start, enough for
    `start + len(tokens)`.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    pages: Sequence[int]
    samples: Sequence[SampleRow] = ()


def build_step(dims: Dims, chunks: Sequence[Chunk]) -> StepTable:
    """The step table that runs `chunks`, each in its own slot; `check_step` lists its invariants.

    Chunks get token rows in order, and their samples get logit rows in order. All other rows are
    padding. Raises MegakernelError if one chunk or all chunks together exceed a capacity, which the
    error names (a field of Dims). A token outside the vocabulary is an error too, because it would read beyond
    the embedding table.
    """
    lengths = [len(chunk.tokens) for chunk in chunks]
    if not all(lengths):
        raise MegakernelError("a chunk has no tokens")
    samples = [(number, sample) for number, chunk in enumerate(chunks) for sample in chunk.samples]
    sampling = Sampling(len(samples) + 1)
    for place, (_, sample) in enumerate(samples):
        sampling.set(place, sample)
    lineup = Lineup(
        slot=np.array([chunk.slot for chunk in chunks], np.int32),
        count=np.array(lengths, np.int32),
        chunk=np.array([number for number, _ in samples], np.int32),
        index=np.array([sample.index for _, sample in samples], np.int32),
        place=np.arange(len(samples)),
        target=np.array([sample.target for _, sample in samples], np.int32),
        store=np.array([sample.store for _, sample in samples], np.bool_),
    )
    start = np.array([chunk.start for chunk in chunks], np.int32)
    tokens = np.fromiter(chain.from_iterable(chunk.tokens for chunk in chunks), np.int32, sum(lengths))
    fits("tokens", len(tokens), dims.tokens)
    if len(chunks):
        fits("max_seqs", int(lineup.slot.max()) + 1, dims.max_seqs)
        fits("max_context", int((start + lineup.count).max()), dims.max_context)
        if tokens.max() >= dims.vocab:
            raise MegakernelError(f"token {tokens.max()} is outside the vocabulary of {dims.vocab}")
    if len(np.unique(lineup.slot)) != len(chunks):
        raise MegakernelError("two chunks of a step have the same slot: join them into one")
    table = StepTable(dims)
    for chunk in chunks:
        needed = ceil_div(chunk.start + len(chunk.tokens), dims.kv_page)
        if len(chunk.pages) < needed:
            raise MegakernelError(
                f"the sequence in slot {chunk.slot} has {len(chunk.pages)} KV pages, but needs {needed}"
            )
        table.block_tables[chunk.slot, :needed] = chunk.pages[:needed]
    write_items(table, deal_items(dims, lineup.slot, start, lineup.count))
    fill_rows(table, Rows(lineup, start, tokens), sampling)
    return table
