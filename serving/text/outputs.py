"""The results that `LLM` returns. Attributes that vLLM has too have vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from megakernel.model.tokenizer import Tokenizer
from megakernel.serving.engine.sampling import SamplingParams


class Logprob(NamedTuple):
    """One token's log-probability.

    `rank` is 1 for the most likely token. It is None for a token that is not among the requested top tokens.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


def by_id(
    tokenizer: Tokenizer | None, top: Mapping[int, float], count: int, token: int, logprob: float
) -> dict[int, Logprob]:
    """Return the entries of one position: that of the chosen `token`, then those of the `count` most likely tokens.

    `top` begins with the most likely tokens, in order; it may also hold the chosen token.
    """

    def text(token: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_bytes(token).decode("utf-8", "replace")

    ranks = {other: rank for rank, other in enumerate(top, 1) if rank <= count}
    found = {token: Logprob(logprob, ranks.get(token), text(token))}
    return found | {other: Logprob(top[other], rank, text(other)) for other, rank in ranks.items()}


@dataclass(frozen=True)
class Completion:
    """One choice. `logprobs` are the raw log-softmax values of its tokens.

    `top_logprobs`, if requested, holds for each token the log-probabilities of the most likely ids and of the chosen
    id. `finish_reason` is `stop`, `length` or `abort`. `stop_reason` is the stop string or the id of `stop_token_ids`
    that ended the choice, and None for other ends. `ttft_s` is the time from the call to the first token, and `tpot_s`
    the mean time per later token, both in seconds. Each is None if there is no such token.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str | None
    logprobs: list[float]
    top_logprobs: list[dict[int, float]] | None
    ttft_s: float | None
    tpot_s: float | None
    stop_reason: str | int | None


@dataclass(frozen=True)
class CompletionOutput:
    """One choice with vLLM's names.

    `logprobs`, if requested, has for each token an entry for the chosen id and then entries for the most likely ids.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    lora_request: None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput(Completion):
    """A prompt and its choices: `outputs` with vLLM's names, `choices` with this package's.

    The output also has the attributes of its first choice. prompt_token_logprobs[i] is the log-probability of prompt
    token i given the tokens before it, None for the first token. `prompt_logprobs` holds the same in vLLM's format.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    choices: list[Completion]
    outputs: list[CompletionOutput]
    prompt_token_logprobs: list[float | None] | None
    prompt_top_logprobs: list[dict[int, float] | None] | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    num_cached_tokens: int
    finished: bool = True
    metrics: None = None
    lora_request: None = None

    def __repr__(self) -> str:
        shown = ("request_id", "prompt", "prompt_token_ids", "outputs", "finished", "num_cached_tokens")
        return f"RequestOutput({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


def in_vllm_names(choice: Completion, index: int, tokenizer: Tokenizer | None, count: int | None) -> CompletionOutput:
    """Return a choice with vLLM's names. `count` top tokens per position were requested; None means none."""
    scored = None
    if count is not None and choice.top_logprobs is not None:
        each = zip(choice.top_logprobs, choice.token_ids, choice.logprobs, strict=True)
        scored = [by_id(tokenizer, top, count, token, logprob) for top, token, logprob in each]
    return CompletionOutput(
        index=index,
        text=choice.text or "",
        token_ids=choice.token_ids,
        cumulative_logprob=math.fsum(choice.logprobs),
        logprobs=scored,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )


def request_output(
    name: str,
    prompt: str | None,
    ids: list[int],
    choices: list[Completion],
    tokenizer: Tokenizer | None,
    params: SamplingParams,
    scores: tuple[Sequence[float], Sequence[dict[int, float]]],
    cached: int,
) -> RequestOutput:
    """Return the result of a prompt.

    If prompt log-probabilities were requested, `scores` holds two lists for the prompt's tokens from the second on:
    the log-probabilities of the tokens, and the most likely ids at their positions.
    """
    logprobs, tops = scores
    scored, count = params.prompt_logprobs is not None, params.prompt_logprobs or 0
    later = [by_id(tokenizer, *one) for one in zip(tops, repeat(count), ids[1:], logprobs, strict=False)]
    return RequestOutput(
        **vars(choices[0]),
        request_id=name,
        prompt=prompt,
        prompt_token_ids=ids,
        choices=choices,
        outputs=[in_vllm_names(choice, i, tokenizer, params.logprobs) for i, choice in enumerate(choices)],
        prompt_token_logprobs=[None, *logprobs] if scored else None,
        prompt_top_logprobs=[None, *tops] if scored else None,
        prompt_logprobs=[None, *later] if scored else None,
        num_cached_tokens=cached,
        finished=all(choice.finish_reason is not None for choice in choices),
    )
