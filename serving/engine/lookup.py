"""Prompt lookup: proposes the tokens that followed an earlier occurrence of a sequence's last tokens."""

from __future__ import annotations

from collections.abc import Sequence

_LEAST = 2  # how many of the last tokens must have occurred before
_MOST = 32  # how many of the last tokens are compared with earlier text, at most
_TRIED = 8  # how many earlier occurrences of the last _LEAST tokens are compared, latest first


class Lookup:
    """Proposes tokens that may follow `tokens`, which holds a prompt and its output and may grow between calls.

    An index maps every pair of tokens to its last occurrence, so the cost of a proposal does not grow with the length.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._ends: dict[tuple[int, int], int] = {}  # pair of tokens -> end index of the pair's last occurrence

        # For the pair that ends at index i, _before[i] is the end index of the same pair's previous occurrence. It is 0
        # if there is none.
        self._before = [0, 0]

    def read(self) -> None:
        """Add the new pairs to the index, except the last pair, whose earlier occurrences `propose` looks for."""
        tokens, ends, before = self._tokens, self._ends, self._before
        for end in range(len(before), len(tokens)):
            pair = tokens[end - 2], tokens[end - 1]
            before.append(ends.get(pair, 0))
            ends[pair] = end

    def propose(self, count: int) -> list[int]:
        """Return `count` tokens that followed an earlier occurrence of the last tokens.

        Several earlier occurrences of the last two tokens are compared, and the longest match is used. The result is
        empty if the last two tokens have not occurred before. If fewer than `count` tokens follow the earlier
        occurrence, these tokens are repeated, which continues a text that repeats itself.
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
