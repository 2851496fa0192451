"""Planned steps: which tokens of each sequence a step computes, and its program and step table for the backend."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import StepTable
from megakernel.program import Program
from megakernel.runtime.backend import Launch
from megakernel.runtime.rows import Lineup
from megakernel.runtime.sampling import Ints
from megakernel.serving.engine.request import Sequence
from megakernel.serving.engine.slots import Objects, Slots


@dataclass(eq=False)
class Turns(Lineup):
    """The chunks of tokens and the logit rows of a step, with what the engine needs to process their results."""

    # -- one element per chunk
    ticket: Ints  # the number that the chunk's sequence got at its admission
    sequence: Objects
    tag: Ints
    choice: Ints
    # -- one element per logit row
    top: Ints  # how many top log-probabilities to report; -1: report none
    after: Ints  # the row's input token if that token was proposed, otherwise -1

    @cached_property
    def proposed(self) -> Ints:
        """For each chunk, the number of tokens at its end that are proposed and must be verified."""
        return np.bincount(self.chunk[self.after >= 0], minlength=len(self.slot))

    @cached_property
    def samples(self) -> NDArray[np.bool_]:
        """For each logit row, whether it samples a token. A row that does not sample scores a prompt token."""
        return self.target < 0

    @cached_property
    def reported(self) -> list[int]:
        """The logit rows whose top log-probabilities are reported."""
        return (self.top >= 0).nonzero()[0].tolist()

    @cached_property
    def read(self) -> list[int]:
        """The logit rows whose logits the host has to read."""
        return (self.top > 0).nonzero()[0].tolist()

    def alive(self, slots: Slots) -> NDArray[np.bool_]:
        """Whether each chunk's sequence still has the slot that it had when the step was planned."""
        kept: NDArray[np.bool_] = slots.ticket[self.slot] == self.ticket
        return kept


class Part(NamedTuple):
    """Some or all chunks of a step, with their first positions and their tokens."""

    turns: Turns
    start: Ints  # described at `Rows`
    tokens: Ints

    def extensible(self, slots: Slots) -> Ints:
        """Return the chunks to which proposed tokens may be added.

        These chunks compute only the last known token of their sequence.
        """
        turns = self.turns
        single = (turns.count == 1) & (np.bincount(turns.chunk, minlength=len(turns.slot)) == 1)
        found: Ints = (single & turns.alive(slots) & (self.start == slots.known[turns.slot] - 1)).nonzero()[0]
        return found


@dataclass
class Work:
    """A planned step. It gets `program` and `table` when it is built, and `launch` when it starts.

    `histories` lists the tokens that the host writes to the buffer HISTORY before the step starts,
    as (slot, first position, tokens).
    """

    part: Part
    histories: list[tuple[int, int, NDArray[np.int32]]]
    verifies: bool = False  # the step has proposed tokens, so its results decide where sequences continue
    program: Program | None = None
    table: StepTable | None = None
    launch: Launch | None = None


class Planner:
    """Plans steps of the sequences in `slots`. It reuses the `Turns` of the last step if the same sequences decode."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._last: Turns | None = None

    def plan(self, ones: Ints, pieces: Seq[tuple[Sequence, int]]) -> Part:
        """Plan a step and return its chunks.

        `ones` has the slot numbers of the sequences that compute one token each. `pieces` has every other sequence of
        the step, with the number of tokens that it computes.
        """
        decoded = self._decode(ones)
        return _join([decoded, *(_piece(self._slots, *piece) for piece in pieces)]) if pieces else decoded

    def _decode(self, slot: Ints) -> Part:
        """Plan a chunk of one token for each slot: compute the sequence's last token and sample the next one."""
        slots, n, start = self._slots, len(slot), self._slots.computed[slot]
        slots.length[slot] += 1
        slots.computed[slot] = end = start + 1
        place = slots.place(slot, end)
        turns = self._last
        if turns is None or turns.slot is not slot or turns.place is not place:
            one, none = np.ones(n, np.int64), np.full(n, -1)
            rows = {"chunk": np.arange(n), "index": np.zeros(n, np.int64), "place": place, "target": none}
            rows |= {"store": one > 0, "top": slots.top[slot], "after": none}
            turns = self._last = _turns(slots, slot, one, **rows)
        known = start < slots.known[slot]
        if not np.count_nonzero(known):
            return Part(turns, start, turns.after)  # id -1: the running launch has yet to sample the token
        return Part(turns, start, np.where(known, slots.tokens[slot, start], -1))


def extended(part: Part, slots: Slots, proposals: Mapping[int, Seq[int]]) -> Part:
    """Append proposed tokens to some one-token chunks of `part`, and return the new part.

    `proposals` maps a chunk to its proposed tokens. Each proposed token gets a logit row. If the sequence has no
    penalties, the step stores the sampled tokens in HISTORY; up to the first mismatch, they equal the proposed tokens.
    With penalties, the step reads HISTORY and stores nothing there, so the host writes the proposed tokens to HISTORY
    before the step. The new part omits sequences that have ended since the step was planned, because other sequences
    may now use their pages.
    """
    parts = []
    for proposed, chunks in groupby(part.turns.alive(slots).nonzero()[0].tolist(), key=proposals.__contains__):
        if proposed:
            parts += [_proposed(slots, int(part.turns.slot[chunk]), proposals[chunk]) for chunk in chunks]
        else:
            parts.append(_select(part, np.array(list(chunks))))
    return _join(parts)


def _piece(slots: Slots, sequence: Sequence, count: int) -> Part:
    """Return a part with one chunk: the next `count` tokens of a sequence, and the logit rows that they need."""
    request, slot = sequence.request, sequence.slot
    start, known = int(slots.computed[slot]), int(slots.known[slot])
    end = start + count
    tokens = slots.tokens[slot, start:end].copy()
    tokens[known - start :] = -1
    logits: list[_Logits] = []
    if sequence.scoring:
        prompt, top = request.prompt_ids, request.params.prompt_logprobs or 0
        first, last = max(start, request.scored), min(end, len(prompt) - 1)
        logits = [_Logits(position - start, -1, prompt[position + 1], 0, top) for position in range(first, last)]
        request.scored = max(last, request.scored)
    if end == slots.length[slot]:
        logits.append(_Logits(count - 1, slots.place_of(slot, end), -1, 1, int(slots.top[slot])))
        slots.length[slot] += 1
    slots.computed[slot] = end
    return _chunk(slots, slot, start, tokens, logits)


def _proposed(slots: Slots, slot: int, proposed: Seq[int]) -> Part:
    """Return a part with one chunk: a sequence's last known token and the proposed tokens after it."""
    start, store, top = int(slots.known[slot]) - 1, int(not slots.sampling.penalised[slot]), int(slots.top[slot])
    slots.computed[slot] += len(proposed)
    slots.length[slot] += len(proposed)
    tokens = np.array([slots.tokens[slot, start], *proposed])
    after = [-1, *proposed]
    logits = [_Logits(i, slots.place_of(slot, start + i + 1), -1, store, top, after[i]) for i in range(len(after))]
    return _chunk(slots, slot, start, tokens, logits)


class _Logits(NamedTuple):
    """One logit row of a chunk. `row` is the index of its token in the chunk.

    `Turns` and `Lineup` describe the other fields.
    """

    row: int
    place: int
    target: int
    store: int
    top: int
    after: int = -1


def _chunk(slots: Slots, slot: int, start: int, tokens: Ints, logits: Seq[_Logits]) -> Part:
    columns = np.array(logits, np.int64).reshape(-1, len(_Logits._fields)).T
    rows: dict[str, NDArray[Any]] = dict(zip(("index", *_Logits._fields[1:]), columns, strict=True))
    rows |= {"chunk": np.zeros(len(logits), np.int64), "store": rows["store"] > 0}
    return Part(_turns(slots, np.array([slot]), np.array([len(tokens)]), **rows), np.array([start]), tokens)


def _turns(slots: Slots, slot: Ints, count: Ints, **rows: NDArray[Any]) -> Turns:
    """Return the `Turns` of the sequences in the slots `slot`. `rows` holds the arrays for logit rows."""
    names = ("ticket", "sequence", "tag", "choice")
    return Turns(slot=slot, count=count, **{name: getattr(slots, name)[slot] for name in names}, **rows)


def _join(parts: Seq[Part]) -> Part:
    """Concatenate the chunks of all `parts`, in order."""
    names = [field.name for field in fields(Turns)]
    columns = {name: np.concatenate([getattr(part.turns, name) for part in parts]) for name in names}
    chunks, rows = np.array([(len(part.start), len(part.turns.chunk)) for part in parts]).T
    columns["chunk"] += np.repeat(np.cumsum(chunks) - chunks, rows)
    return Part(Turns(**columns), *(np.concatenate([part[i] for part in parts]) for i in (1, 2)))


def _select(part: Part, chunks: Ints) -> Part:
    """Return a part that has only the given chunks of `part`, in the same order."""
    turns, n = part.turns, len(part.start)
    logit = np.isin(turns.chunk, chunks)
    names = [field.name for field in fields(Turns)]
    of_chunk = {"slot", "count", "ticket", "sequence", "tag", "choice"}
    columns = {name: getattr(turns, name)[chunks if name in of_chunk else logit] for name in names}
    columns["chunk"] = np.searchsorted(chunks, columns["chunk"])
    return Part(
        Turns(**columns), part.start[chunks], part.tokens[np.isin(np.repeat(np.arange(n), turns.count), chunks)]
    )
