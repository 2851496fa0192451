"""Translates arguments of code that was written for vLLM into this package's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megakernel.errors import MegakernelError

_NAMES = {
    "tensor_parallel_size": "tp",
    "max_model_len": "max_context",
    "max_num_seqs": "max_seqs",
    "max_num_batched_tokens": "step_tokens",
    "enable_prefix_caching": "prefix_cache",
}
# Arguments that are ignored, because they change no result. They say, for example, how memory is divided, how a step is
# launched, or what is reported.
_HARMLESS = {
    *("trust_remote_code", "gpu_memory_utilization", "enforce_eager", "disable_log_stats", "swap_space"),
    *("cpu_offload_gb", "download_dir", "disable_custom_all_reduce", "enable_chunked_prefill", "tokenizer_mode"),
    *("distributed_executor_backend", "max_seq_len_to_capture"),
}


def own_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the arguments `given` for vLLM's `LLM` into this package's names.

    Raises MegakernelError for an unknown argument, because it might change a result.
    """
    own = {}
    for name, value in given.items():
        if name in _NAMES:
            if value is not None:
                own[_NAMES[name]] = value
        elif name not in _HARMLESS and value is not None:
            remedy = (
                "give SamplingParams a seed"
                if name == "seed"
                else f"the vLLM arguments that it takes are {', '.join(_NAMES)}"
            )
            raise MegakernelError(f"LLM does not take {name}={value!r}: {remedy}")
    return own


def as_prompts(prompts: Any) -> list[str | list[int]]:
    """Return a list of prompts, whether one prompt or several are given.

    Each prompt is text, token ids, {"prompt": text} or {"prompt_token_ids": ids}. A sequence of whole numbers is one
    prompt of token ids.
    """
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
    """Return a list of conversations, whether one conversation or several are given.

    The text parts of a message are joined into one text.
    """
    several = list(messages)
    if several and isinstance(several[0], Mapping):
        several = [several]
    return [[_plain(message) for message in conversation] for conversation in several]


def _plain(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message:
        raise MegakernelError('a message must be {"role": ..., "content": ...}')
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        wrong = next((part for part in content if not isinstance(part, Mapping) or part.get("type") != "text"), None)
        if wrong is not None:
            raise MegakernelError(
                'the parts of a message must be {"type": "text", "text": ...}: the models accept text only'
            )
        content = "".join(str(part.get("text", "")) for part in content)
    return {**message, "content": content or ""}
