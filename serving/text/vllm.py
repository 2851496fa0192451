"""What `LLM` takes and returns in vLLM's names: arguments, prompts, conversations and results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


def by_id(
    tokenizer: Tokenizer | None, top: Mapping[int, float], count: int, token: int, logprob: float
) -> dict[int, Logprob]:
    """Return vLLM's log-probability entries at one position, by token id: the chosen `token` first, then the `count`
    most likely tokens. `top` begins with the most likely tokens, in order; it may also hold the chosen token."""

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
    the mean time per later token, both in seconds. Each is None if there is no such token."""

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
    """One choice with vLLM's names. `logprobs`, if requested, has the chosen id first, then the most likely ids."""

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
    """A prompt and its choices: `outputs` with vLLM's names, `choices` with this package's. The output also has the
    attributes of its first choice. prompt_token_logprobs[i] is the log-probability of prompt token i given the tokens
    before it, None for the first token. `prompt_logprobs` holds the same in vLLM's format."""

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


def completion(
    transcript: Transcript, added_at: float, first_at: float, last_at: float, reason: str | None = None
) -> Completion:
    """Copy the tokens and text that a choice has so far. Later tokens do not change the copy. The times are those at
    which the request was added and the choice got its first and its last token. `reason` is the finish reason of a
    choice that has not ended."""
    later = len(transcript.token_ids) - 1
    return Completion(
        token_ids=list(transcript.token_ids),
        text=transcript.text,
        finish_reason=transcript.finish_reason or reason,
        logprobs=list(transcript.logprobs),
        top_logprobs=list(transcript.top_logprobs) if transcript.scored else None,
        ttft_s=first_at - added_at if later >= 0 else None,
        tpot_s=(last_at - first_at) / later if later > 0 else None,
        stop_reason=transcript.stop_reason,
    )


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
    prompt: str | list[int],
    ids: list[int],
    choices: list[Completion],
    tokenizer: Tokenizer | None,
    params: SamplingParams,
    scores: tuple[Sequence[float], Sequence[dict[int, float]]],
    cached: int,
) -> RequestOutput:
    """Return the result of a prompt. If prompt log-probabilities were requested, `scores` holds two lists for the
    prompt's tokens from the second on: the log-probabilities of the tokens, and the most likely ids at their
    positions."""
    logprobs, tops = scores
    scored, count = params.prompt_logprobs is not None, params.prompt_logprobs or 0
    later = [by_id(tokenizer, *one) for one in zip(tops, repeat(count), ids[1:], logprobs, strict=False)]
    return RequestOutput(
        **vars(choices[0]),
        request_id=name,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=ids,
        choices=choices,
        outputs=[in_vllm_names(choice, i, tokenizer, params.logprobs) for i, choice in enumerate(choices)],
        prompt_token_logprobs=[None, *logprobs] if scored else None,
        prompt_top_logprobs=[None, *tops] if scored else None,
        prompt_logprobs=[None, *later] if scored else None,
        num_cached_tokens=cached,
        finished=all(choice.finish_reason is not None for choice in choices),
    )


_NAMES = {
    "tensor_parallel_size": "tp",
    "max_model_len": "max_context",
    "max_num_seqs": "max_seqs",
    "max_num_batched_tokens": "step_tokens",
    "enable_prefix_caching": "prefix_cache",
}
# Arguments that change no result: they say, for example, how a step is launched or what is reported.
_HARMLESS = {
    *("trust_remote_code", "gpu_memory_utilization", "enforce_eager", "disable_log_stats", "swap_space"),
    *("cpu_offload_gb", "download_dir", "disable_custom_all_reduce", "enable_chunked_prefill", "tokenizer_mode"),
    *("distributed_executor_backend", "max_seq_len_to_capture"),
}


def own_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate arguments of vLLM's `LLM` into this package's names. Raises MegakernelError for unknown ones."""
    own = {}
    for name, value in given.items():
        if name in _NAMES:
            if value is not None:
                own[_NAMES[name]] = value
        elif name not in _HARMLESS and value is not None:
            known = f"the vLLM arguments that it takes are {', '.join(_NAMES)}"
            remedy = "give SamplingParams a seed" if name == "seed" else known
            raise MegakernelError(f"LLM does not take {name}={value!r}: {remedy}")
    return own


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
        raise MegakernelError(
            "a list mixes token ids with other prompts: give one list of ids, or a list of such lists and texts"
        )
    return [ids]


def _one(prompt: Any) -> str | list[int]:
    if not isinstance(prompt, Mapping):
        return prompt if isinstance(prompt, str) else list(prompt)
    others = sorted(set(prompt) - {"prompt", "prompt_token_ids"})
    if others:
        raise MegakernelError(
            f"a prompt with {', '.join(map(repr, others))} is not supported: the models accept text only"
        )
    if (ids := prompt.get("prompt_token_ids")) is not None:
        return list(ids)
    text = prompt.get("prompt")
    if not isinstance(text, str):
        raise MegakernelError('a prompt must be text, token ids, {"prompt": text} or {"prompt_token_ids": ids}')
    return text


def as_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """Return a list of the conversation or conversations, with the text parts of each message joined."""
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
            raise MegakernelError(
                'the parts of a message must be {"type": "text", "text": ...}: the models accept text only'
            )
        content = "".join(str(part.get("text", "")) for part in content)
    return {**message, "content": content or ""}
