"""Token counts and log-probabilities as answers show them."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel

from megakernel.model.tokenizer import Tokenizer
from megakernel.serving.text.codec import Token


class PromptDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    """Token counts of a request. `cached_tokens` counts the prompt tokens found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class PromptLogprob(BaseModel):
    """One token's log-probability. `rank` is 1 for the most likely token, and None for a token that is not among the
    requested top tokens."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]  # one element per prompt token; the first is None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


LOWEST = -9999.0  # stands for minus infinity, which JSON cannot represent; the same value as in vLLM

# A token id, its log-probability, and the log-probabilities of the most likely token ids at its position.
Score = tuple[int, float | None, dict[int, float] | None]


def scores(tokens: Iterable[Token]) -> list[Score]:
    return [(token.token_id, token.logprob, token.top_logprobs) for token in tokens]


def chat_logprobs(tokenizer: Tokenizer | None, tokens: list[Score], count: int) -> ChatLogprobs:
    """Return log-probabilities in the format of /v1/chat/completions, with `count` top tokens at each position."""
    content = []
    for token, logprob, top in tokens:
        best = [_chat_token(tokenizer, other, value) for other, value in list((top or {}).items())[:count]]
        chosen = _chat_token(tokenizer, token, 0.0 if logprob is None else logprob)
        content.append(TokenLogprob(**dict(chosen), top_logprobs=best))
    return ChatLogprobs(content=content)


def likeliest(top: dict[int, float], count: int, token: int) -> dict[int, float]:
    """Return the `count` most likely token ids at one position, and `token`, with their log-probabilities."""
    return {other: value for rank, (other, value) in enumerate(top.items()) if rank < count or other == token}


def prompt_logprobs(
    tokenizer: Tokenizer | None, prompt: list[int], tops: list[dict[int, float]], count: int
) -> PromptLogprobs:
    """Return, for each position of the prompt, the log-probabilities of the prompt's token and of the `count` most
    likely tokens. `tops` has no entry for the first position, because the first token has no log-probability."""
    found: PromptLogprobs = [None]
    for token, top in zip(prompt[1:], tops, strict=True):
        best = enumerate(likeliest(top, count, token).items(), 1)
        found.append(
            {
                other: PromptLogprob(
                    logprob=max(value, LOWEST),
                    rank=rank if rank <= count else None,
                    decoded_token=token_text(tokenizer, other),
                )
                for rank, (other, value) in best
            }
        )
    return found


def _chat_token(tokenizer: Tokenizer | None, token: int, logprob: float) -> TopLogprob:
    raw = tokenizer.token_bytes(token) if tokenizer else b""
    text = token_text(tokenizer, token)
    return TopLogprob(token=text, logprob=max(logprob, LOWEST), bytes=list(raw))


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """Return a token's text, with U+FFFD for incomplete characters; without a tokenizer `token_id:N`, as in vLLM."""
    return f"token_id:{token}" if tokenizer is None else tokenizer.token_bytes(token).decode("utf-8", "replace")
