"""A planned step: what each sequence computes in it, and the table and program that say so to a backend."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..isa import StepTable
from ..program import Program
from ..runtime.backend import Launch
from ..runtime.rows import Lineup
from ..runtime.sampling import Ints
from .request import Sequence
from .slots import Objects, Slots


@dataclass(eq=False)
class Turns(Lineup):
    """Chunks of a step, with what the engine must know of them when their outcome is there."""

    # -- of each chunk
    ticket: Ints  # of its sequence's admission
    sequence: Objects
    tag: Ints
    choice: Ints
    # -- of each logit row
    top: Ints  # most likely tokens to report besides the chosen one; -1: none at all
    after: Ints  # the proposed token that the row follows; -1: a known one

    @cached_property
    def proposed(self) -> Ints:
        """Of each chunk: tokens at its end that are verified, not known."""
        return np.bincount(self.chunk[self.after >= 0], minlength=len(self.slot))

    @cached_property
    def samples(self) -> NDArray[np.bool_]:
        """Of each logit row: whether it samples, and does not score."""
        return self.target < 0

    @cached_property
    def reported(self) -> list[int]:
        """The logit rows of which most likely tokens are told."""
        return (self.top >= 0).nonzero()[0].tolist()

    @cached_property
    def read(self) -> list[int]:
        """The logit rows of which the host reads the logits."""
        return (self.top > 0).nonzero()[0].tolist()

    def alive(self, slots: Slots) -> NDArray[np.bool_]:
        """Of each chunk: whether its sequence has kept its slot."""
        kept: NDArray[np.bool_] = slots.ticket[self.slot] == self.ticket
        return kept


class Part(NamedTuple):
    """Some or all chunks of a step."""

    turns: Turns
    start: Ints  # see `Rows`
    tokens: Ints

    def extensible(self, slots: Slots) -> Ints:
        """The chunks that continue a sequence of which all is known, so that proposed tokens may follow."""
        turns = self.turns
        single = (turns.count == 1) & (np.bincount(turns.chunk, minlength=len(turns.slot)) == 1)
        found: Ints = (single & turns.alive(slots) & (self.start == slots.known[turns.slot] - 1)).nonzero()[0]
        return found


@dataclass
class Work:
    """A step that is planned; once it is built it has `program` and `table`, once it has started `launch` runs.

    `histories` is what HISTORY must hold when it starts: (slot, first place, tokens).
    """

    part: Part
    histories: list[tuple[int, int, NDArray[np.int32]]]
    verifies: bool = False  # it has proposed tokens, so that only its outcome says where sequences go on
    program: Program | None = None
    table: StepTable | None = None
    launch: Launch | None = None


class Planner:
    """Plans steps of the sequences in `slots`. As long as all of them go on, their turns are the same."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._last: Turns | None = None

    def plan(self, ones: Ints, pieces: Seq[tuple[Sequence, int]]) -> Part:
        """Let the sequences in the slots `ones` compute a token each, and those of `pieces` so many beside them."""
        decoded = self._decode(ones)
        return _join([decoded, *(_piece(self._slots, *piece) for piece in pieces)]) if pieces else decoded

    def _decode(self, slot: Ints) -> Part:
        """Each computes the token after those computed so far, and has the next one sampled."""
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
            return Part(turns, start, turns.after)  # -1: the launch under way samples them
        return Part(turns, start, np.where(known, slots.tokens[slot, start], -1))


def extended(part: Part, slots: Slots, proposals: Mapping[int, Seq[int]]) -> Part:
    """`part` with proposed tokens after the one token of some chunks, each with a logit row.

    Without penalties these rows themselves store what they sample, and up to the first token that differs this is what
    was proposed. Rows with penalties read HISTORY, which must have the proposed tokens from the start, and store
    nothing. Sequences that have ended since the step was planned leave it: others may have their pages now.
    """
    parts = []
    for proposed, chunks in groupby(part.turns.alive(slots).nonzero()[0].tolist(), key=proposals.__contains__):
        if proposed:
            parts += [_proposed(slots, int(part.turns.slot[chunk]), proposals[chunk]) for chunk in chunks]
        else:
            parts.append(_select(part, np.array(list(chunks))))
    return _join(parts)


def _piece(slots: Slots, sequence: Sequence, count: int) -> Part:
    """The next `count` tokens of a sequence, with the logit rows that they need."""
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
    """The last known token of a sequence and proposed ones after it."""
    start, store, top = int(slots.known[slot]) - 1, int(not slots.sampling.penalised[slot]), int(slots.top[slot])
    slots.computed[slot] += len(proposed)
    slots.length[slot] += len(proposed)
    tokens = np.array([slots.tokens[slot, start], *proposed])
    after = [-1, *proposed]
    logits = [_Logits(i, slots.place_of(slot, start + i + 1), -1, store, top, after[i]) for i in range(len(after))]
    return _chunk(slots, slot, start, tokens, logits)


class _Logits(NamedTuple):
    """A logit row of a chunk, `row` rows after its first; see `Turns`."""

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
    """Turns of the sequences in `slot`, with the columns of logit rows."""
    names = ("ticket", "sequence", "tag", "choice")
    return Turns(slot=slot, count=count, **{name: getattr(slots, name)[slot] for name in names}, **rows)


def _join(parts: Seq[Part]) -> Part:
    """All their chunks, in order."""
    names = [field.name for field in fields(Turns)]
    columns = {name: np.concatenate([getattr(part.turns, name) for part in parts]) for name in names}
    chunks, rows = np.array([(len(part.start), len(part.turns.chunk)) for part in parts]).T
    columns["chunk"] += np.repeat(np.cumsum(chunks) - chunks, rows)
    return Part(Turns(**columns), *(np.concatenate([part[i] for part in parts]) for i in (1, 2)))


def _select(part: Part, chunks: Ints) -> Part:
    """Some of a part's chunks, in order."""
    turns, n = part.turns, len(part.start)
    logit = np.isin(turns.chunk, chunks)
    names = [field.name for field in fields(Turns)]
    of_chunk = {"slot", "count", "ticket", "sequence", "tag", "choice"}
    columns = {name: getattr(turns, name)[chunks if name in of_chunk else logit] for name in names}
    columns["chunk"] = np.searchsorted(chunks, columns["chunk"])
    return Part(
        Turns(**columns), part.start[chunks], part.tokens[np.isin(np.repeat(np.arange(n), turns.count), chunks)]
    )
