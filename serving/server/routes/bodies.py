"""The response bodies, and the conversion of log-probabilities into them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer

from megakernel.model.tokenizer import Tokenizer
from megakernel.serving.engine.tokens import Token

FinishReason = Literal["stop", "length", "tool_calls"]


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


class CompletionLogprobs(BaseModel):
    """Log-probabilities as lists with one element per token. The first token of a prompt has no log-probability.
    `text_offset` is the position in the text, in characters, where the token begins."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(BaseModel):
    """A completion, or a chunk of one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class FunctionCall(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class _Part(BaseModel):
    """A part of a streamed answer. Null fields are left out, because some clients let a null replace earlier values."""

    @model_serializer(mode="wrap")
    def _said(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in serialize(self).items() if value is not None}


class FunctionDelta(_Part):
    name: str | None = None
    arguments: str


class ToolCallDelta(_Part):
    """A part of a tool call: first its id and name, then pieces of its arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None  # left out if null

    @model_serializer(mode="wrap")
    def _said(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        told: dict[str, Any] = serialize(self)
        if self.reasoning_content is None:
            del told["reasoning_content"]
        return told


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(_Part):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning_content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "megakernel"
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]


class TokenizerInfo(BaseModel):
    bos_token: str | None
    eos_token: str | None


class DetokenizeResponse(BaseModel):
    prompt: str


class VersionResponse(BaseModel):
    version: str


# -- log-probabilities

_LOWEST = -9999.0  # stands for minus infinity, which JSON cannot represent; the same value as in vLLM

# A token id, its log-probability, and the log-probabilities of the most likely token ids at its position.
Score = tuple[int, float | None, dict[int, float] | None]


def scores(tokens: Iterable[Token]) -> list[Score]:
    return [(token.token_id, token.logprob, token.top_logprobs) for token in tokens]


def completion_logprobs(tokenizer: Tokenizer | None, tokens: list[Score], offsets: Iterable[int]) -> CompletionLogprobs:
    """Return log-probabilities in the format of /v1/completions. `offsets` are those of the tokens in the text."""
    out = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=list(offsets))
    for token, logprob, top in tokens:
        out.tokens.append(_text(tokenizer, token))
        out.token_logprobs.append(None if logprob is None else max(logprob, _LOWEST))
        likeliest: dict[str, float] = {}
        for other, value in (top or {}).items():
            # Different ids may have the same text. Of these, keep the most likely id, which comes first.
            likeliest.setdefault(_text(tokenizer, other), max(value, _LOWEST))
        out.top_logprobs.append(None if logprob is None else likeliest)
    return out


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
    """Return a token's text, with U+FFFD for incomplete characters; without a tokenizer `token_id:N`, as in vLLM."""
    return f"token_id:{token}" if tokenizer is None else tokenizer.token_bytes(token).decode("utf-8", "replace")
