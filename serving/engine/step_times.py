"""Estimates the time of steps from recent measurements, or from the cost model for buckets that were not measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from megakernel.program import Program
from megakernel.serving.engine.programs import Programs

_KEPT = 8  # latest times kept per bucket; the shortest one is used, because other programs only slow steps down
_STALE = 1000  # if a bucket has not run for so many steps, its times are no longer used

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
        measured = self._measured.setdefault((program.dims.tokens, program.dims.logit_rows), _Measured())
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
        proportion to the cost model's predictions.
        """
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
