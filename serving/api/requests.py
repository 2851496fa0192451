"""The bodies that clients send. Every range that a field has stands here and reaches OpenAPI from here.

Names and defaults are vLLM's and the OpenAI API's. Unknown fields are ignored, and null is as good as absent. A field
that would change the answer and is not supported admits only the value that changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from ..sampling import MAX_BIAS, MAX_CHOICES, MAX_STOP_IDS, MAX_TOP_LOGPROBS, SamplingParams
from ..structured import StructuredOutputsParams
from .limits import MAX_MESSAGES, MAX_PARTS, MAX_PROMPTS, MAX_STOP_CHARACTERS, MAX_STOPS
from .strict import Strict
from .structured import Constrained
from .tools import MOST_TOOLS, Called, Tool, ToolChoice

_INT32, _SEED = 2**31 - 1, 2**63

# Marks for `openapi.py`, which puts the model's own bounds in their place.
VOCABULARY = {"x-vocabulary": True}


def _whole(value: Any) -> Any:
    """JSON does not tell 1.0 from 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole_list(value: Any) -> Any:
    """The same for a list, at once: prompts are long."""
    return [_whole(item) for item in value] if isinstance(value, list) and float in set(map(type, value)) else value


_WHOLE_LIST = BeforeValidator(_whole_list)


def _one_message(text: str) -> WrapValidator:
    """One sentence in place of one per member of a union."""

    def validate(value: Any, inner: Any) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("shape", text) from None

    return WrapValidator(validate)


def _contradiction(field: str, text: str) -> PydanticCustomError:
    return PydanticCustomError("contradiction", text, {"field": field})


# Behind the bounds, which would be lost from the schema before it.
_WHOLE = BeforeValidator(_whole)
TokenId = Annotated[int, Field(ge=0, le=_INT32, json_schema_extra=VOCABULARY)]
Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1), _WHOLE_LIST]
Prompt = Annotated[
    Text
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
    | TokenIds
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)],
    _one_message(
        f"must be text, token ids, or a list of up to {MAX_PROMPTS} texts or lists of token ids, none of them empty"
    ),
]
Bias = dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[
    StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)],
    _one_message(f"must be text or a list of up to {MAX_STOPS} texts, each of 1 to {MAX_STOP_CHARACTERS} characters"),
]


class Body(Strict):
    model: Annotated[str, Field(description="a name that /v1/models lists; the first of them where absent")] | None = (
        None
    )


class StreamOptions(Strict):
    include_usage: bool | None = None


class Sampled(Body, Constrained):
    """What both generating endpoints take."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), _WHOLE] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32), _WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-_SEED, lt=_SEED), _WHOLE] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    logit_bias: (
        Annotated[Bias, Field(max_length=MAX_BIAS, json_schema_extra={"additionalProperties": False})] | None
    ) = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS), _WHOLE_LIST] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT32), _WHOLE] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: Annotated[bool, Field(description="also give token ids, in `token_ids`")] | None = None

    @model_validator(mode="after")
    def _stream_options_belong_to_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _contradiction("stream_options", "stream_options need stream=true")
        return self

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, max_tokens: int, structured: StructuredOutputsParams | None, **more: Any) -> SamplingParams:
        """As the engine takes it; `structured` is what the answer must match. Raises MegakernelError where fields
        contradict each other.
        """
        names = (
            "n temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty stop stop_token_ids"
            " ignore_eos min_tokens allowed_token_ids bad_words"
        )
        given = {name: value for name in names.split() if (value := getattr(self, name)) is not None}
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        seed = None if self.seed is None else self.seed % 2**64
        more |= {"structured_outputs": structured, "logit_bias": bias}
        return SamplingParams(**given, seed=seed, max_tokens=max_tokens, **more)


class CompletionRequest(Sampled):
    prompt: Prompt
    max_tokens: (
        Annotated[int, Field(ge=0, le=_INT32, description="16 where absent; 0 only with echo"), _WHOLE] | None
    ) = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), _WHOLE] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES, description="only as many as n"), _WHOLE] | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise _contradiction("best_of", "best_of must equal n: choices are not ranked here")
        if self.max_tokens == 0 and not self.echo:
            raise _contradiction("max_tokens", "max_tokens may be 0 only with echo, to score a prompt")
        return self


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)] | None,
        _one_message(f'must be text or a list of up to {MAX_PARTS} parts {{"type": "text", "text": ...}}'),
    ] = None

    tool_calls: Annotated[list[Called], Field(max_length=MOST_TOOLS)] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        content = self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        more: dict[str, Any] = {"tool_call_id": self.tool_call_id, "name": self.name}
        if self.tool_calls:
            more["tool_calls"] = [call.plain() for call in self.tool_calls]
        return {"role": self.role, "content": text} | {key: value for key, value in more.items() if value is not None}


_CHOICES = 'must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(Sampled):
    messages: Messages
    max_completion_tokens: (
        Annotated[int, Field(ge=1, le=_INT32, description="up to the context's end where absent"), _WHOLE] | None
    ) = None
    max_tokens: (
        Annotated[int, Field(ge=1, le=_INT32, description="the older name of max_completion_tokens"), _WHOLE] | None
    ) = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS, description="needs logprobs"), _WHOLE] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Annotated[ToolChoice | None, _one_message(_CHOICES)] = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise _contradiction("top_logprobs", "top_logprobs needs logprobs=true")
        return self


class TokenizeText(Body):
    prompt: str
    add_special_tokens: Annotated[bool, Field(description="BOS, where the model has one; true if absent")] | None = None


class TokenizeMessages(Body):
    messages: Messages


TokenizeRequest = Annotated[
    TokenizeText | TokenizeMessages, _one_message("give prompt, a text, or messages as for /v1/chat/completions")
]


class DetokenizeRequest(Body):
    tokens: Annotated[list[TokenId], _WHOLE_LIST]
