"""Token counts and log-probabilities as answers show them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megakernel.model.tokenizer import Tokenizer
from megakernel.serving.text.codec import Token

# For each token of a prompt, the log-probabilities of some token ids; None for the first token.
PromptLogprobs = list[dict[int, dict[str, Any]] | None]
LOWEST = -9999.0  # stands for minus infinity, which JSON cannot represent; the same value as in vLLM

# A token id, its log-probability, and the log-probabilities of the most likely token ids at its position.
Score = tuple[int, float | None, dict[int, float] | None]


def scores(tokens: Iterable[Token]) -> list[Score]:
    return [(token.token_id, token.logprob, token.top_logprobs) for token in tokens]


def chat_logprobs(tokenizer: Tokenizer | None, tokens: list[Score], count: int) -> list[dict[str, Any]]:
    """Return log-probabilities in the format of /v1/chat/completions, with `count` top tokens at each position."""
    content = []
    for token, logprob, top in tokens:
        best = [_chat_token(tokenizer, other, value) for other, value in list((top or {}).items())[:count]]
        chosen = _chat_token(tokenizer, token, 0.0 if logprob is None else logprob)
        content.append(chosen | {"top_logprobs": best})
    return content


def likeliest(top: dict[int, float], count: int, token: int) -> dict[int, float]:
    """Return the `count` most likely token ids at one position, and `token`, with their log-probabilities."""
    return {other: value for rank, (other, value) in enumerate(top.items()) if rank < count or other == token}


def prompt_logprobs(
    tokenizer: Tokenizer | None, prompt: list[int], tops: list[dict[int, float]], count: int
) -> PromptLogprobs:
    """Return, for each position of the prompt, the log-probabilities of the prompt's token and of the `count` most
    likely tokens. `rank` is 1 for the most likely token, and None for a token that is not among these. `tops` has no
    entry for the first position, because the first token has no log-probability."""
    found: PromptLogprobs = [None]
    for token, top in zip(prompt[1:], tops, strict=True):
        best = enumerate(likeliest(top, count, token).items(), 1)
        found.append(
            {
                other: {
                    "logprob": max(value, LOWEST),
                    "rank": rank if rank <= count else None,
                    "decoded_token": token_text(tokenizer, other),
                }
                for rank, (other, value) in best
            }
        )
    return found


def _chat_token(tokenizer: Tokenizer | None, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token) if tokenizer else b""
    return {"token": token_text(tokenizer, token), "logprob": max(logprob, LOWEST), "bytes": list(raw)}


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """Return a token's text, with U+FFFD for incomplete characters; without a tokenizer `token_id:N`, as in vLLM."""
    return f"token_id:{token}" if tokenizer is None else tokenizer.token_bytes(token).decode("utf-8", "replace")
