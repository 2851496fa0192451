"""Speculative decoding with unchanged results: proposed tokens are verified if that is expected to save time.

A step with more rows takes longer, and generates more tokens only if proposals are right. From each sequence's recent
acceptance rate and from the measured times of steps, `Speculation.propose` chooses the number of proposed tokens with
the highest expected tokens per second, which is often zero. A new sequence starts with the recent acceptance rate of
all sequences. If the proposals of a sequence have been declined for a while, one proposed token is verified
nevertheless. This probe shows when the text of the sequence begins to repeat."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np

from megakernel.errors import MegakernelError
from megakernel.program import Program
from megakernel.serving.engine.plan import PlannedRows
from megakernel.serving.engine.programs import Programs
from megakernel.serving.engine.request import Sequence as Choice
from megakernel.serving.engine.scheduler import Batch

MOST = 63  # maximum proposed tokens per sequence and step
_NO_TIME = 1e-9  # replaces a step time of 0 s, which a backend without arithmetic may report
_SHARED_MEMORY = 0.99  # decay factor of the acceptance rate of all sequences; that of a single sequence decays faster
_MEMORY = 0.9  # at each verification, the earlier counts are multiplied by this factor
_BEGIN = 2.0  # weight of the initial acceptance rate, as a number of tried tokens
_PATIENCE, _MOST_PATIENCE = 16, 64  # initial and maximum value of `Draft.patience`, in proposals
_LEAST_MATCH = 2  # how many of the last tokens must have occurred before
_MOST_MATCH = 32  # how many of the last tokens are compared with earlier text, at most
_TRIED = 8  # how many earlier occurrences of the last _LEAST_MATCH tokens are compared, latest first
_KEPT = 8  # latest times kept per bucket; the shortest one is used, because other programs only slow steps down
_STALE = 1000  # if a bucket has not run for so many steps, its times are no longer used


class Proposer(Protocol):
    """Guesses the next tokens of one sequence."""

    def read(self, tokens: Sequence[int]) -> None:
        """Read the tokens that the sequence has gained. The engine tries to call this while a launch runs."""

    def propose(self, count: int) -> list[int]:
        """Return at most `count` tokens that may come next."""


@dataclass(slots=True)
class AcceptanceShare:
    """Acceptance rate: the probability that a proposed token is right if all tokens before it are. `tried` and
    `accepted` are exponentially decayed counts of tokens."""

    memory: float = _MEMORY
    tried: float = _BEGIN
    accepted: float = _BEGIN / 2

    @property
    def value(self) -> float:
        return self.accepted / self.tried

    def young(self) -> AcceptanceShare:
        """Return an acceptance rate for a new sequence. Its initial value is the value of this rate."""
        return AcceptanceShare(tried=_BEGIN, accepted=_BEGIN * self.value)

    def learn(self, proposed: int, accepted: int) -> None:
        """Record that the first `accepted` of `proposed` tokens were right. The first wrong token counts as tried. The
        tokens after it do not."""
        self.tried = self.memory * self.tried + accepted + (accepted < proposed)
        self.accepted = self.memory * self.accepted + accepted


@dataclass(slots=True)
class Draft:
    """Decides when to probe whether a sequence's proposals have become right. `share` is the acceptance rate of the
    sequence.

    A proposal is declined, that is, not verified, if verification is not expected to save time. After `patience`
    declined proposals in a row, at least one token of the next proposal is verified nevertheless, as a probe. After a
    successful probe, the next proposal is probed too. A failed probe doubles `patience`, up to _MOST_PATIENCE."""

    proposer: Proposer
    share: AcceptanceShare = field(default_factory=AcceptanceShare)
    read: int = 0  # how many of the sequence's tokens the proposer has read
    declined: int = 0
    patience: int = _PATIENCE
    probing: bool = False

    @property
    def acceptance(self) -> float:
        return self.share.value

    @property
    def due(self) -> bool:
        return self.declined >= self.patience

    def decline(self) -> None:
        """Record that the engine does not verify the current proposal."""
        self.declined += 1

    def verify(self) -> None:
        self.probing, self.declined = self.due, 0

    def learn(self, proposed: int, accepted: int) -> None:
        """Update the acceptance rate (see `AcceptanceShare.learn`) and the rate of probes."""
        self.share.learn(proposed, accepted)
        if self.probing and accepted:
            self.declined = self.patience
        elif self.probing:
            self.patience = min(2 * self.patience, _MOST_PATIENCE)
        elif accepted:
            self.patience = _PATIENCE


class Lookup:
    """Proposes the tokens that followed an earlier occurrence of a sequence's last tokens. An index maps every pair of
    tokens to its last occurrence, so the cost of a proposal does not grow with the length."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, int], int] = {}  # pair of tokens -> end index of the pair's last occurrence
        # For the pair that ends at index i, _before[i] is the end index of its previous occurrence; 0: there is none.
        self._before = [0, 0]

    def read(self, tokens: Sequence[int]) -> None:
        """Add new pairs to the index, except the last pair, whose earlier occurrences `propose` looks for."""
        self._tokens += tokens
        tokens, ends, before = self._tokens, self._ends, self._before
        for end in range(len(before), len(tokens)):
            pair = tokens[end - 2], tokens[end - 1]
            before.append(ends.get(pair, 0))
            ends[pair] = end

    def propose(self, count: int) -> list[int]:
        """Return `count` tokens that followed an earlier occurrence of the last tokens.

        Several earlier occurrences of the last two tokens are compared, and the longest match is used. The result is
        empty if the last two tokens have not occurred before. If fewer than `count` tokens follow the earlier
        occurrence, these tokens are repeated, which continues a text that repeats itself."""
        tokens, length = self._tokens, len(self._tokens)
        if count < 1 or length <= _LEAST_MATCH:
            return []
        end = self._ends.get((tokens[-2], tokens[-1]), 0)
        best = at = 0
        for _ in range(_TRIED):
            if not end:
                break
            same, most = _LEAST_MATCH, min(_MOST_MATCH, end)
            while same < most and tokens[end - same - 1] == tokens[length - same - 1]:
                same += 1
            if same > best:
                best, at = same, end
                if same == _MOST_MATCH:
                    break
            end = self._before[end]
        if not best:
            return []
        found = list(tokens[at : at + count])
        while len(found) < count:
            found += found[: count - len(found)]
        return found


Bucket = tuple[int, int]


@dataclass
class _Measured:
    """Times of a bucket's latest steps, in seconds. `at` is the engine's step count at the last of these steps."""

    at: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))


class StepTimes:
    """Measured times of an engine's steps. `predict` returns the seconds that the cost model expects of a program."""

    def __init__(self, programs: Programs, predict: Callable[[Program], float]) -> None:
        self._programs, self._predict = programs, predict
        self._steps = 0
        self._measured: dict[Bucket, _Measured] = {}
        self._predicted: dict[Bucket, float] = {}
        self._late: deque[float] = deque(maxlen=_KEPT)

    def record(self, program: Program, seconds: float) -> None:
        """Record that a step of `program` took `seconds`."""
        self._steps += 1
        measured = self._measured.setdefault((program.dims.bucket.tokens, program.dims.bucket.logit_rows), _Measured())
        measured.at = self._steps
        measured.seconds.append(seconds)

    def record_late(self, seconds: float) -> None:
        """Record the `seconds` between two launches when the second could not be planned during the first."""
        self._late.append(seconds)

    @property
    def late_s(self) -> float:
        """The seconds that are lost if a step is planned only after the previous step has ended."""
        return min(self._late, default=0.0)

    def growing(self, tokens: int, logit_rows: int, most: int) -> list[float]:
        """Return the expected seconds of steps with 0, 1, 2 ... `most` more token rows and logit rows than given.
        Buckets between two measured ones are interpolated linearly. Beyond the last measured bucket, times grow in
        proportion to the cost model's predictions."""
        buckets = [self._programs.bucket(tokens + more, logit_rows + more) for more in range(most + 1)]
        distinct = list(dict.fromkeys(buckets))
        known = {bucket: seconds for bucket in distinct if (seconds := self._lately(bucket)) is not None}
        known.setdefault(distinct[0], self._prediction(distinct[0]))
        ends = [bucket for bucket in distinct if bucket in known]
        for low, high in pairwise(ends):
            slope = (known[high] - known[low]) / (sum(high) - sum(low))
            for bucket in distinct[distinct.index(low) + 1 : distinct.index(high)]:
                known[bucket] = known[low] + slope * (sum(bucket) - sum(low))
        last = ends[-1]
        for bucket in distinct[distinct.index(last) + 1 :]:
            known[bucket] = known[last] * self._prediction(bucket) / self._prediction(last)
        return [known[bucket] for bucket in buckets]

    def _lately(self, bucket: Bucket) -> float | None:
        measured = self._measured.get(bucket)
        return min(measured.seconds) if measured and self._steps - measured.at < _STALE else None

    def _prediction(self, bucket: Bucket) -> float:
        if bucket not in self._predicted:
            self._predicted[bucket] = self._predict(self._programs.get(*bucket))
        return self._predicted[bucket]


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


class Speculation:
    """Proposes up to `depth` tokens for each sequence of a step. `proposer` makes the `Proposer` of a sequence."""

    def __init__(
        self, depth: int, times: StepTimes, proposer: Callable[[Choice], Proposer] = lambda _: Lookup()
    ) -> None:
        check_depth(depth)
        self.times = times
        self._depth, self._proposer = depth, proposer
        self._share = AcceptanceShare(_SHARED_MEMORY)  # recent acceptance rate of all sequences
        self._drafts: WeakKeyDictionary[Choice, Draft] = WeakKeyDictionary()

    def read(self, part: PlannedRows) -> None:
        """Let the proposers of a planned step's sequences read new tokens. Call this while a launch runs."""
        for sequence in part.turns.sequence[np.unique(part.turns.chunk)]:
            if sequence.constraint is None:
                self._draft(sequence)

    def propose(
        self, part: PlannedRows, batch: Batch, forced: Mapping[int, list[int]], *, room: int
    ) -> dict[int, list[int]]:
        """Return the proposed tokens that a planned step should verify, by chunk: at most `room` in total.

        `forced` are tokens to which a grammar leaves no alternative; the step computes them too. The returned tokens
        have their KV pages already.
        """
        more = sum(map(len, forced.values()))
        offers = self._offers(part, batch) if room > 0 else []
        if offers:
            self._choose(offers, len(part.tokens) + more, len(part.turns.chunk) + more, room)
        proposals: dict[int, list[int]] = {}
        for offer in offers:
            if granted := batch.grant(part.turns.sequence[offer.chunk], offer.tokens[: offer.taken]):
                offer.draft.verify()
                proposals[offer.chunk] = granted
            else:
                offer.draft.decline()
        return proposals

    def learn(self, sequence: Choice, proposed: int, accepted: int) -> None:
        """Record that `accepted` of a sequence's `proposed` tokens were right."""
        self._drafts[sequence].learn(proposed, accepted)
        self._share.learn(proposed, accepted)

    def _draft(self, sequence: Choice) -> Draft:
        """Return the draft of a sequence. Its proposer has read all tokens."""
        draft = self._drafts.get(sequence)
        if draft is None:
            draft = self._drafts[sequence] = Draft(self._proposer(sequence), self._share.young())
        if new := sequence.tokens_from(draft.read):
            draft.proposer.read(new)
            draft.read += len(new)
        return draft

    def _offers(self, part: PlannedRows, batch: Batch) -> list[_Offer]:
        offers: list[_Offer] = []
        for chunk in part.extensible(batch.slots).tolist():
            sequence = part.turns.sequence[chunk]
            if sequence.constraint is not None:
                continue  # each proposed token would need its own mask, which depends on the token before it
            draft = self._draft(sequence)
            # A step generates one token more than the number of proposed tokens that it accepts.
            most = min(self._depth, sequence.length_limit - draft.read - 1)
            if tokens := draft.proposer.propose(most) if most > 0 else []:
                offers.append(_Offer(chunk, draft, tokens))
        return offers

    def _choose(self, offers: list[_Offer], tokens: int, logit_rows: int, room: int) -> None:
        """Choose how many tokens of each offer to verify in a step that has `tokens` rows and `logit_rows` logit rows.
        The gain of a row is the probability that its token and those before it are right. Rows are added in order of
        decreasing gain, up to the number with the most expected tokens per second. Probes are always added."""
        probes = [offer for offer in offers if offer.draft.due][:room]
        for offer in probes:
            offer.taken = 1
        gains = [(o.draft.acceptance ** (i + 1), o) for o in offers for i in range(o.taken, len(o.tokens))]
        gains = sorted(gains, key=lambda gain: gain[0], reverse=True)[: room - len(probes)]
        seconds = self.times.growing(tokens, logit_rows, len(probes) + len(gains))
        certain = sum((offer.draft.acceptance for offer in probes), float(logit_rows))
        expected = accumulate((gain for gain, _ in gains), initial=certain)  # tokens, with the first 0, 1, 2 ... gains
        rates = [
            generated / max(seconds[rows] + (self.times.late_s if rows else 0.0), _NO_TIME)
            for rows, generated in enumerate(expected, len(probes))
        ]
        for _, offer in gains[: rates.index(max(rates))]:
            offer.taken += 1
