"""Speculative decoding with unchanged results: proposed tokens are verified if that is expected to save time.

A step with more rows takes longer, and generates more tokens only if proposals are right. How likely that is follows
from the sequence's earlier proposals, and from how long the text has already repeated what it said before. With the
measured times of steps, `Speculation.propose` chooses the number of proposed tokens with the highest expected tokens
per second, which is often zero. Whatever is expected, wrong proposals cost a sequence about 1 % of its time at most."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from statistics import median_low
from weakref import WeakKeyDictionary

import numpy as np

from megakernel.program import Program
from megakernel.serving.engine.programs import Programs
from megakernel.serving.engine.request import PlannedRows
from megakernel.serving.engine.request import Sequence as Choice
from megakernel.serving.engine.scheduler import Batch

MOST_PROPOSED = 63  # maximum proposed tokens per sequence and step
_NO_TIME = 1e-9  # replaces a step time of 0 s, which a backend without arithmetic may report
_SHARED_MEMORY = 0.99  # like _MEMORY, for the acceptance rate of all sequences together, which changes more slowly
_MEMORY = 0.9  # acceptance rates are recent averages: at each verification, earlier counts are multiplied by this
_BEGIN = 8.0  # a new sequence starts with the acceptance rate of all sequences, weighted like at most this many tokens
_FADE = 0.98  # each declined proposal multiplies its sequence's counts by this, so that old failures are forgotten
_LOSS = 0.01  # maximum time for wrong proposals, as a fraction of the time for the sequence's tokens without proposals
_CREDIT = 2.0  # maximum gain, in tokens, that a sequence saves to pay for later wrong proposals
_LEAST_MATCH = 2  # tokens are proposed only if this many last tokens, or more, occurred before
_MOST_MATCH = 32  # how many of the last tokens are compared with earlier text, at most
_TRIED = 8  # how many earlier occurrences of the last two tokens are compared, latest first
_KEPT = 8  # latest step times kept per program; their median is used
_STALE = 100  # if a program has not run for so many steps, its times are no longer used


@dataclass(slots=True)
class Acceptance:
    """How many proposed tokens were `tried` and `accepted`. A token is tried if all proposed tokens before it were
    right. Old tokens count less and less (exponential decay)."""

    memory: float = _MEMORY
    tried: float = 0.0
    accepted: float = 0.0

    def rate(self, known: int) -> float:
        """Return the probability that a proposed token is right. The `known` tokens before the proposal would have been
        proposed too, so they count as accepted. Two more count as tried, so that the result is below 1."""
        return (self.accepted + known) / (self.tried + known + 2)

    def young(self) -> Acceptance:
        """Return a state for a new sequence: the same rate with less weight, so that new results change it faster."""
        weight = min(1.0, _BEGIN / self.tried) if self.tried else 0.0
        return Acceptance(tried=weight * self.tried, accepted=weight * self.accepted)

    def learn(self, proposed: int, accepted: int) -> None:
        """Record that the first `accepted` of `proposed` tokens were right. The first wrong token counts as tried. The
        tokens after it do not."""
        self.tried = self.memory * self.tried + accepted + (accepted < proposed)
        self.accepted = self.memory * self.accepted + accepted


@dataclass(slots=True)
class Draft:
    """The speculation state of one sequence. `debt` is the time that proposals have cost beyond what they gained, as a
    number of tokens that could have been generated instead. While it is positive, nothing is proposed."""

    proposer: Lookup
    acceptance: Acceptance = field(default_factory=Acceptance)
    read: int = 0  # number of the sequence's tokens that `proposer` has read
    debt: float = 0.0

    def pay(self, tokens: float) -> None:
        self.debt = max(self.debt - tokens, -_CREDIT)

    def decline(self) -> None:
        """Record that the engine does not verify the current proposal."""
        self.acceptance.tried *= _FADE
        self.acceptance.accepted *= _FADE

    def learn(self, proposed: int, accepted: int) -> None:
        """Record that the first `accepted` of `proposed` tokens were right."""
        self.acceptance.learn(proposed, accepted)
        self.pay(accepted)


class Lookup:
    """Proposes the tokens that followed an earlier occurrence of a sequence's last tokens. An index maps every pair of
    tokens to its last occurrence. So a proposal takes no more time in a longer text."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        # Pair of tokens -> index after the pair's last occurrence.
        self._ends: dict[tuple[int, int], int] = {}
        # For the pair of tokens before index i, _before[i] is the index after its previous occurrence, or 0.
        self._before = [0, 0]

    def read(self, tokens: Sequence[int]) -> None:
        """Append `tokens`, which the sequence has gained. Add each pair of neighbouring tokens to the index, except the
        last pair, because `propose` looks for its earlier occurrences."""
        self._tokens += tokens
        tokens, ends, before = self._tokens, self._ends, self._before
        for end in range(len(before), len(tokens)):
            pair = tokens[end - 2], tokens[end - 1]
            before.append(ends.get(pair, 0))
            ends[pair] = end

    def propose(self, count: int) -> tuple[list[int], int]:
        """Find where the sequence's last tokens occurred before. Return the `count` tokens that followed there, and how
        many of the last tokens occurred there.

        Several earlier occurrences of the last two tokens are compared, and the one with the most equal tokens before
        it is used. If the last two tokens have not occurred before, return no tokens. If fewer than `count` tokens
        follow the occurrence, these tokens are repeated, as in a text that repeats itself."""
        tokens, length = self._tokens, len(self._tokens)
        if count < 1 or length <= _LEAST_MATCH:
            return [], 0
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
            return [], 0
        found = list(tokens[at : at + count])
        while len(found) < count:
            found += found[: count - len(found)]
        return found, best


Bucket = tuple[int, int]


class StepTimes:
    """Predicts the time of a step from the measured times of earlier steps. For a program that has not run, it uses
    `predict`, which returns the cost model's seconds for a program."""

    def __init__(self, programs: Programs, predict: Callable[[Program], float]) -> None:
        self._programs = programs
        self._predicted = cache(lambda bucket: predict(programs.get(*bucket)))
        self._steps = 0
        # The latest steps that ran each program: their numbers and seconds.
        self._measured: defaultdict[Bucket, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._late: deque[float] = deque(maxlen=_KEPT)

    def record(self, program: Program, seconds: float) -> None:
        """Record that a step of `program` took `seconds`."""
        self._steps += 1
        bucket = program.dims.bucket
        self._measured[bucket.tokens, bucket.logit_rows].append((self._steps, seconds))

    def record_late(self, seconds: float) -> None:
        """Record the `seconds` in which no launch ran, because a step was planned after the previous one had ended."""
        self._late.append(seconds)

    @property
    def late_s(self) -> float:
        """The seconds for which no launch runs if a step is planned only after the previous step has ended."""
        return min(self._late, default=0.0)

    def growing(self, tokens: int, logit_rows: int, most: int) -> list[float]:
        """Return the expected seconds of steps that have 0, 1, 2 ... `most` more token rows and logit rows than
        `tokens` and `logit_rows`. Between two measured sizes, times are interpolated linearly. Beyond the largest
        measured size, they grow in proportion to the cost model's predictions."""
        buckets = [self._programs.bucket(tokens + more, logit_rows + more) for more in range(most + 1)]
        distinct = list(dict.fromkeys(buckets))
        known = {bucket: seconds for bucket in distinct if (seconds := self._lately(bucket)) is not None}
        known.setdefault(distinct[0], self._predicted(distinct[0]))
        sizes, times = zip(*sorted((sum(bucket), seconds) for bucket, seconds in known.items()), strict=True)
        last = max(known, key=sum)
        for bucket in distinct[distinct.index(last) + 1 :]:
            known[bucket] = known[last] * self._predicted(bucket) / self._predicted(last)
        return [known.get(bucket) or float(np.interp(sum(bucket), sizes, times)) for bucket in buckets]

    def _lately(self, bucket: Bucket) -> float | None:
        measured = self._measured[bucket]
        fresh = measured and self._steps - measured[-1][0] < _STALE
        return median_low(seconds for _, seconds in measured) if fresh else None


@dataclass(slots=True)
class _Offer:
    """Proposed tokens of the sequence with index `chunk` in a step. The first `taken` of them will be verified."""

    chunk: int
    draft: Draft
    tokens: list[int]
    rate: float  # the probability that a token is right if all proposed tokens before it are
    taken: int = 0


class Speculation:
    """Proposes up to `depth` tokens for each sequence of a step. `proposer` makes a sequence's `Lookup`."""

    def __init__(self, depth: int, times: StepTimes, proposer: Callable[[Choice], Lookup] = lambda _: Lookup()) -> None:
        self.times = times
        times.growing(1, 1, depth)  # compiles programs, so that the first proposal does not have to wait for them
        self._depth, self._proposer = depth, proposer
        self._acceptance = Acceptance(_SHARED_MEMORY)  # of all sequences; new ones start with it
        self._drafts: WeakKeyDictionary[Choice, Draft] = WeakKeyDictionary()

    def read(self, part: PlannedRows) -> None:
        """Let the proposers read new tokens of a planned step's sequences. This costs no time while a launch runs."""
        for sequence in part.turns.sequence[np.unique(part.turns.chunk)]:
            if sequence.constraint is None or sequence.constraint.idle:
                self._draft(sequence)

    def propose(
        self, part: PlannedRows, batch: Batch, forced: Mapping[int, list[int]], *, room: int
    ) -> dict[int, list[int]]:
        """Return at most `room` proposed tokens that a planned step should verify. The keys are chunks (indices of
        sequences in the step). `forced` are tokens to which a grammar leaves no alternative; the step computes these
        too. The returned tokens have their KV pages already."""
        more = sum(map(len, forced.values()))
        offers = self._offers(part, batch) if room > 0 else []
        cost = self._choose(offers, len(part.tokens) + more, len(part.turns.chunk) + more, room) if offers else 0.0
        proposals: dict[int, list[int]] = {}
        for offer in offers:
            if granted := batch.grant(part.turns.sequence[offer.chunk], offer.tokens[: offer.taken]):
                offer.draft.debt += cost * len(granted)
                proposals[offer.chunk] = granted
            else:
                offer.draft.decline()
        return proposals

    def learn(self, sequence: Choice, proposed: int, accepted: int) -> None:
        """Record that `accepted` of a sequence's `proposed` tokens were right."""
        self._drafts[sequence].learn(proposed, accepted)
        self._acceptance.learn(proposed, accepted)

    def _draft(self, sequence: Choice) -> Draft:
        """Let a sequence's proposer read its new tokens, and return the speculation state of the sequence."""
        draft = self._drafts.get(sequence)
        if draft is None:
            draft = self._drafts[sequence] = Draft(self._proposer(sequence), self._acceptance.young())
        if new := sequence.tokens_from(draft.read):
            draft.proposer.read(new)
            draft.read += len(new)
            draft.pay(_LOSS * len(new))
        return draft

    def _offers(self, part: PlannedRows, batch: Batch) -> list[_Offer]:
        offers: list[_Offer] = []
        for chunk in part.extensible(batch.slots).tolist():
            sequence = part.turns.sequence[chunk]
            if sequence.constraint is not None and not sequence.constraint.idle:
                continue  # a mask depends on all earlier tokens, so each proposed token would need its own mask
            draft = self._draft(sequence)
            # Propose one token less than the maximum length allows, because a step also samples one token.
            most = min(self._depth, sequence.length_limit - draft.read - 1) if draft.debt <= 0 else 0
            tokens, known = draft.proposer.propose(most) if most > 0 else ([], 0)
            if sequence.constraint is not None:
                output = batch.slots.known_tokens(sequence.slot)[len(sequence.request.prompt_ids) :]
                tokens = tokens[: sequence.constraint.unlimited(output, tokens)]
            if tokens:
                offers.append(_Offer(chunk, draft, tokens, draft.acceptance.rate(known)))
        return offers

    def _choose(self, offers: list[_Offer], tokens: int, logit_rows: int, room: int) -> float:
        """Choose how many tokens of each offer (the proposal for one sequence) to verify. The step already has
        `tokens` rows and `logit_rows` logit rows. The gain of a row is the probability that its token and those before
        it are right. Rows are added in order of decreasing gain, up to the number with the most expected tokens per
        second. Returns the cost of each added row: how many tokens the step could generate in that time without the
        row."""
        gains = [(offer.rate ** (i + 1), offer) for offer in offers for i in range(len(offer.tokens))]
        gains = sorted(gains, key=lambda gain: gain[0], reverse=True)[:room]
        seconds = [max(each, _NO_TIME) for each in self.times.growing(tokens, logit_rows, len(gains))]
        seconds[1:] = [each + self.times.late_s for each in seconds[1:]]
        # Expected number of generated tokens if the first 0, 1, 2 ... of `gains` are verified.
        expected = accumulate((gain for gain, _ in gains), initial=float(logit_rows))
        rates = [generated / each for generated, each in zip(expected, seconds, strict=True)]
        chosen = rates.index(max(rates))
        for _, offer in gains[:chosen]:
            offer.taken += 1
        return (seconds[chosen] / seconds[0] - 1) * logit_rows / max(chosen, 1)
