"""Constraints on generation, such as a JSON schema: they limit or force the next tokens of a text. A grammar is first
compiled in a separate process with limits on time and memory, because the compilation of a hostile grammar may never
finish. If that succeeds, the grammar is compiled in this process too, and the result is cached."""

from __future__ import annotations

import base64
import json
import os
import re
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from megakernel.errors import MegakernelError
from megakernel.model.limited import Ended, LimitedProcess
from megakernel.model.tokenizer import Tokenizer
from megakernel.serving.engine.grammar_worker import Vocabulary, loosened, matcher_of, release_memory
from megakernel.serving.engine.sampling import SamplingParams, StructuredOutputsParams
from megakernel.settings import SETTINGS

Ids = NDArray[np.int32]
_WORKER = Path(__file__).with_name("grammar_worker.py")
# Limits on the time and memory to compile one grammar. Ordinary schemas take 1 to 30 ms.
MOST_GRAMMAR_SECONDS = 2.0
MOST_GRAMMAR_BYTES = 1 << 30
# Limits of the cache of compiled grammars: their number and, by default, their bytes.
_MOST_KEPT, KEPT_BYTES = 256, SETTINGS["max_grammar_bytes"].value()
# The maximum bytes of text that are searched for the beginning of a tool call, and a byte that replaces earlier text.
_MOST_TRIGGER, _CUT = 256, b"\xff"
_SHOWN = 500  # maximum characters of the grammar library's message that an error shows


class Constraint(ABC):
    """Limits which tokens may come next in one sequence. If no token may come next, `error` has the reason; otherwise
    it is empty. `left` has the JSON Schema keywords that the constraint does not enforce."""

    error = ""
    left: tuple[str, ...] = ()

    @property
    def idle(self) -> bool:
        """Whether the constraint limits nothing and forces nothing after the output that `follow` got last."""
        return False

    @property
    def limit(self) -> Constraint | None:
        """The constraint for the token after the tokens that `follow` returned last; None if nothing limits it."""
        return self

    def waits(self, token: int) -> bool:
        """Return whether the constraint, after `token` alone, would neither limit nor force the next token."""
        return False

    def unlimited(self, output: Ids, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` can be appended to `output` before the constraint limits the next token."""
        return 0

    @abstractmethod
    def copy(self) -> Constraint:
        """Return a fresh constraint for another sequence, which has no output yet."""

    @abstractmethod
    def follow(self, output: Ids) -> list[int]:
        """Advance to `output`, all tokens generated so far. Returns the tokens that must come next, often none."""


class Words(Constraint):
    """Permits only the token ids in `allowed` (None: all), and none that would complete a token sequence in `bad`."""

    def __init__(self, vocab: int, allowed: Sequence[int] | None, bad: Sequence[Sequence[int]]) -> None:
        bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
        bits[slice(None) if allowed is None else list(allowed)] = 1
        self._mask = np.packbits(bits, bitorder="little").view(np.int32)
        self._bad = [(list(run[:-1]), run[-1]) for run in bad]
        self._longest = max((len(run) for run in bad), default=1) - 1
        self._last: list[int] = []

    def copy(self) -> Words:
        return copy(self)

    def follow(self, output: Ids) -> list[int]:
        self._last = output[max(0, len(output) - self._longest) :].tolist()
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

    If only one text can come next, its tokens are forced. Otherwise a mask says which tokens may be sampled. Forced
    tokens and masks depend only on the sequence's output. The tokenizer determines all tokens of a forced text at once,
    so the tokens do not depend on how many steps output them."""

    def __init__(self, matcher: LLMatcher, executor: LLExecutor, left: tuple[str, ...]) -> None:
        """`matcher` is a compiled grammar that has read no tokens. It never reads any, because `follow` uses a copy of
        it. So `copy` can make fresh grammars from it at any time."""
        self._start, self.executor, self.left = matcher, executor, left
        self.read: list[int] = []  # tokens that the matcher has read: the output, then forced ones

    def copy(self) -> Grammar:
        return Grammar(self._start, self.executor, self.left)

    @cached_property
    def matcher(self) -> LLMatcher:
        """A copy of the start matcher that reads the output. It is made on first use, because it takes memory."""
        return self._start.deep_copy()

    def follow(self, output: Ids) -> list[int]:
        read, matcher = self.read, self.matcher
        if len(output) >= len(read) and not self.error:
            new = output[len(read) :].tolist()
            if new and not matcher.consume_tokens(new):
                self.fail()
                return []
            forced = matcher.compute_ff_tokens()
            if forced and not matcher.consume_tokens(forced):
                self.fail()
                return []
            read += [*new, *forced]
        return read[len(output) :]

    def begin(self, text: list[int]) -> bool:
        """Read `text`, the token ids that come before the output. Returns whether the grammar allows them."""
        return self.matcher.validate_tokens(text) == len(text) and bool(self.matcher.consume_tokens(text))

    def fail(self) -> None:
        """Set `error` to the library's reason why no token may come next."""
        self.error = _shortened(self.matcher.get_error() or "the grammar allows no token")


class Calls(Constraint):
    """Permits any text, but each match of `trigger` begins a tool call, and the call must match a grammar. Outside of
    calls there is no mask and no forced token. If the grammar library could not compile the grammar, or gives up within
    a call, the call is not limited."""

    def __init__(self, grammar: Grammar | None, trigger: re.Pattern[bytes], vocabulary: _Vocabulary) -> None:
        self._grammar, self._trigger, self._vocabulary = grammar, trigger, vocabulary
        self.left = grammar.left if grammar else ("tools",)
        self._call: Grammar | None = None  # follows the current call
        self._read = 0  # number of output tokens before the current call; outside of calls, of all tokens read
        self._text = b""  # the end of the text since the last call

    def copy(self) -> Calls:
        return Calls(self._grammar, self._trigger, self._vocabulary)

    @property
    def idle(self) -> bool:
        return self._call is None

    @property
    def limit(self) -> Constraint | None:
        return None if self._call is None or self._call.matcher.is_stopped() else self._call

    def waits(self, token: int) -> bool:
        return self._call is None and not self._vocabulary.ends[token]

    def follow(self, output: Ids) -> list[int]:
        while self._call or self._find(output):
            call, mine = self._call, output[self._read :]
            assert call is not None
            forced = call.follow(mine) if len(mine) < len(call.read) or not call.matcher.is_stopped() else []
            if forced or not (call.error or call.matcher.is_stopped()):
                return forced
            self._read += len(mine) if call.error else len(call.read)
            self._call, self._text = None, _CUT
        return []

    def unlimited(self, output: Ids, tokens: Sequence[int]) -> int:
        if self._call or not self._grammar:
            return 0 if self._call else len(tokens)
        texts = self._vocabulary.tokens
        text = self._text + b"".join(texts[token] for token in output[self._read :].tolist())
        for at, token in enumerate(tokens):
            text += texts[token]
            if self._vocabulary.ends[token] and self._trigger.search(text):
                return at
        return len(tokens)

    def _find(self, output: Ids) -> bool:
        """Read new tokens of the output up to the beginning of a call. Returns whether there is one."""
        if not self._grammar:
            return False
        for token in output[self._read :].tolist():
            self._read += 1
            self._text += self._vocabulary.tokens[token]
            if self._vocabulary.ends[token] and (found := self._trigger.search(self._text)):
                self._call = self._grammar.copy()
                begun = (found[1] or b"" if found.re.groups else b"") + self._text[found.end() :]
                ids = self._vocabulary(begun)
                if b"".join(self._vocabulary.tokens[i] for i in ids) == begun and self._call.begin(ids):
                    return True
                self._call, self._text = None, _CUT
            if len(self._text) > _MOST_TRIGGER:
                self._text = _CUT + self._text[-_MOST_TRIGGER // 2 :]
        return False


def write_masks(masks: NDArray[np.int32], constraints: Sequence[Constraint]) -> None:
    """Write the tokens that each constraint permits next into a row of `masks`, one bit per token id. The grammar
    library computes rows of grammars in parallel on all cores."""
    grammars = [(row, one) for row, one in enumerate(constraints) if isinstance(one, Grammar)]
    if grammars:
        matchers = [(grammar.matcher, row) for row, grammar in grammars]
        executor = grammars[0][1].executor
        executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.strides[0], len(masks))
    for row, one in enumerate(constraints):
        if isinstance(one, Words):
            one.write(masks[row])
        elif isinstance(one, Grammar) and one.matcher.is_error():
            one.fail()


class Grammars:
    """Makes the constraints that sampling parameters ask for, and caches compiled grammars. It is thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer | None, vocab: int, eos_ids: frozenset[int], most_bytes: int = KEPT_BYTES
    ) -> None:
        """`vocab` is the model's vocabulary size, which may be larger than the tokenizer's. The cache has at most
        `most_bytes` of compiled grammars; the least recently used one is dropped first."""
        self._tokenizer, self._vocab, self._eos_ids = tokenizer, vocab, sorted(eos_ids)
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], tuple[Grammar, int]] = OrderedDict()  # grammar, bytes
        self._kept_bytes, self._most_bytes = 0, most_bytes
        self._checker: LimitedProcess | None = None
        self._executor = LLExecutor(len(os.sched_getaffinity(0)))

    def known(self, params: SamplingParams) -> Constraint | None:
        """Return the constraint that `params` ask for if its grammar is in the cache, otherwise None."""
        wanted = params.grammar
        found = None if wanted is None else self._kept(wanted.source())
        return self._placed(wanted, found) if wanted and found else None

    def get(self, params: SamplingParams) -> Constraint | None:
        """Return the constraint that `params` ask for, or None if they ask for none. Compiles a grammar that is not in
        the cache. Raises MegakernelError if the constraint is invalid."""
        if (wanted := params.grammar) is not None:
            try:
                return self._placed(wanted, self._grammar(wanted))
            except MegakernelError:
                if wanted.trigger is None:
                    raise
                return self._placed(wanted, None)  # a model that need not call tools can do without their grammar
        if not params.constrained:
            return None
        for token in params.allowed_token_ids or ():
            if token >= self._vocab:
                raise MegakernelError(f"allowed_token_ids: {token} is outside the vocabulary of {self._vocab} ids")
        return Words(self._vocab, params.allowed_token_ids, self._runs(params.bad_words))

    def _placed(self, wanted: StructuredOutputsParams, grammar: Grammar | None) -> Constraint:
        """Return a constraint: `grammar` limits the whole text or, if `wanted` has a trigger, only tool calls."""
        if wanted.trigger is None and grammar:
            return grammar
        assert wanted.trigger is not None
        return Calls(grammar, re.compile(wanted.trigger.encode()), self._vocabulary)

    def _runs(self, words: Sequence[str]) -> list[list[int]]:
        """Return the lists of token ids that spell a forbidden word: each of `words` with and without a leading space,
        at the beginning of a text and within one."""
        if words and self._tokenizer is None:
            raise MegakernelError("bad_words need a tokenizer, and this model has none: use logit_bias")
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), f" {word.lstrip()}"):
                assert self._tokenizer is not None
                found[tuple(self._tokenizer.encode(text, add_special=False))] = None
                found[tuple(self._vocabulary(text))] = None
        return [list(run) for run in found if run]

    def _kept(self, key: tuple[str, str]) -> Grammar | None:
        with self._lock:
            if (found := self._known.get(key)) is None:
                return None
            self._known.move_to_end(key)
            return found[0]

    def _grammar(self, wanted: StructuredOutputsParams) -> Grammar:
        if (found := self._kept(key := wanted.source())) is not None:
            return found
        if self._tokenizer is None or not self._eos_ids:
            lacks = "a tokenizer" if self._tokenizer is None else "an end-of-sequence token"
            raise MegakernelError(f"structured outputs need a model with {lacks}: choose another model")
        try:
            source, left, size = self._checked(*key)
        except MegakernelError:
            if key[0] != "calls":
                raise
            source, left, size = self._checked(key[0], loosened(key[1]))
            left = ["tools", *left]
        if (matcher := matcher_of(self._library, source)).is_error():
            raise _refused(matcher.get_error())
        self._keep(key, grammar := Grammar(matcher, self._executor, tuple(left)), size + len(key[1]))
        return grammar

    def _keep(self, key: tuple[str, str], grammar: Grammar, size: int) -> None:
        with self._lock:
            dropped = [self._known.pop(key)] if key in self._known else []
            self._known[key] = grammar, size
            self._kept_bytes += size - sum(size for _, size in dropped)
            while len(self._known) > _MOST_KEPT or self._kept_bytes > self._most_bytes:
                dropped.append(self._known.popitem(last=False)[1])
                self._kept_bytes -= dropped[-1][1]
        if dropped:
            dropped.clear()
            release_memory()

    def _checked(self, *source: str) -> tuple[str, list[str], int]:
        """Compile a grammar in the separate process. Returns the grammar in the library's own notation, the JSON Schema
        keywords that it does not enforce, and the compiled grammar's size in bytes. Raises MegakernelError if the
        grammar is invalid or exceeds the limits on time and memory."""
        with self._lock:
            if self._checker is None:
                vocabulary = self._vocabulary
                tokens = [base64.b64encode(token).decode() for token in vocabulary.tokens]
                begin = {"tokens": tokens, "special": vocabulary.special_token_ids, "eos": self._eos_ids}
                self._checker = LimitedProcess(_WORKER, begin, MOST_GRAMMAR_SECONDS, MOST_GRAMMAR_BYTES)
        try:
            kind, text = self._checker.ask(source)
        except Ended as e:
            raise _refused(f"cannot check the grammar: {e}") from e
        if kind != "text":
            raise _refused(text)
        grammar, left, size = json.loads(text)
        return grammar, left, size

    @cached_property
    def _library(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(self._vocabulary), eos_token=self._eos_ids)

    @cached_property
    def _vocabulary(self) -> _Vocabulary:
        assert self._tokenizer is not None
        return _Vocabulary(self._tokenizer, self._vocab, self._eos_ids)


class _Vocabulary(Vocabulary):
    """The vocabulary of a model. A model may have token ids that its tokenizer lacks; such ids have no text.
    End-of-sequence ids count as special tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos_ids: list[int]) -> None:
        tokens = [tokenizer.token_bytes(token) for token in range(vocab)]
        super().__init__(tokens, sorted({*tokenizer.special_ids(), *eos_ids}), next(iter(eos_ids), None))
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        """Return token ids whose texts, one after another, are exactly `text`. The grammar library asks for them where
        `text` is the only possible continuation. If the vocabulary cannot express all of `text`, its end is left out.

        The result of the model's tokenizer is preferred. But the tokenizer may begin a text with a space, normalise
        characters, or take a part of `text` for a special token. Then `text` is tokenised after a line break, and if
        that does not help either, each token is the longest that fits."""
        wanted = text if isinstance(text, bytes) else text.encode()
        for before in ("", "\n"):
            ids = self._tokenizer.encode(before + wanted.decode(errors="replace"), add_special=False)
            ids = ids[len(self._tokenizer.encode(before, add_special=False)) if before else 0 :]
            if all(i in self._texts for i in ids) and b"".join(self._texts[i] for i in ids) == wanted:
                return ids
        ids, at = [], 0
        while at < len(wanted):
            sizes = range(min(self._longest, len(wanted) - at), 0, -1)
            size = next((size for size in sizes if wanted[at : at + size] in self._by_text), None)
            if size is None:
                break
            ids.append(self._by_text[wanted[at : at + size]])
            at += size
        return ids

    @cached_property
    def ends(self) -> list[bool]:
        """Whether each token contains a punctuation mark. The text that begins a tool call ends with such a mark."""
        mark = re.compile(rb"[!-/:-@\[-`{-~]")
        return [mark.search(text) is not None for text in self.tokens]

    @cached_property
    def _texts(self) -> dict[int, bytes]:
        """The texts of all token ids that have a text and are not special."""
        special = {*self.special_token_ids}
        return {i: text for i, text in enumerate(self.tokens) if text and i not in special}

    @cached_property
    def _by_text(self) -> dict[bytes, int]:
        return {text: i for i, text in reversed(self._texts.items())}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_text), default=0)


def _refused(why: str) -> MegakernelError:
    return MegakernelError(f"structured outputs: {_shortened(why)}")


def _shortened(why: str) -> str:
    return " ".join(why.split("<state>")[0].split())[:_SHOWN]
