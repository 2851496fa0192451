"""Log-probabilities of tokens in the OpenAI API's formats for completions and for chat."""

from __future__ import annotations

from collections.abc import Iterable

from megakernel.model.tokenizer import Tokenizer
from megakernel.serving.engine.tokens import Token
from megakernel.serving.server.routes.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

_LOWEST = -9999.0  # stands for minus infinity, which JSON cannot represent; the same value as in vLLM

# A token id, its log-probability, and the log-probabilities of the most likely token ids at its position.
Score = tuple[int, float | None, dict[int, float] | None]


def scores(tokens: Iterable[Token]) -> list[Score]:
    return [(token.token_id, token.logprob, token.top_logprobs) for token in tokens]


def completion_logprobs(tokenizer: Tokenizer | None, tokens: list[Score], offset: int) -> CompletionLogprobs:
    """Return the tokens' log-probabilities in the format of /v1/completions.

    `offset` is the first token's position in the text, in characters.
    """
    out = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token, logprob, top in tokens:
        text = _text(tokenizer, token)
        out.tokens.append(text)
        out.token_logprobs.append(None if logprob is None else max(logprob, _LOWEST))
        likeliest: dict[str, float] = {}
        for other, value in (top or {}).items():
            # Different ids may have the same text. Of these, keep the most likely id, which comes first.
            likeliest.setdefault(_text(tokenizer, other), max(value, _LOWEST))
        out.top_logprobs.append(None if logprob is None else likeliest)
        out.text_offset.append(offset)
        offset += len(text)
    return out


def chat_logprobs(tokenizer: Tokenizer | None, tokens: list[Score], count: int) -> ChatLogprobs:
    """Return the tokens' log-probabilities in the format of /v1/chat/completions.

    Each position also lists the `count` most likely tokens.
    """
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
    likely tokens.

    `tops` has no entry for the first position, because the first token has no log-probability.
    """
    found: PromptLogprobs = [None]
    for token, top in zip(prompt[1:], tops, strict=True):
        best = enumerate(likeliest(top, count, token).items(), 1)
        found.append(
            {
                other: PromptLogprob(
                    logprob=max(value, _LOWEST),
                    rank=rank if rank <= count else None,
                    decoded_token=_text(tokenizer, other),
                )
                for rank, (other, value) in best
            }
        )
    return found


def _chat_token(tokenizer: Tokenizer | None, token: int, logprob: float) -> TopLogprob:
    raw = tokenizer.token_bytes(token) if tokenizer else b""
    text = _text(tokenizer, token)
    return TopLogprob(token=text, logprob=max(logprob, _LOWEST), bytes=list(raw))


def _text(tokenizer: Tokenizer | None, token: int) -> str:
    """Return the text of a single token, with U+FFFD for incomplete characters.

    Without a tokenizer, the text is `token_id:N`, as in vLLM.
    """
    return f"token_id:{token}" if tokenizer is None else tokenizer.token_bytes(token).decode("utf-8", "replace")
