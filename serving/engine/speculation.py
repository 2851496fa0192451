"""Speculative decoding with unchanged results: proposed tokens are verified if that is expected to save time.

A step with more rows takes longer, and generates more tokens only if proposals are right. From each sequence's recent
acceptance rate and from the measured times of steps, `Speculation.extend` chooses the number of proposed tokens with
the highest expected tokens per second, which is often zero. A new sequence starts with the recent acceptance rate of
all sequences. If the proposals of a sequence have been declined for a while, one proposed token is verified
nevertheless. This probe shows when the text of the sequence begins to repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megakernel.errors import MegakernelError
from megakernel.serving.engine.draft import Draft, Proposer, Share
from megakernel.serving.engine.lookup import Lookup
from megakernel.serving.engine.plan import Part, Work, extended
from megakernel.serving.engine.request import Sequence as Choice
from megakernel.serving.engine.scheduler import Batch
from megakernel.serving.engine.slots import Slots
from megakernel.serving.engine.step_times import StepTimes

MOST = 63  # maximum proposed tokens per sequence and step
VERIFIED_ROWS = 128  # maximum logit rows of a step with proposals; a step table has room for their logit biases
_MEMORY = 0.99  # decay factor of the acceptance rate of all sequences; the rate of a single sequence decays faster
_NO_TIME = 1e-9  # replaces a step time of 0 s, which a backend without arithmetic may report


def check_depth(depth: int) -> None:
    """Raise MegakernelError if `depth` is out of range."""
    if not 0 <= depth <= MOST:
        raise MegakernelError(f"speculate={depth} must be from 0 (off) to {MOST} proposed tokens")


@dataclass(slots=True)
class _Offer:
    """Proposed tokens of one sequence in one step. The first `taken` of them will be verified."""

    chunk: int
    draft: Draft
    tokens: list[int]
    taken: int = 0


def granted(work: Work, batch: Batch, sequence: Choice, tokens: list[int]) -> list[int]:
    """Allocate KV pages for `tokens`, which follow a sequence's last known token.

    Returns as many of `tokens`, from the first on, as the free pages allow. If the sequence has penalties, the returned
    tokens will also be written to the buffer HISTORY before the step, because penalties read that buffer.
    """
    known = len(sequence.tokens)
    taken = tokens[: batch.lengthen(sequence, known + len(tokens)) - known] if tokens else []
    if taken and batch.slots.sampling.penalised[sequence.slot]:
        work.histories.append((sequence.slot, known - 1, np.array([sequence.tokens[-1], *taken], np.int32)))
    return taken


class Speculation:
    """Proposes up to `depth` tokens for each sequence of a step.

    The function `proposer` makes a `Proposer` for a sequence from the list of its tokens.
    """

    def __init__(self, depth: int, times: StepTimes, proposer: Callable[[Sequence[int]], Proposer] = Lookup) -> None:
        check_depth(depth)
        self.times = times
        self._depth, self._proposer = depth, proposer
        self._share = Share(_MEMORY)  # recent acceptance rate of all sequences

    def read(self, part: Part) -> None:
        """Let the proposers of a planned step's sequences read new tokens. Call this while a launch runs."""
        for sequence in part.turns.sequence[np.unique(part.turns.chunk)]:
            if sequence.constraint is None:
                self._draft(sequence).proposer.read()

    def extend(self, work: Work, batch: Batch, *, tokens: int, logit_rows: int) -> bool:
        """Add proposed tokens to a planned step, up to `tokens` rows and `logit_rows` logit rows in total.

        Returns whether any were added. Proposals only use rows and pages that the planned work leaves free.
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
        """Record that `accepted` of a sequence's `proposed` tokens were right."""
        self._draft(sequence).learn(proposed, accepted)
        self._share.learn(proposed, accepted)

    def _draft(self, sequence: Choice) -> Draft:
        tokens = sequence.tokens  # the proposer keeps this list, to which the property `tokens` appends new tokens
        if sequence.draft is None:
            sequence.draft = Draft(self._proposer(tokens), self._share.young())
        return sequence.draft

    def _offers(self, part: Part, slots: Slots) -> list[_Offer]:
        offers: list[_Offer] = []
        for chunk in part.extensible(slots).tolist():
            sequence = part.turns.sequence[chunk]
            if sequence.constraint is not None:
                continue  # each proposed token would need its own mask, which depends on the token before it
            draft = self._draft(sequence)
            # A step generates one token more than the number of proposed tokens that it accepts.
            most = min(self._depth, sequence.length_limit - len(sequence.tokens) - 1)
            if tokens := draft.proposer.propose(most) if most > 0 else []:
                offers.append(_Offer(chunk, draft, tokens))
        return offers

    def _choose(self, offers: list[_Offer], tokens: int, logit_rows: int, room: int) -> None:
        """Choose how many tokens of each offer to verify in a step that has `tokens` rows and `logit_rows` logit rows.

        The gain of a row is the probability that its token and those before it are right. Rows are added in order of
        decreasing gain, up to the number with the most expected tokens per second. Probes are always added.
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
