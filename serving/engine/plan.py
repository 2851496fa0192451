"""Planned steps: which tokens of each sequence a step computes, and which logit rows it needs."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megakernel.runtime.steps import Ints, Lineup
from megakernel.serving.engine.request import POOLED, Objects, Sequence, Slots

VERIFIED_ROWS = 128  # maximum logit rows of a step with proposals; a step table has room for their logit biases


class _Row(NamedTuple):
    """The logit rows of a step or, in a list, one logit row. `Turns` and `Lineup` describe the fields."""

    chunk: Any
    index: Any
    place: Any
    target: Any
    store: Any
    top: Any
    after: Any


@dataclass(eq=False)
class Turns(Lineup):
    """The chunks of tokens and the logit rows of a step, with what the engine needs to process their results."""

    # -- one element per chunk
    ticket: Ints  # the number that the chunk's sequence got at its admission
    sequence: Objects
    reader: Ints  # the reader and the number of the sequence's choice, as `Request` has them
    number: Ints
    # -- one element per logit row
    top: Ints  # as in `Slots`
    after: Ints  # the row's input token if it was proposed or forced, otherwise -1

    @property
    def rows(self) -> _Row:
        return _Row(*(getattr(self, name) for name in _Row._fields))

    @cached_property
    def samples(self) -> NDArray[np.bool_]:
        """For each logit row, whether it samples a token. A row that does not sample scores a prompt token."""
        return self.target < 0

    @cached_property
    def depth(self) -> Ints:
        """For each logit row, the number of tokens before it in the step that were proposed or forced."""
        return np.where(self.after >= 0, self.index, 0)

    @cached_property
    def reported(self) -> list[int]:
        """The logit rows whose top log-probabilities are reported."""
        return (self.top >= 0).nonzero()[0].tolist()

    @cached_property
    def read(self) -> list[int]:
        """The logit rows whose logits the host has to read."""
        return (self.top > 0).nonzero()[0].tolist()

    @cached_property
    def pooled(self) -> list[int]:
        """The logit rows whose hidden states the host has to read."""
        return (self.top == POOLED).nonzero()[0].tolist()  # type: ignore[no-any-return]

    def alive(self, slots: Slots) -> NDArray[np.bool_]:
        """Whether each chunk's sequence still has the slot that it had when the step was planned."""
        kept: NDArray[np.bool_] = slots.ticket[self.slot] == self.ticket
        return kept


class PlannedRows(NamedTuple):
    """Some or all chunks of a step, with their first positions and their tokens."""

    turns: Turns
    start: Ints  # described at `Rows`
    tokens: Ints

    def extensible(self, slots: Slots) -> Ints:
        """Return the chunks to which proposed tokens may be added. These chunks compute only the last known token of
        their sequence."""
        turns = self.turns
        single = (turns.count == 1) & (np.bincount(turns.chunk, minlength=len(turns.slot)) == 1)
        found: Ints = (single & turns.alive(slots) & (self.start == slots.known[turns.slot] - 1)).nonzero()[0]
        return found


class Planner:
    """Plans steps of the sequences in `slots`. It reuses the `Turns` of the last step if the same sequences decode."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._last: Turns | None = None

    def plan(self, ones: Ints, prompts: Seq[tuple[Sequence, int]]) -> PlannedRows:
        """Plan a step and return its chunks. `ones` has the slot numbers of the sequences that compute one token each.
        `prompts` has every other sequence of the step, with the number of tokens that it computes."""
        decoded = self._decode(ones)
        if not prompts:
            return decoded
        slots, turns = self._slots, decoded.turns
        rows: list[_Row] = []
        tokens = [decoded.tokens]
        slot, count = (np.array(column) for column in zip(*((one.slot, n) for one, n in prompts), strict=True))
        start = slots.computed[slot]
        for chunk, (sequence, length) in enumerate(prompts, len(ones)):
            tokens.append(self._prompt(chunk, sequence, length, rows))
        added = zip(_Row._fields, np.array(rows, np.int64).reshape(-1, len(_Row._fields)).T, strict=True)
        columns = {
            name: np.append(column, more.astype(column.dtype))
            for (name, more), column in zip(added, turns.rows, strict=True)
        }
        slot, count = np.append(turns.slot, slot), np.append(turns.count, count)
        return PlannedRows(_turns(slots, slot, count, columns), np.append(decoded.start, start), np.concatenate(tokens))

    def _decode(self, slot: Ints) -> PlannedRows:
        """Plan a chunk of one token for each slot: compute the sequence's last token and sample the next one."""
        slots, n, start = self._slots, len(slot), self._slots.computed[slot]
        slots.length[slot] += 1
        slots.computed[slot] = end = start + 1
        place = slots.place(slot, end)
        turns = self._last
        if turns is None or turns.slot is not slot or turns.place is not place:
            one, zero, none = np.ones(n, np.int64), np.zeros(n, np.int64), np.full(n, -1)
            row = _Row(np.arange(n), zero, place, none, one > 0, slots.top[slot], none)
            turns = self._last = _turns(slots, slot, one, row._asdict())
        known = start < slots.known[slot]
        if not np.count_nonzero(known):
            return PlannedRows(turns, start, turns.after)  # id -1: the running launch has yet to sample the token
        return PlannedRows(turns, start, np.where(known, slots.tokens[slot, start], -1))

    def _prompt(self, chunk: int, sequence: Sequence, count: int, rows: list[_Row]) -> Ints:
        """Plan the next `count` tokens of a sequence as the chunk number `chunk`, and return the tokens. The logit rows
        that they need are appended to `rows`."""
        slots, request, slot = self._slots, sequence.request, sequence.slot
        start, known = int(slots.computed[slot]), int(slots.known[slot])
        end = start + count
        if sequence.scoring:
            prompt, top = request.prompt_ids, POOLED if request.params.pooling else request.params.prompt_logprobs or 0
            first, last = max(start, request.scored), min(end, len(prompt) - 1)
            rows += [_Row(chunk, at - start, -1, prompt[at + 1], False, top, -1) for at in range(first, last)]
            request.scored = max(last, request.scored)
        if end == slots.length[slot]:
            place = int(slots.place(np.array(slot), np.array(end)))
            rows.append(_Row(chunk, count - 1, place, -1, True, int(slots.top[slot]), -1))
            slots.length[slot] += 1
        slots.computed[slot] = end
        tokens = slots.tokens[slot, start:end].copy()
        tokens[known - start :] = -1
        return tokens


def extended(part: PlannedRows, slots: Slots, runs: Mapping[int, Seq[int]]) -> PlannedRows:
    """Append tokens that were proposed or forced to some one-token chunks of `part`, and return the new part.

    `runs` maps a chunk to its tokens. Each of these tokens gets a logit row. If the sequence has no penalties, the step
    stores the sampled tokens in HISTORY; up to the first mismatch, they equal the tokens of the run. With penalties,
    the step reads HISTORY and stores nothing there, so the host writes the run to HISTORY before the step. The new part
    omits sequences that have ended since the step was planned, because other sequences may now use their pages."""
    turns, start = part.turns, part.start
    chunks = np.array(sorted(runs))
    lengths = np.array([len(runs[chunk]) for chunk in chunks])
    slot, stores = turns.slot[chunks], ~slots.sampling.penalised[turns.slot]
    slots.computed[slot] += lengths
    slots.length[slot] += lengths
    count = turns.count.copy()
    count[chunks] += lengths

    new = np.concatenate([runs[chunk] for chunk in chunks])
    ends = np.cumsum(turns.count)[chunks]  # where the chunks end in the tokens of `part`
    tokens = part.tokens.copy()
    tokens[ends - 1] = slots.tokens[slot, start[chunks]]
    tokens = np.insert(tokens, np.repeat(ends, lengths), new)

    of = np.repeat(chunks, lengths)
    index = np.arange(len(of)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + 1
    place = slots.place(turns.slot[of], start[of] + index + 1)
    none = np.full(len(of), -1)
    added = _Row(of, index, place, none, stores[of], np.repeat(slots.top[slot], lengths), new)
    at = np.searchsorted(turns.chunk, of, side="right")
    old = turns.rows._replace(store=turns.store & (stores[turns.chunk] | ~np.isin(turns.chunk, chunks)))
    alive = turns.alive(slots)
    columns = [np.insert(column, at, more) for column, more in zip(old, added, strict=True)]
    kept = alive[columns[0]]
    rows = {name: column[kept] for name, column in zip(_Row._fields, columns, strict=True)}
    rows["chunk"] = (np.cumsum(alive) - 1)[rows["chunk"]]
    return PlannedRows(
        _turns(slots, turns.slot[alive], count[alive], rows), start[alive], tokens[np.repeat(alive, count)]
    )


def _turns(slots: Slots, slot: Ints, count: Ints, rows: Mapping[str, NDArray[Any]]) -> Turns:
    """Return the `Turns` of the sequences in the slots `slot`. `rows` holds the arrays for logit rows."""
    names = ("ticket", "sequence", "reader", "number")
    return Turns(slot=slot, count=count, **{name: getattr(slots, name)[slot] for name in names}, **rows)
