"""One program per bucket, compiled when a step first needs it."""

from __future__ import annotations

from typing import Protocol

from ..program import Program


class Compile(Protocol):
    """`compile_program` with everything fixed but the bucket."""

    def __call__(self, *, tokens: int, logit_rows: int) -> Program: ...


def bucket(count: int, most: int) -> int:
    """The smallest power of two that holds `count`, and `most` where that is smaller."""
    return min(1 << max(count - 1, 0).bit_length(), most)


class Programs:
    """Programs of one engine: same model, machine and limits, a bucket each."""

    def __init__(self, compile: Compile, most_tokens: int, most_logit_rows: int) -> None:
        self._compile = compile
        self._most_tokens, self._most_logit_rows = most_tokens, most_logit_rows
        self._cache: dict[tuple[int, int], Program] = {}

    def get(self, tokens: int, logit_rows: int) -> Program:
        """The program of the smallest bucket with room for that many token rows and logit rows."""
        key = bucket(tokens, self._most_tokens), bucket(logit_rows, self._most_logit_rows)
        if key not in self._cache:
            self._cache[key] = self._compile(tokens=key[0], logit_rows=key[1])
        return self._cache[key]
