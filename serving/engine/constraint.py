"""Constraints on generation: which tokens may come next in a text, and which tokens must come next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray


class Constraint(ABC):
    """Tracks the output of one sequence.

    If the output has no valid continuation, `error` says why. Otherwise `error` is empty.
    """

    error = ""

    @abstractmethod
    def copy(self) -> Constraint:
        """Return a fresh constraint for another sequence, which has no output yet."""

    @abstractmethod
    def follow(self, tokens: Seq[int], prompt: int) -> list[int]:
        """Read the output, which is `tokens[prompt:]`. Returns the tokens that must come next, often none."""


class Words(Constraint):
    """Permits only the token ids in `allowed` (None: all), and none that would complete a token sequence in `bad`."""

    def __init__(self, vocab: int, allowed: Seq[int] | None, bad: Seq[Seq[int]]) -> None:
        bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
        bits[slice(None) if allowed is None else list(allowed)] = 1
        self._mask = np.packbits(bits, bitorder="little").view(np.int32)
        self._bad = [(list(run[:-1]), run[-1]) for run in bad]
        self._longest = max((len(run) for run in bad), default=1) - 1
        self._last: list[int] = []

    def copy(self) -> Words:
        other = object.__new__(Words)
        other.__dict__.update(self.__dict__)
        return other

    def follow(self, tokens: Seq[int], prompt: int) -> list[int]:
        self._last = list(tokens[max(prompt, len(tokens) - self._longest) :])
        return []

    def write(self, mask: NDArray[np.int32]) -> None:
        """Fill `mask` with one bit per token id: 1 if the token may come next."""
        mask[:] = self._mask
        words = mask.view(np.uint32)
        for before, last in self._bad:
            if self._last[len(self._last) - len(before) :] == before and len(before) <= len(self._last):
                words[last // 32] &= ~np.uint32(1 << last % 32)
        if not mask.any():
            self.error = "no token is allowed: allowed_token_ids and bad_words leave none"


class Grammar(Constraint):
    """A grammar that the text must match.

    If only one text can come next, the tokens into which the tokenizer splits this text are forced. Otherwise a mask
    says which tokens may be sampled. Forced tokens and masks depend on the output alone. All tokens of a forced text
    are determined at once, so they do not depend on how many steps output them.
    """

    def __init__(self, matcher: LLMatcher, executor: LLExecutor) -> None:
        """`matcher` must not have read any token yet. The constraint advances only a copy of it."""
        self._start, self._executor = matcher, executor
        self.matcher = matcher.deep_copy()
        self._read: list[int] = []  # the output, then the forced tokens

    def copy(self) -> Grammar:
        return Grammar(self._start, self._executor)

    def follow(self, tokens: Seq[int], prompt: int) -> list[int]:
        read, matcher = self._read, self.matcher
        known = len(tokens) - prompt
        if known >= len(read) and not self.error:
            new = list(tokens[prompt + len(read) :])
            if new and not matcher.consume_tokens(new):
                self.fail()
                return []
            forced = matcher.compute_ff_tokens()
            if forced and not matcher.consume_tokens(forced):
                self.fail()
                return []
            read += [*new, *forced]
        return read[known:]

    def fail(self) -> None:
        """Record the library's reason why there is no valid continuation."""
        why = self.matcher.get_error() or "the grammar allows no token"
        self.error = " ".join(why.split("<state>")[0].split())[:500]

    @staticmethod
    def write(masks: NDArray[np.int32], rows: Mapping[int, Grammar]) -> None:
        """Fill each grammar's row of `masks` with the tokens that may follow its output and its forced tokens.

        The library computes the rows in parallel on all cores.
        """
        if not rows:
            return
        executor = next(iter(rows.values()))._executor
        matchers = [(grammar.matcher, row) for row, grammar in rows.items()]
        executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.strides[0], len(masks))
        for grammar in rows.values():
            if grammar.matcher.is_error():
                grammar.fail()


def write_masks(masks: NDArray[np.int32], constraints: Seq[Constraint]) -> None:
    """Fill one row of `masks` for each constraint with the tokens that may come next."""
    Grammar.write(masks, {row: one for row, one in enumerate(constraints) if isinstance(one, Grammar)})
    for row, one in enumerate(constraints):
        if isinstance(one, Words):
            one.write(masks[row])
