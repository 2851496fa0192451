"""What a request asks of the engine, and what it gets: sampling parameters, and the tokens of each step. Parameters
have vLLM's names, include the format that the text must match, and are checked when an object is created."""

from __future__ import annotations

import json as jsons
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from megakernel.errors import MegakernelError

TokenIds = NDArray[np.int32]
# Reasons why a token ends its choice (completion); elsewhere, a reason is stored as an index into this tuple.
FINISH = (None, "stop", "length")
POOLINGS = ("last", "mean")  # how the hidden states of a prompt's tokens become its embedding
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
# The inputs of a launch have room for more biases per row than MAX_BIAS + MAX_STOP_IDS.
MAX_BIAS = 300  # the OpenAI API's limit
MAX_STOP_IDS = 128
# Limits on bad words, because each one is compared with the end of the text after each token.
MAX_BAD_WORDS, MAX_BAD_CHARACTERS = 256, 256
# Range of positive float32 numbers, the type in which parameters reach the device.
_LEAST, _MOST = 2.0**-126, (2 - 2**-23) * 2.0**127
# The maximum length of a schema or grammar. The largest common ones have thousands of characters.
MOST_GRAMMAR_CHARACTERS = 2 << 20


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The format that a request's whole answer must match. Exactly one of the fields is given.

    If the model may call tools, `grammar` describes a call, and `trigger` is a regular expression whose matches end
    with a punctuation mark. The answer is then any text, but what follows a match must obey the grammar. If the regular
    expression has a group, the text that must obey the grammar begins with the group's text.

    Raises MegakernelError with the reason if the fields are invalid."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema, as a dict or as JSON text; kept as text
    regex: str | None = None  # a regular expression
    choice: Sequence[str] | None = None  # a list of texts; the answer is one of them
    grammar: str | None = None  # a context-free grammar, in Lark's notation or in GBNF (EBNF)
    json_object: bool | None = None  # True: any JSON object
    trigger: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] * bool(self.json_object)
        if len(given) != 1:
            found = " and ".join(given) or "none"
            told = f"structured outputs need one of json, regex, choice, grammar and json_object, not {found}"
            raise MegakernelError(told)
        if self.json is not None and not isinstance(self.json, str):
            try:  # keep text, because MessagePack, which carries the parameters to the engine, has only 64-bit integers
                object.__setattr__(self, "json", jsons.dumps(self.json))
            except (TypeError, ValueError, RecursionError) as e:
                raise MegakernelError(f"structured outputs: json is not a JSON schema: {str(e)[:500]}") from e
        for name in ("regex", "grammar"):
            if (text := getattr(self, name)) is not None and (not isinstance(text, str) or not text):
                raise MegakernelError(f"structured outputs: {name} must be a non-empty string")
        if self.choice is not None and (
            isinstance(self.choice, str) or not self.choice or not all(isinstance(c, str) and c for c in self.choice)
        ):
            raise MegakernelError("structured outputs: choice must be a list of non-empty strings")
        if len(self.source()[1]) > MOST_GRAMMAR_CHARACTERS:
            raise MegakernelError(f"structured outputs: {given[0]} has more than {MOST_GRAMMAR_CHARACTERS} characters")

    @property
    def schema(self) -> str | None:
        """The JSON schema that the answer must match, as JSON text, or None if the format is not a JSON schema."""
        assert self.json is None or isinstance(self.json, str)
        return '{"type": "object"}' if self.json_object else self.json

    def source(self) -> tuple[str, str]:
        """Return the grammar's notation ("json", "regex", "choice", "grammar" or "calls"), and the grammar as text."""
        if (schema := self.schema) is not None:
            return "json", schema
        if self.choice is not None:
            return "choice", jsons.dumps(list(self.choice))
        if self.regex is not None:
            return "regex", self.regex
        return "grammar" if self.trigger is None else "calls", self.grammar or ""


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. The defaults are vLLM's: one sample of 16 tokens at temperature 1.

    Raises MegakernelError, which names the field and its value, if a value is out of range."""

    temperature: float = 1.0  # 0 means greedy sampling
    top_p: float = 1.0  # a probability threshold; 1 turns it off
    top_k: int = 0  # sample among this many of the most likely tokens; 0 and -1 turn this limit off
    min_p: float = 0.0  # a probability threshold; 0 turns it off
    seed: int | None = None  # None takes a random seed from the operating system
    n: int = 1  # choices per prompt, each with its own random numbers
    best_of: int | None = None  # must be None or n, because every generated choice is returned
    max_tokens: int | None = 16  # None generates up to the end of the context
    min_tokens: int = 0  # before this many tokens, stop and end-of-sequence ids are forbidden and stop strings ignored
    stop: str | Sequence[str] = ()  # stop strings; the text ends before the first one that appears
    stop_token_ids: Sequence[int] = ()  # ids that end a choice, besides the model's own end-of-sequence ids
    ignore_eos: bool = False  # the model's end-of-sequence ids do not end a choice
    logprobs: int | None = None  # also report this many of the most likely tokens at each position
    prompt_logprobs: int | None = None  # score the prompt's tokens, with this many top tokens at each position
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> value added to its logit
    include_stop_str_in_output: bool = False  # keep the stop string or stop token at the end of the text
    skip_special_tokens: bool = True  # leave special tokens out of the text
    # Generate these ids only. An end-of-sequence id must be listed too to be generated.
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()  # texts that are never generated, neither at the beginning of a word nor within one
    structured_outputs: StructuredOutputsParams | None = None  # a grammar or schema that the whole text must match
    # Also return the prompt's hidden state after the final norm, of its "last" token or as the "mean" over its tokens.
    # This needs max_tokens=1, n=1, and no log-probabilities.
    pooling: str | None = None

    def __post_init__(self) -> None:
        self._real("temperature", self.temperature, 0.0, _MOST)
        self._real("top_p", self.top_p, _LEAST, 1.0)
        self._real("min_p", self.min_p, 0.0, 1.0)
        self._real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self._real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self._real("repetition_penalty", self.repetition_penalty, _LEAST, _MOST)
        self._whole("top_k", self.top_k, -1, 2**31 - 1)
        self._whole("n", self.n, 1, MAX_CHOICES)
        if self.best_of is not None and self.best_of != self.n:
            raise _error("best_of", self.best_of, f"must equal n ({self.n})")
        self._whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            self._whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise _error("min_tokens", self.min_tokens, f"must not exceed max_tokens ({self.max_tokens})")
        optional = {"seed": 2**64 - 1, "logprobs": MAX_TOP_LOGPROBS, "prompt_logprobs": MAX_TOP_LOGPROBS}
        for name, most in optional.items():
            if (value := getattr(self, name)) is not None:
                self._whole(name, value, 0, most)
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise _error("stop", text, "must be one or more non-empty strings")
        for name, most in (("stop_token_ids", MAX_STOP_IDS), ("logit_bias", MAX_BIAS)):
            if (count := len(getattr(self, name))) > most:
                raise MegakernelError(f"sampling parameter {name} has {count} entries, but may have at most {most}")
        for value in self.logit_bias.values():
            self._real("logit_bias", value, -100.0, 100.0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise _error("allowed_token_ids", self.allowed_token_ids, "must list at least one token id")
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                self._whole(name, token, 0, 2**31 - 1)
        if isinstance(self.bad_words, str) or len(self.bad_words) > MAX_BAD_WORDS:
            raise _error("bad_words", "...", f"must be a list of at most {MAX_BAD_WORDS} texts")
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip() or len(word) > MAX_BAD_CHARACTERS:
                raise _error("bad_words", word, f"must be text of 1 to {MAX_BAD_CHARACTERS} characters, not all spaces")
        if self.pooling is not None:
            if self.pooling not in POOLINGS:
                raise _error("pooling", self.pooling, f"must be one of {', '.join(POOLINGS)}")
            if (self.max_tokens, self.n, self.logprobs, self.prompt_logprobs) != (1, 1, None, None):
                raise _error("pooling", self.pooling, "needs max_tokens=1, n=1, and no log-probabilities")
        if self.structured_outputs is not None and self.structured_outputs.trigger is None:
            for name in ("min_tokens", "ignore_eos", "allowed_token_ids", "bad_words"):
                if getattr(self, name):
                    raise _error(name, getattr(self, name), "cannot be used with structured outputs")

    @property
    def grammar(self) -> StructuredOutputsParams | None:
        """The answer's grammar. A grammar of tool calls is ignored if allowed ids or bad words are given too."""
        words = self.allowed_token_ids is not None or bool(self.bad_words)
        return None if words else self.structured_outputs

    @property
    def constrained(self) -> bool:
        """Whether a `Constraint` is needed: a grammar, allowed ids or bad words limit which tokens may come next."""
        return self.structured_outputs is not None or self.allowed_token_ids is not None or bool(self.bad_words)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @staticmethod
    def _real(name: str, value: Any, low: float, high: float) -> None:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low <= value <= high:
            raise _error(name, value, f"must be a number from {low:g} to {high:g}")

    @staticmethod
    def _whole(name: str, value: Any, low: int, high: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _error(name, value, f"must be a whole number from {low} to {high}")


def _error(name: str, value: object, must: str) -> MegakernelError:
    return MegakernelError(f"sampling parameter {name}={value!r} {must}")


class Score(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Log-probabilities of a prompt's tokens except the first, or of some of these tokens. They are sent before the
    first generated token. `tops` has, by position, the log-probabilities of the most likely ids. `choice` is the number
    of the prompt's first choice (completion)."""

    choice: int
    logprobs: list[float]
    tops: list[dict[int, float]]


class Begun(msgspec.Struct, array_like=True, frozen=True):
    """Facts that are sent with a choice's first token. Later fields are set only for the first choice of a prompt."""

    admitted: float  # when the choice was first admitted, in seconds of `perf_counter`
    cached: int = 0  # tokens of the prompt that were found in the prefix cache
    pooled: NDArray[np.float32] | None = None  # the requested last or mean hidden state of the prompt


class Tokens(msgspec.Struct, tag=True, array_like=True):
    """The tokens that one step generated: one array per attribute, with one element per token, in the order of the
    step's rows. A choice is one completion of a prompt, identified by a number."""

    at: float  # when the step ended, in seconds of `perf_counter`
    choice: NDArray[np.int64]  # numbers of the choices
    token_id: NDArray[np.int32]  # token ids
    logprob: NDArray[np.float32]  # log-probabilities of the tokens
    finish: NDArray[np.uint8]  # whether and why each token ends its choice, as an index into FINISH
    top: dict[int, dict[int, float]]  # index of a token in the arrays -> its `Token.top_logprobs`, if requested
    begun: dict[int, Begun]  # index of a choice's first token in the arrays -> the facts that are sent with it

    def __len__(self) -> int:
        return len(self.choice)
