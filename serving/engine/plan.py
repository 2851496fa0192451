"""Planned steps: which tokens of each sequence a step computes, and for which of them it computes logits."""

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

VERIFIED_ROWS = 128  # maximum logit rows of a step that verifies proposals, limited by room for logit biases


class _Row(NamedTuple):
    """The rows of a step that get logits, as arrays; or one such row. `Turns` and `Lineup` describe the fields."""

    chunk: Any
    index: Any
    place: Any
    target: Any
    store: Any
    top: Any
    after: Any


@dataclass(eq=False)
class Turns(Lineup):
    """The plan of a step: its chunks, each with the tokens that it computes for one sequence, and its logit rows, which
    sample a token or score a prompt token. It also has what the engine needs to process their results."""

    # -- one element per chunk
    ticket: Ints  # number that the sequence got when it was admitted to its slot
    sequence: Objects
    reader: Ints  # see `Request.reader`; `number` is that of the choice (completion)
    number: Ints
    # The following arrays have one element per logit row, a row that samples a token or scores a prompt token.
    top: Ints  # how many top log-probabilities to report, as in `Slots`
    after: Ints  # the row's input token if it was proposed or forced, otherwise -1

    @property
    def rows(self) -> _Row:
        return _Row(*(getattr(self, name) for name in _Row._fields))

    @cached_property
    def samples(self) -> NDArray[np.bool_]:
        """For each logit row, whether it samples a token. The others score a prompt token (its log-probability)."""
        return self.target < 0

    @cached_property
    def depth(self) -> Ints:
        """For each logit row, how many proposed or forced tokens its sequence has up to this row of the step."""
        return np.where(self.after >= 0, self.index, 0)

    @cached_property
    def reported(self) -> list[int]:
        """The logit rows whose top log-probabilities are reported."""
        return (self.top >= 0).nonzero()[0].tolist()

    @cached_property
    def read(self) -> list[int]:
        """The logit rows whose logits the host has to read, because a request wants the most likely tokens."""
        return (self.top > 0).nonzero()[0].tolist()

    @cached_property
    def pooled(self) -> list[int]:
        """The logit rows whose hidden states the host has to read, because a request wants an embedding."""
        return (self.top == POOLED).nonzero()[0].tolist()  # type: ignore[no-any-return]

    def alive(self, slots: Slots) -> NDArray[np.bool_]:
        """Whether each chunk's sequence still has the slot that it had when the step was planned."""
        kept: NDArray[np.bool_] = slots.ticket[self.slot] == self.ticket
        return kept


class PlannedRows(NamedTuple):
    """Chunks of a step, each with consecutive tokens of one sequence. `start` has their first positions."""

    turns: Turns
    start: Ints  # described at `Rows`
    tokens: Ints

    def extensible(self, slots: Slots) -> Ints:
        """Return the chunks to which proposed tokens may be added: those that compute only the last known token of a
        running sequence."""
        turns = self.turns
        single = (turns.count == 1) & (np.bincount(turns.chunk, minlength=len(turns.slot)) == 1)
        found: Ints = (single & turns.alive(slots) & (self.start == slots.known[turns.slot] - 1)).nonzero()[0]
        return found


class Planner:
    """Plans the rows of steps for the sequences in `slots`. If the same sequences decode as in the last step, its
    `Turns` is used again, because building a new one takes time."""

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
        """Plan one decode row for each of the slots `slot`: compute the last token and sample the next one."""
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
            return PlannedRows(turns, start, turns.after)  # tokens of -1: not sampled yet
        return PlannedRows(turns, start, np.where(known, slots.tokens[slot, start], -1))

    def _prompt(self, chunk: int, sequence: Sequence, count: int, rows: list[_Row]) -> Ints:
        """Plan to compute the next `count` tokens of a sequence as the chunk number `chunk` of a step, and return the
        tokens. The rows that need logits are appended to `rows`."""
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
    """Append proposed or forced tokens to sequences that compute one token in `part`, and return the new plan.

    `runs` maps a chunk (a sequence's place in the step) to its additional tokens. Each additional token gets a logit
    row. Sequences that have ended since the step was planned are left out, because other sequences may now use their
    pages.

    Sampled tokens are normally stored by the step, in the device buffer HISTORY. Up to the first mismatch, they equal
    the additional tokens. For a sequence with penalties, the step reads HISTORY, so the host writes the additional
    tokens there before the step. The step then stores no tokens of this sequence."""
    turns, start = part.turns, part.start
    chunks = np.array(sorted(runs))
    lengths = np.array([len(runs[chunk]) for chunk in chunks])
    slot, stores = turns.slot[chunks], ~slots.sampling.penalised[turns.slot]
    slots.computed[slot] += lengths
    slots.length[slot] += lengths
    count = turns.count.copy()
    count[chunks] += lengths

    new = np.concatenate([runs[chunk] for chunk in chunks])
    ends = np.cumsum(turns.count)[chunks]  # index in `part.tokens` after the last token of each of these chunks
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
