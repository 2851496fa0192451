"""Prompt lookup: what followed the last tokens of a sequence when they occurred before."""

from __future__ import annotations

from collections.abc import Sequence

_LEAST = 2  # tokens that must have occurred before
_MOST = 32  # tokens up to which the longest suffix is looked for
_TRIED = 8  # earlier occurrences of the last _LEAST tokens that are compared, the latest first


class Lookup:
    """Proposes what may follow `tokens`, a prompt and the output so far, which may grow between two calls.

    An index from every pair of tokens to where it last ended grows with them, so a proposal costs the same whatever
    their number.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._ends: dict[tuple[int, int], int] = {}  # where a pair last ended
        self._before = [0, 0]  # [end]: where the pair that ends there ended before; 0: nowhere

    def read(self) -> None:
        """Index what is new. The last pair stays out, so that it is not found where it stands."""
        tokens, ends, before = self._tokens, self._ends, self._before
        for end in range(len(before), len(tokens)):
            pair = tokens[end - 2], tokens[end - 1]
            before.append(ends.get(pair, 0))
            ends[pair] = end

    def propose(self, count: int) -> list[int]:
        """Up to `count` tokens that may come next: what followed the longest suffix that occurred before.

        Nothing, where the last two tokens have not. What repeats with a short period is continued with it.
        """
        tokens, length = self._tokens, len(self._tokens)
        if count < 1 or length <= _LEAST:
            return []
        self.read()
        end = self._ends.get((tokens[-2], tokens[-1]), 0)
        best = at = 0
        for _ in range(_TRIED):
            if not end:
                break
            same, most = _LEAST, min(_MOST, end)
            while same < most and tokens[end - same - 1] == tokens[length - same - 1]:
                same += 1
            if same > best:
                best, at = same, end
                if same == _MOST:
                    break
            end = self._before[end]
        if not best:
            return []
        found = list(tokens[at : at + count])
        while len(found) < count:
            found += found[: count - len(found)]
        return found
