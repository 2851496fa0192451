"""A planned step: what each sequence computes in it, and the table and program that say so to a backend."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..isa import StepTable
from ..program import Program
from ..runtime.backend import Launch
from ..runtime.rows import Rows
from ..runtime.sampling import Ints
from .request import Sequence
from .slots import Objects, Slots


@dataclass(frozen=True)
class Part:
    """Chunks of a step, with what the engine must know of them when their outcome is there."""

    rows: Rows
    # -- of each chunk
    ticket: Ints  # of its sequence's admission
    sequence: Objects
    request: Ints
    choice: Ints
    # -- of each logit row
    top: Ints  # most likely tokens to report besides the chosen one; -1: none at all
    after: Ints  # the proposed token that the row follows; -1: a known one

    @property
    def proposed(self) -> Ints:
        """Of each chunk: tokens at its end that are verified, not known."""
        return np.bincount(self.rows.chunk[self.after >= 0], minlength=len(self.rows.slot))

    def alive(self, slots: Slots) -> NDArray[np.bool_]:
        """Of each chunk: whether its sequence has kept its slot."""
        kept: NDArray[np.bool_] = slots.ticket[self.rows.slot] == self.ticket
        return kept

    def extensible(self, slots: Slots) -> Ints:
        """The chunks that continue a sequence of which all is known, so that proposed tokens may follow."""
        rows = self.rows
        single = (rows.count == 1) & (np.bincount(rows.chunk, minlength=len(rows.slot)) == 1)
        return np.flatnonzero(single & self.alive(slots) & (rows.start == slots.known[rows.slot] - 1))


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

    @property
    def rows(self) -> Rows:
        return self.part.rows


def plan(slots: Slots, ones: Ints, pieces: Seq[tuple[Sequence, int]]) -> Part:
    """Let the sequences in the slots `ones` compute a token each, and those of `pieces` so many beside them."""
    decoded = _decode(slots, ones)
    return _join([decoded, *(_piece(slots, *piece) for piece in pieces)]) if pieces else decoded


def extended(part: Part, slots: Slots, proposals: Mapping[int, Seq[int]]) -> Part:
    """`part` with proposed tokens after the one token of some chunks, each with a logit row.

    Without penalties these rows themselves store what they sample, and up to the first token that differs this is what
    was proposed. Rows with penalties read HISTORY, which must have the proposed tokens from the start, and store
    nothing. Sequences that have ended since the step was planned leave it: others may have their pages now.
    """
    parts = []
    for proposed, chunks in groupby(np.flatnonzero(part.alive(slots)).tolist(), key=proposals.__contains__):
        if proposed:
            parts += [_proposed(slots, int(part.rows.slot[chunk]), proposals[chunk]) for chunk in chunks]
        else:
            parts.append(_select(part, np.array(list(chunks))))
    return _join(parts)


def _decode(slots: Slots, slot: Ints) -> Part:
    """Each computes the token after those computed so far, and has the next one sampled."""
    n, start = len(slot), slots.computed[slot]
    tokens = np.full(n, -1)  # the token that the launch under way samples, from HISTORY
    known = start < slots.known[slot]
    if known.any():
        tokens = np.where(known, slots.tokens[slot, start], tokens)
    slots.length[slot] += 1
    slots.computed[slot] = start + 1
    ones, zeros, none = np.ones(n, np.int64), np.zeros(n, np.int64), np.full(n, -1)
    place = slots.place(slot, start + 1)
    rows = Rows(slot, start, ones, tokens, np.arange(n), zeros, place, none, np.ones(n, np.bool_))
    return _part(slots, rows, slots.top[slot], none)


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
        logits.append(_Logits(count - 1, int(slots.place(slot, end)), -1, 1, int(slots.top[slot])))
        slots.length[slot] += 1
    slots.computed[slot] = end
    return _chunk(slots, slot, start, tokens, logits)


def _proposed(slots: Slots, slot: int, proposed: Seq[int]) -> Part:
    """The last known token of a sequence and proposed ones after it."""
    start, store, top = int(slots.known[slot]) - 1, int(not slots.sampling.penalised[slot]), int(slots.top[slot])
    slots.computed[slot] += len(proposed)
    slots.length[slot] += len(proposed)
    tokens = np.array([slots.tokens[slot, start], *proposed])
    logits = [
        _Logits(i, int(slots.place(slot, start + i + 1)), -1, store, top, after) for i, after in enumerate([-1, *proposed])
    ]
    return _chunk(slots, slot, start, tokens, logits)


class _Logits(NamedTuple):
    """A logit row of a chunk; see `Rows` and `Part`."""

    index: int
    place: int
    target: int
    store: int
    top: int
    after: int = -1


def _chunk(slots: Slots, slot: int, start: int, tokens: Ints, logits: Seq[_Logits]) -> Part:
    index, place, target, store, top, after = np.array(logits, np.int64).reshape(-1, len(_Logits._fields)).T
    at, chunk = np.array([slot]), np.zeros(len(logits), np.int64)
    rows = Rows(at, np.array([start]), np.array([len(tokens)]), tokens, chunk, index, place, target, store > 0)
    return _part(slots, rows, top, after)


def _part(slots: Slots, rows: Rows, top: Ints, after: Ints) -> Part:
    slot = rows.slot
    return Part(rows, slots.ticket[slot], slots.sequence[slot], slots.request[slot], slots.choice[slot], top, after)


def _join(parts: Seq[Part]) -> Part:
    """All their chunks, in order."""
    ends = np.cumsum([len(part.rows.slot) for part in parts])
    moved = [
        replace(part.rows, chunk=part.rows.chunk + end - len(part.rows.slot))
        for part, end in zip(parts, ends.tolist(), strict=True)
    ]
    rows = Rows(**{name: np.concatenate([getattr(r, name) for r in moved]) for name in _names(Rows)})
    return Part(rows, *(np.concatenate([getattr(part, name) for part in parts]) for name in _names(Part)[1:]))


def _select(part: Part, chunks: Ints) -> Part:
    """Some of a part's chunks, in order."""
    rows = part.rows
    token = np.isin(np.repeat(np.arange(len(rows.slot)), rows.count), chunks)
    logit = np.isin(rows.chunk, chunks)
    some = {name: getattr(rows, name)[logit] for name in ("chunk", "index", "place", "target", "store")}
    some |= {name: getattr(rows, name)[chunks] for name in ("slot", "start", "count")}
    some["chunk"] = np.searchsorted(chunks, some["chunk"])
    kept = (getattr(part, name)[chunks] for name in ("ticket", "sequence", "request", "choice"))
    return Part(Rows(**some, tokens=rows.tokens[token]), *kept, part.top[logit], part.after[logit])


def _names(kind: type[Rows] | type[Part]) -> list[str]:
    return [field.name for field in fields(kind)]
