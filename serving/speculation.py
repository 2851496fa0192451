"""Exact speculation: proposed tokens are verified beside the known one where that is expected to pay.

A step that computes more rows takes longer, and gives more tokens only where proposals are right. From the share of
each sequence's proposed tokens that were right lately, and from the times of steps, `Speculation.extend` chooses the
number of rows that promises the most tokens per second, which is often none. A new sequence begins with the share of
all sequences lately. One whose proposals were declined for a while has one token verified all the same, so that a text
that begins to repeat is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import MegakernelError
from .batch import Batch
from .draft import Draft, Proposer, Share
from .lookup import Lookup
from .request import Sequence as Choice
from .slots import Slots
from .step_times import StepTimes
from .work import Part, Work, extended

MOST = 63  # proposed tokens of a sequence in a step
VERIFIED_ROWS = 128  # logit rows of a step with proposed tokens; a step table has room for the biases of that many
_MEMORY = 0.99  # of the share of all sequences' proposed tokens that were right; a sequence's own counts more by far
_NO_TIME = 1e-9  # seconds of a step that takes none, as a backend without arithmetic may say


def check_depth(depth: int) -> None:
    """Raise MegakernelError unless `depth` tokens may be proposed at once."""
    if not 0 <= depth <= MOST:
        raise MegakernelError(f"speculate={depth} must be from 0 (off) to {MOST} proposed tokens")


@dataclass(slots=True)
class _Offer:
    """Proposed tokens of one sequence in one step, of which the first `taken` are verified."""

    chunk: int
    draft: Draft
    tokens: list[int]
    taken: int = 0


def granted(work: Work, batch: Batch, sequence: Choice, tokens: list[int]) -> list[int]:
    """Those of `tokens` that may join a step after the last known one: as many as pages are free for.

    HISTORY will have them where penalties read it.
    """
    known = len(sequence.tokens)
    taken = tokens[: batch.lengthen(sequence, known + len(tokens)) - known] if tokens else []
    if taken and batch.slots.sampling.penalised[sequence.slot]:
        work.histories.append((sequence.slot, known - 1, np.array([sequence.tokens[-1], *taken], np.int32)))
    return taken


class Speculation:
    """Proposes up to `depth` tokens for each sequence of a step; `proposer` makes what guesses from its tokens."""

    def __init__(self, depth: int, times: StepTimes, proposer: Callable[[Sequence[int]], Proposer] = Lookup) -> None:
        check_depth(depth)
        self.times = times
        self._depth, self._proposer = depth, proposer
        self._share = Share(_MEMORY)  # of all sequences, lately

    def read(self, part: Part) -> None:
        """Take note of the tokens of a planned step's sequences, while a launch runs."""
        for sequence in part.turns.sequence[np.unique(part.turns.chunk)]:
            if sequence.constraint is None:
                self._draft(sequence).proposer.read()

    def extend(self, work: Work, batch: Batch, *, tokens: int, logit_rows: int) -> bool:
        """Have proposed tokens verified in a step of at most `tokens` rows and `logit_rows` logit rows; whether any.

        What sequences wait for is planned before, so proposals take only the rows and pages that it leaves.
        """
        part, slots = work.part, batch.slots
        rows, logits = len(part.tokens), len(part.turns.chunk)
        room = min(tokens - rows, min(logit_rows, VERIFIED_ROWS) - logits)
        offers = self._offers(part, slots) if room > 0 else []
        if not offers:
            return False
        self._choose(offers, rows, logits, room)
        proposals: dict[int, list[int]] = {}
        for offer in offers:
            taken = granted(work, batch, part.turns.sequence[offer.chunk], offer.tokens[: offer.taken])
            if not taken:
                offer.draft.decline()
                continue
            offer.draft.verify()
            proposals[offer.chunk] = taken
        if proposals:
            work.part, work.verifies = extended(part, slots, proposals), True
        return bool(proposals)

    def learn(self, sequence: Choice, proposed: int, accepted: int) -> None:
        """Of `proposed` tokens of a sequence so many were right."""
        self._draft(sequence).learn(proposed, accepted)
        self._share.learn(proposed, accepted)

    def _draft(self, sequence: Choice) -> Draft:
        tokens = sequence.tokens  # a proposer reads this list, and asking for it brings it up to date
        if sequence.draft is None:
            sequence.draft = Draft(self._proposer(tokens), self._share.young())
        return sequence.draft

    def _offers(self, part: Part, slots: Slots) -> list[_Offer]:
        offers: list[_Offer] = []
        for chunk in part.extensible(slots).tolist():
            sequence = part.turns.sequence[chunk]
            if sequence.constraint is not None:
                continue  # each proposed token would need a mask that depends on the one before
            draft = self._draft(sequence)
            # The step gives one token more than are accepted.
            most = min(self._depth, sequence.length_limit - len(sequence.tokens) - 1)
            if tokens := draft.proposer.propose(most) if most > 0 else []:
                offers.append(_Offer(chunk, draft, tokens))
        return offers

    def _choose(self, offers: list[_Offer], tokens: int, logit_rows: int, room: int) -> None:
        """Say of each offer how many tokens are verified, beside `tokens` rows of which `logit_rows` get logits.

        A row's gain is the probability that its token and those before it are right. Rows join by falling gain, as many
        as make the step's expected tokens per second the most. Probes join in any case.
        """
        expected, rows = float(logit_rows), 0
        for offer in offers:
            if offer.draft.due and rows < room:
                offer.taken = 1
                expected, rows = expected + offer.draft.acceptance, rows + 1
        gains = [
            (offer.draft.acceptance ** (i + 1), offer)
            for offer in offers
            for i in range(offer.taken, len(offer.tokens))
        ]
        gains.sort(key=lambda gain: gain[0], reverse=True)
        gains = gains[: room - rows]
        seconds = self.times.growing(tokens, logit_rows, rows + len(gains))
        late = self.times.late_s
        best, taken = expected / max(seconds[rows] + (late if rows else 0.0), _NO_TIME), 0
        for count, (gain, _) in enumerate(gains, 1):
            expected += gain
            if (now := expected / max(seconds[rows + count] + late, _NO_TIME)) > best:
                best, taken = now, count
        for _, offer in gains[:taken]:
            offer.taken += 1
