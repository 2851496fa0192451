"""Compiles the programs of an engine, in advance or when a step first needs one. Each program serves the steps up to a
maximum number of token rows and of logit rows (a bucket)."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Lock

from megakernel.program import Program


def bucket(count: int, most: int) -> int:
    """Return the smallest of the sizes 1, 2, 3, 4, 6, 8, 12, 16 ... with room for `count` rows, but at most `most`.
    Steps are padded to this size and compute the padding rows too. Sizes between the powers of two keep the padding
    below a third of all rows."""
    power = 1 << max(count - 1, 0).bit_length()
    return min(power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power, most)


def buckets(most: int) -> list[int]:
    """Return all sizes of programs up to `most` rows, in ascending order."""
    found = [1]
    while found[-1] < most:
        found.append(bucket(found[-1] + 1, most))
    return found


class Programs:
    """The programs of one engine, one for each size of a step. `compile` makes a program for steps of up to `tokens`
    token rows and `logit_rows` logit rows. `warm` may run in another thread."""

    def __init__(self, compile: Callable[..., Program], most_tokens: int, most_logit_rows: int) -> None:
        self._compile = compile
        self.most_tokens, self.most_logit_rows = most_tokens, most_logit_rows
        self._cache: dict[tuple[int, int], Program] = {}
        self._lock = Lock()

    def bucket(self, tokens: int, logit_rows: int) -> tuple[int, int]:
        """Return the smallest size (token rows, logit rows) of a program that has room for a step of this size."""
        return bucket(tokens, self.most_tokens), bucket(logit_rows, self.most_logit_rows)

    def unpadded(self, tokens: int, more: int) -> int:
        """Return how many token rows, at most `more`, a step of `tokens` rows can gain without more padding: the new
        rows replace padding, or fill a larger program."""
        full = next(size for size in reversed(buckets(self.most_tokens)) if size <= max(tokens + more, 1))
        return min(more, max(full, bucket(tokens, self.most_tokens)) - tokens)

    def get(self, tokens: int, logit_rows: int) -> Program:
        """Return the smallest program with room for `tokens` token rows and `logit_rows` rows that get logits."""
        key = self.bucket(tokens, logit_rows)
        with self._lock:
            if key not in self._cache:
                self._cache[key] = self._compile(tokens=key[0], logit_rows=key[1])
            return self._cache[key]

    def warm(self, stop: Event) -> None:
        """Compile a program of every size that a step can need, until `stop` is set."""
        for tokens in buckets(self.most_tokens):
            for rows in buckets(min(self.most_logit_rows, tokens)):
                if not stop.is_set():
                    self.get(tokens, rows)
