"""The bodies that clients send. Every range that a field has stands here and reaches OpenAPI from here.

Names and defaults are vLLM's and the OpenAI API's, and null is as good as absent. `fields.py` has every other field
that clients send.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from ...model.chat_template import OWN_NAMES
from ..sampling import MAX_BIAS, MAX_CHOICES, MAX_STOP_IDS, MAX_TOP_LOGPROBS, SamplingParams
from ..structured import StructuredOutputsParams
from . import fields
from .limits import MAX_MESSAGES, MAX_PARTS, MAX_PROMPTS, MAX_STOP_CHARACTERS, MAX_STOPS
from .strict import Strict
from .structured import Constrained
from .tools import MOST_TOOLS, Called, Tool, ToolChoice

INT32, _SEED = 2**31 - 1, 2**63

# Marks for `openapi.py`, which puts the model's own bounds in their place.
VOCABULARY = {"x-vocabulary": True}


def _whole(value: Any) -> Any:
    """JSON does not tell 1.0 from 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole_list(value: Any) -> Any:
    """The same for a list, at once: prompts are long."""
    return [_whole(item) for item in value] if isinstance(value, list) and float in set(map(type, value)) else value


_WHOLE_LIST = BeforeValidator(_whole_list)


def one_message(text: str) -> WrapValidator:
    """One sentence in place of one per member of a union."""

    def validate(value: Any, inner: Any) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("shape", text) from None

    return WrapValidator(validate)


def contradiction(field: str, text: str) -> PydanticCustomError:
    return PydanticCustomError("contradiction", text, {"field": field})


# Behind the bounds, which would be lost from the schema before it.
WHOLE = BeforeValidator(_whole)
TokenId = Annotated[int, Field(ge=0, le=INT32, json_schema_extra=VOCABULARY)]
Text = Annotated[str, Field(min_length=1)]
# The first item that does not fit is enough: describing each of many takes tens of milliseconds.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True), _WHOLE_LIST]
Prompt = Annotated[
    Text
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | TokenIds
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)],
    one_message(
        f"must be text, token ids, or a list of up to {MAX_PROMPTS} texts or lists of token ids, none of them empty"
    ),
]
Bias = dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]]
AddSpecial = Annotated[
    bool, Field(description="BOS, where the model has one; where absent, true for a text and false for messages")
]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[
    StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)],
    one_message(f"must be text or a list of up to {MAX_STOPS} texts, each of 1 to {MAX_STOP_CHARACTERS} characters"),
]


class Body(Strict):
    model: Annotated[str, Field(description="a name that /v1/models lists; the first of them where absent")] | None = (
        None
    )


class Sampled(Body):
    """What every generating endpoint takes."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-_SEED, lt=_SEED), WHOLE] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    logit_bias: (
        Annotated[Bias, Field(max_length=MAX_BIAS, json_schema_extra={"additionalProperties": False})] | None
    ) = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS), _WHOLE_LIST] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32), WHOLE] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: Annotated[bool, Field(description="special tokens have no text; true if absent")] | None = None
    truncate_prompt_tokens: (
        Annotated[int, Field(ge=-1, le=INT32, description="the last so many; -1: as many as have room"), WHOLE] | None
    ) = None
    stream: bool | None = None

    def sampling(
        self, max_tokens: int, structured: StructuredOutputsParams | None = None, **more: Any
    ) -> SamplingParams:
        """As the engine takes it; `structured` is what the answer must match. Raises MegakernelError where fields
        contradict each other.
        """
        names = (
            "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty stop stop_token_ids"
            " ignore_eos min_tokens include_stop_str_in_output skip_special_tokens allowed_token_ids bad_words"
        )
        given = {name: value for name in names.split() if (value := getattr(self, name, None)) is not None}
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        seed = None if self.seed is None else self.seed % 2**64
        more |= {"structured_outputs": structured, "logit_bias": bias}
        return SamplingParams(**given, seed=seed, max_tokens=max_tokens, **more)


class StreamOptions(Strict):
    body = fields.STREAM_OPTIONS

    include_usage: bool | None = None


class Choices(Sampled, Constrained):
    """What completions and chat take."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS, description="not of a stream"), WHOLE] | None = (
        None
    )
    stream_options: StreamOptions | None = None
    add_special_tokens: AddSpecial | None = None
    return_token_ids: Annotated[bool, Field(description="also give token ids, in `token_ids`")] | None = None
    return_tokens_as_token_ids: (
        Annotated[bool, Field(description="`token_id:N` in place of text in log-probabilities")] | None
    ) = None

    @model_validator(mode="after")
    def _fields_belong_to_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise contradiction("stream_options", "stream_options need stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise contradiction("prompt_logprobs", "prompt_logprobs are not part of a stream: ask without stream")
        return self

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(Choices):
    body = fields.COMPLETIONS

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=INT32, description="16 where absent; 0 only with echo"), WHOLE] | None = (
        None
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES, description="only as many as n"), WHOLE] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise contradiction("best_of", "best_of must equal n: choices are not ranked here")
        if self.max_tokens == 0 and not self.echo:
            raise contradiction("max_tokens", "max_tokens may be 0 only with echo, to score a prompt")
        return self


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    body = fields.MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)] | None,
        one_message(f'must be text or a list of up to {MAX_PARTS} parts {{"type": "text", "text": ...}}'),
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
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class Conversation(Strict):
    """A conversation, and how the model's chat template makes a prompt of it."""

    messages: Messages
    add_generation_prompt: (
        Annotated[bool, Field(description="begin an answer; true if absent, unless continue_final_message")] | None
    ) = None
    continue_final_message: Annotated[bool, Field(description="the last message is not complete")] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(description="more names for the template")] | None = None
    add_special_tokens: AddSpecial | None = None

    @model_validator(mode="after")
    def _prompt_has_one_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise contradiction(
                "continue_final_message", "continue_final_message and add_generation_prompt exclude each other"
            )
        for name in sorted(OWN_NAMES & set(self.chat_template_kwargs or ())):
            raise contradiction("chat_template_kwargs", f"chat_template_kwargs may not have the name {name}")
        return self


class ChatRequest(Conversation, Choices):
    body = fields.CHAT

    max_completion_tokens: (
        Annotated[int, Field(ge=1, le=INT32, description="up to the context's end where absent"), WHOLE] | None
    ) = None
    max_tokens: (
        Annotated[int, Field(ge=1, le=INT32, description="the older name of max_completion_tokens"), WHOLE] | None
    ) = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS, description="needs logprobs"), WHOLE] | None = None
    echo: Annotated[bool, Field(description="begin with the last message, where it is the assistant's")] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Annotated[ToolChoice | None, one_message(_CHOICES)] = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise contradiction("top_logprobs", "top_logprobs needs logprobs=true")
        return self


class TokenizeText(Body):
    body = fields.TOKENIZE

    prompt: str
    add_special_tokens: AddSpecial | None = None


class TokenizeMessages(Conversation, Body):
    body = fields.TOKENIZE


def _which(given: Any) -> str:
    return "(messages)" if isinstance(given, dict) and "messages" in given else "(text)"


# Errors leave out the names in parentheses.
TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag("(text)")] | Annotated[TokenizeMessages, Tag("(messages)")], Discriminator(_which)
]


class DetokenizeRequest(Body):
    body = fields.TOKENIZE

    tokens: Annotated[list[TokenId], _WHOLE_LIST]
