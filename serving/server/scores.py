"""Token counts and log-probabilities as answers show them. An answer may have a million log-probabilities, so they are
written as JSON in pieces while the answer grows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec

from megakernel.model.tokenizer import Tokenizer
from megakernel.serving.server.client import MOST_WORK
from megakernel.serving.text.codec import Token

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
LOWEST = -9999.0  # stands for minus infinity, which JSON cannot represent; the same value as in vLLM

# A token id, its log-probability, and the log-probabilities of the most likely token ids at its position.
Score = tuple[int, float | None, dict[int, float] | None]
Pieces = dict[str, bytearray]  # lists with names, as JSON without brackets


def append(pieces: Pieces, lists: Mapping[str, list[Any]]) -> None:
    """Append the values in `lists`, as JSON, to the lists with the same names in `pieces`."""
    for name, values in lists.items():
        text = pieces.setdefault(name, bytearray())
        text += b"," * bool(text and values) + _encode(values)[1:-1]


async def in_turns(items: Iterator[T], width: int) -> AsyncIterator[list[T]]:
    """Yield the items in lists of at most MOST_WORK log-probabilities. `width` is their number per item. Between two
    lists, other tasks of the event loop have their turn."""
    while part := list(islice(items, max(1, MOST_WORK // width))):
        yield part
        await asyncio.sleep(0)


def chat_logprobs(tokenizer: Tokenizer | None, tokens: Iterable[Token], count: int) -> list[dict[str, Any]]:
    """Return log-probabilities in the format of /v1/chat/completions, with `count` top tokens at each position."""
    return [
        {
            **_chat_token(tokenizer, token.token_id, token.logprob),
            "top_logprobs": [
                _chat_token(tokenizer, *other) for other in islice((token.top_logprobs or {}).items(), count)
            ],
        }
        for token in tokens
    ]


def completion_logprobs(
    tokenizer: Tokenizer | None, tokens: Sequence[Score], offsets: Iterable[int]
) -> dict[str, list[Any]]:
    """Return log-probabilities in the format of /v1/completions: lists with one element per token. The first token of
    a prompt has no log-probability. `offsets` are the positions in the text, in characters, where the tokens begin."""
    tops: list[dict[str, float] | None] = []
    for _, logprob, top in tokens:
        best: dict[str, float] = {}
        for other, value in (top or {}).items():
            # Different ids may have the same text. Of these, keep the most likely id, which comes first.
            best.setdefault(token_text(tokenizer, other), max(value, LOWEST))
        tops.append(None if logprob is None else best)
    return {
        "tokens": [token_text(tokenizer, token) for token, *_ in tokens],
        "token_logprobs": [None if logprob is None else max(logprob, LOWEST) for _, logprob, _ in tokens],
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def likeliest(top: dict[int, float], count: int, token: int) -> dict[int, float]:
    """Return the `count` most likely token ids at one position, and `token`, with their log-probabilities."""
    return {other: value for rank, (other, value) in enumerate(top.items()) if rank < count or other == token}


async def prompt_logprobs(
    tokenizer: Tokenizer | None, prompt: list[int], tops: list[dict[int, float]], count: int
) -> Pieces:
    """Return the list `prompt`: for each position of the prompt, the log-probabilities of the prompt's token and of the
    `count` most likely tokens. `rank` is 1 for the most likely token, and None for a token that is not among these.
    `tops` has no entry for the first position, because the first token has no log-probability."""
    found: Pieces = {"prompt": bytearray(b"null")}
    async for part in in_turns(zip(prompt[1:], tops, strict=True), 1 + count):
        append(found, {"prompt": [_position(tokenizer, top, count, token) for token, top in part]})
    return found


def _position(tokenizer: Tokenizer | None, top: dict[int, float], count: int, token: int) -> dict[int, dict[str, Any]]:
    return {
        other: {
            "logprob": max(value, LOWEST),
            "rank": rank if rank <= count else None,
            "decoded_token": token_text(tokenizer, other),
        }
        for rank, (other, value) in enumerate(likeliest(top, count, token).items(), 1)
    }


def _chat_token(tokenizer: Tokenizer | None, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token) if tokenizer else b""
    return {"token": token_text(tokenizer, token), "logprob": max(logprob, LOWEST), "bytes": [*raw]}


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """Return a token's text, with U+FFFD for incomplete characters; without a tokenizer `token_id:N`, as in vLLM."""
    return f"token_id:{token}" if tokenizer is None else tokenizer.token_bytes(token).decode("utf-8", "replace")
