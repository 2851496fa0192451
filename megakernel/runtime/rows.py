"""The rows of a step as arrays, and how they are written into a step table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import StepTable
from .sampling import Ints, Sampling


@dataclass(eq=False)
class Lineup:
    """The work of a step, without token ids and positions: one chunk of tokens for each sequence, and the logit rows of
    the chunks. Each sequence has its own slot, the row of HISTORY that holds its tokens.
    """

    # -- one element for each chunk
    slot: Ints
    count: Ints  # the number of tokens in the chunk

    # -- one element for each logit row, in the order of token rows
    chunk: Ints  # the index of the chunk that the row belongs to
    index: Ints  # the index of the row's token in its chunk
    place: Ints  # the index into `Sampling` of the row's parameters
    target: Ints  # the token whose log-probability is returned; -1: sample a token
    store: NDArray[np.bool_]  # whether the sampled token is stored in HISTORY


@dataclass(eq=False, slots=True)
class Rows:
    """The rows of a step. Consecutive steps share one Lineup if the same sequences continue."""

    lineup: Lineup
    start: Ints  # for each chunk, the position of its first token
    tokens: Ints  # token ids, chunk by chunk; -1: the token is HISTORY[slot][position]

    @property
    def position(self) -> Ints:
        """For each logit row, the position of the token that it predicts."""
        return self.start[self.lineup.chunk] + self.lineup.index + 1


def fits(capacity: str, wanted: int, limit: int) -> None:
    """Raise MegakernelError if a step needs more than its program was compiled for.

    `capacity` names what is needed, `wanted` is the number needed, and `limit` the number that the program has.
    """
    if wanted > limit:
        raise MegakernelError(f"the step needs {capacity} = {wanted}, but the program was compiled for at most {limit}")


def fill_rows(table: StepTable, rows: Rows, sampling: Sampling) -> None:
    """Write all fields of `table` except pages and attention items; remaining rows become padding.

    Raises MegakernelError if a capacity, a field of Dims, is too small. The error names the field.
    """
    dims, live, lineup = table.dims, len(rows.tokens), rows.lineup
    fits("tokens", live, dims.tokens)
    fits("logit_rows", len(lineup.chunk), dims.logit_rows)
    table.row_seq[:live], table.row_seq[live:] = np.repeat(lineup.slot, lineup.count), -1
    table.positions[live:] = table.token_ids[live:] = 0
    slot = lineup.slot[lineup.chunk]
    first = np.cumsum(lineup.count) - lineup.count
    place = _padded(lineup.place, dims.logit_rows)  # -1, the last entry of `sampling`, for padding rows
    for name, column in sampling.columns.items():
        getattr(table, name)[:] = column[place]
    table.logit_rows[:] = _padded(first[lineup.chunk] + lineup.index, dims.logit_rows)
    table.target[:] = _padded(lineup.target, dims.logit_rows)
    table.sample_slot[:] = _padded(np.where(lineup.store, slot, -1), dims.logit_rows)
    table.history_slot[:] = _padded(np.where(sampling.penalised[lineup.place], slot, -1), dims.logit_rows)
    table.sample_position[len(lineup.chunk) :] = 0
    table.mask[:] = table.mask_count[:] = 0
    _fill_bias(table, lineup.place, sampling)
    move_rows(table, rows)


def move_rows(table: StepTable, rows: Rows) -> None:
    """Write only tokens and positions, into a table that `fill_rows` has filled for the same
    lineup.
    """
    live, lineup, position = len(rows.tokens), rows.lineup, rows.start
    if live > len(lineup.slot):
        first = np.cumsum(lineup.count) - lineup.count
        position = np.arange(live) + np.repeat(rows.start - first, lineup.count)
    table.positions[:live] = position
    table.token_ids[:live] = np.where(rows.tokens < 0, -1 - table.row_seq[:live], rows.tokens)
    table.sample_position[: len(lineup.chunk)] = rows.position


def _padded(values: NDArray[Any], length: int) -> NDArray[np.int64]:
    """`values` followed by -1, up to `length`."""
    out = np.full(length, -1)
    out[: len(values)] = values
    return out


def _fill_bias(table: StepTable, place: Ints, sampling: Sampling) -> None:
    n, counts = len(place), sampling.bias_count[place]
    ends = np.cumsum(counts)
    begins, pairs = ends - counts, int(counts.sum())
    fits("bias_entries", pairs, table.dims.bias_entries)
    table.bias_begin[:n], table.bias_end[:n] = begins, ends
    table.bias_begin[n:] = table.bias_end[n:] = 0
    at = np.repeat(place, counts), np.arange(pairs) - np.repeat(begins, counts)
    table.bias_ids[:pairs], table.bias_values[:pairs] = sampling.bias_ids[at], sampling.bias_values[at]
