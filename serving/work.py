"""A planned step: what each sequence computes in it, and the table and program that say so to a backend."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..isa import StepTable
from ..program import Program
from ..runtime.backend import Launch
from ..runtime.step import Chunk, Steps
from .programs import Programs
from .request import Sequence


class Sample(NamedTuple):
    """A logit row of a step. It counts where the sequence has the tokens that the row was computed from."""

    sequence: Sequence
    position: int  # tokens before the one that the row is about
    target: int  # prompt token to score; -1: sample
    top: int  # most likely tokens to report besides this one; -1: none at all
    after: int = -1  # the proposed token that the row follows; -1: none


@dataclass
class Turn:
    """A sequence's part in a step. `proposed` tokens at the end of its chunk are verified, not known."""

    sequence: Sequence
    chunk: Chunk
    samples: list[Sample]
    proposed: int = 0

    @property
    def extensible(self) -> bool:
        """Whether it continues a sequence of which all is known, so that proposed tokens may follow."""
        sequence, chunk = self.sequence, self.chunk
        return (
            sequence.finish_reason is None
            and len(chunk.tokens) == len(self.samples) == 1
            and chunk.start == len(sequence.tokens) - 1
        )

    def propose(self, tokens: list[int]) -> list[int]:
        """Let `tokens` follow the last known one, each with a logit row; gives what HISTORY must hold from there on.

        That is nothing without penalties: then the rows themselves store what they sample, and up to the first token
        that differs this is what was proposed. Rows with penalties read HISTORY, so it has the proposed tokens from the
        start and they store nothing.
        """
        sequence, start = self.sequence, self.chunk.start
        ids = [sequence.tokens[-1], *tokens]
        rows = [sequence.sample_row(i, start, store=not sequence.penalised) for i in range(len(ids))]
        self.chunk = replace(self.chunk, tokens=ids, samples=rows)
        first = self.samples[0]
        self.samples += [first._replace(position=start + i + 1, after=ids[i]) for i in range(1, len(ids))]
        self.proposed = len(tokens)
        sequence.computed += self.proposed
        sequence.length += self.proposed
        return ids if sequence.penalised else []


@dataclass
class Work:
    """A step that is planned; once it is built it has `program` and `table`, once it has started `launch` runs.

    `histories` is what HISTORY must hold when it starts: (slot, first place, tokens).
    """

    turns: list[Turn]
    histories: list[tuple[int, int, NDArray[np.int32]]]
    program: Program | None = None
    table: StepTable | None = None
    samples: list[Sample] = field(default_factory=list)  # of all turns, in the order of the table's logit rows
    launch: Launch | None = None

    @property
    def tokens(self) -> int:
        return sum(len(turn.chunk.tokens) for turn in self.turns)

    @property
    def logit_rows(self) -> int:
        return sum(len(turn.samples) for turn in self.turns)

    @property
    def ended(self) -> bool:
        """Whether every sequence in it has ended meanwhile."""
        return all(turn.sequence.finish_reason for turn in self.turns)

    @property
    def verifies(self) -> bool:
        """Whether it has proposed tokens, so that only its outcome says where sequences go on."""
        return any(turn.proposed for turn in self.turns)

    def build(self, programs: Programs, steps: Steps) -> None:
        """Choose the program, and have `steps` make the table."""
        self.samples = [sample for turn in self.turns for sample in turn.samples]
        self.program = programs.get(self.tokens, max(len(self.samples), 1))
        self.table = steps.build(self.program.dims, [turn.chunk for turn in self.turns])
