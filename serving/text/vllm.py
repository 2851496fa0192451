"""What `LLM` takes and returns in vLLM's names: prompts, conversations and results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

from megakernel.errors import MegakernelError
from megakernel.model.tokenizer import Tokenizer
from megakernel.serving.engine.sampling import SamplingParams
from megakernel.serving.text.codec import Transcript


class Logprob(NamedTuple):
    """One token's log-probability. `rank` is 1 for the most likely token. It is None for a token that is not among the
    requested top tokens."""

    logprob: float
    rank: int | None
    decoded_token: str | None


# The log-probabilities of the most likely tokens and of the actual token at one position, by token id.
Scores = dict[int, Logprob]


def scores_of(tokenizer: Tokenizer | None, top: Mapping[int, float], count: int, token: int, logprob: float) -> Scores:
    """Return the scores at one position: the actual `token` first, then the `count` most likely tokens. `top` begins
    with the most likely tokens, in order; it may also hold the actual token."""

    def text(token: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_bytes(token).decode("utf-8", "replace")

    ranks = {other: rank for rank, other in enumerate(top, 1) if rank <= count}
    found = {token: Logprob(logprob, ranks.get(token), text(token))}
    return found | {other: Logprob(top[other], rank, text(other)) for other, rank in ranks.items()}


def plain(scores: Scores) -> dict[int, float]:
    """Return the log-probabilities by token id, the most likely tokens first."""
    return {token: one.logprob for token, one in sorted(scores.items(), key=lambda item: item[1].rank or math.inf)}


@dataclass(frozen=True)
class CompletionOutput:
    """One choice (completion) of a prompt."""

    index: int
    text: str | None  # None without a tokenizer
    token_ids: list[int]
    token_logprobs: list[float]  # the raw log-softmax values of the tokens
    logprobs: list[Scores] | None  # the scores of each position, if requested
    finish_reason: str | None  # `stop`, `length` or `abort`
    stop_reason: str | int | None  # the stop string or the id of `stop_token_ids` that ended the choice
    ttft_s: float | None = field(compare=False)  # seconds from the call to the first token
    tpot_s: float | None = field(compare=False)  # mean seconds per later token
    lora_request: None = None

    @property
    def cumulative_logprob(self) -> float:
        """The sum of the log-probabilities of the tokens."""
        return math.fsum(self.token_logprobs)

    def finished(self) -> bool:
        return self.finish_reason is not None


# Names that results had earlier, with the names that replaced them.
_FORMER = {"choices": "outputs", "prompt_top_logprobs": "prompt_logprobs", "top_logprobs": "outputs[0].logprobs"}


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its choices, `outputs`. The properties are shortcuts to the first choice. prompt_logprobs[i], if
    requested, has the scores of prompt token i given the tokens before it, None for the first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Scores | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: None = field(default=None, repr=False)
    lora_request: None = field(default=None, repr=False)

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def text(self) -> str | None:
        return self.outputs[0].text

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[float]:
        """The log-probability of each generated token."""
        return self.outputs[0].token_logprobs

    @property
    def prompt_token_logprobs(self) -> list[float | None] | None:
        """The log-probability of each prompt token, if requested; None for the first token."""
        if self.prompt_logprobs is None:
            return None
        each = zip(self.prompt_logprobs, self.prompt_token_ids, strict=True)
        return [None if scores is None else scores[token].logprob for scores, token in each]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a result has no {name}" + (f": use {_FORMER[name]}" if name in _FORMER else ""))


# Two lists, with an element for each token of a prompt from the second on: its log-probability, and at its position the
# log-probabilities of the most likely ids.
PromptScores = tuple[Sequence[float], Sequence[dict[int, float]]]


@dataclass(frozen=True)
class Question:
    """A request of `LLM.generate`: the prompt as the caller gave it, its token ids, and the parameters."""

    request_id: str
    prompt: str | list[int]
    ids: list[int]
    params: SamplingParams
    tokenizer: Tokenizer | None

    def result(self, outputs: list[CompletionOutput], scores: PromptScores, cached: int) -> RequestOutput:
        """Return the choices and the prompt's scores. `cached` counts prompt tokens found in the prefix cache."""
        found: list[Scores | None] | None = None
        if self.params.prompt_logprobs is not None:
            logprobs, tops = scores
            each = zip(tops, repeat(self.params.prompt_logprobs), self.ids[1:], logprobs, strict=False)
            found = [None, *(scores_of(self.tokenizer, *one) for one in each)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt if isinstance(self.prompt, str) else None,
            prompt_token_ids=self.ids,
            prompt_logprobs=found,
            outputs=outputs,
            finished=all(output.finished() for output in outputs),
            num_cached_tokens=cached,
        )

    def output(self, index: int, transcript: Transcript, added: float, reason: str | None = None) -> CompletionOutput:
        """Copy the tokens and text that a choice has so far. Later tokens do not change the copy. `added` is the time
        at which the request was added. `reason` is the finish reason of a choice that has not ended."""
        scores, count = None, self.params.logprobs
        if count is not None:
            each = zip(transcript.top_logprobs, transcript.token_ids, transcript.logprobs, strict=True)
            scores = [scores_of(self.tokenizer, top, count, token, logprob) for top, token, logprob in each]
        later = len(transcript.token_ids) - 1
        return CompletionOutput(
            index=index,
            text=transcript.text,
            token_ids=list(transcript.token_ids),
            token_logprobs=list(transcript.logprobs),
            logprobs=scores,
            finish_reason=transcript.finish_reason or reason,
            stop_reason=transcript.stop_reason,
            ttft_s=transcript.first_at - added if later >= 0 else None,
            tpot_s=(transcript.last_at - transcript.first_at) / later if later > 0 else None,
        )


def as_prompts(prompts: Any) -> list[str | list[int]]:
    """Return a list of prompts, whether one prompt or several are given. Each prompt is text, token ids, {"prompt":
    text} or {"prompt_token_ids": ids}. A sequence of whole numbers is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [_one(prompts)]
    parts = list(prompts)
    ids = [part for part in parts if isinstance(part, int)]
    if not ids:
        return [_one(part) for part in parts]
    if len(ids) != len(parts):
        told = "a list mixes token ids with other prompts: give one list of ids, or a list of such lists and texts"
        raise MegakernelError(told)
    return [ids]


def _one(prompt: Any) -> str | list[int]:
    if not isinstance(prompt, Mapping):
        return prompt if isinstance(prompt, str) else list(prompt)
    others = sorted(set(prompt) - {"prompt", "prompt_token_ids"})
    if others:
        told = f"a prompt with {', '.join(map(repr, others))} is not supported: the models accept text only"
        raise MegakernelError(told)
    if (ids := prompt.get("prompt_token_ids")) is not None:
        return list(ids)
    text = prompt.get("prompt")
    if not isinstance(text, str):
        raise MegakernelError('a prompt must be text, token ids, {"prompt": text} or {"prompt_token_ids": ids}')
    return text


def as_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """Return a list of conversations, also for a single one, with the text parts of each message joined."""
    several = list(messages)
    if several and isinstance(several[0], Mapping):
        several = [several]
    return [[_plain(message) for message in conversation] for conversation in several]


def _plain(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message:
        raise MegakernelError('a message must be {"role": ..., "content": ...}')
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            told = 'the parts of a message must be {"type": "text", "text": ...}: the models accept text only'
            raise MegakernelError(told)
        content = "".join(str(part.get("text", "")) for part in content)
    return {**message, "content": content or ""}
