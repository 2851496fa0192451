"""The pydantic models of the request bodies. They declare the range of every field, which the OpenAPI schema shows too.
Names and defaults are those of vLLM, SGLang and the OpenAI API. A field that is null counts as absent. `fields.py` has
the fields that the server ignores or refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from megakernel.errors import MegakernelError
from megakernel.model.chat_template import OWN_NAMES
from megakernel.serving.engine.sampling import (
    MAX_BAD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_CHOICES,
    MAX_STOP_IDS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
    StructuredOutputsParams,
)
from megakernel.serving.server.errors import APIError
from megakernel.serving.server.limits import MAX_MESSAGES, MAX_PARTS, MAX_PROMPTS, MAX_STOP_CHARACTERS, MAX_STOPS
from megakernel.serving.server.routes.fields import (
    HOSTED_TOOLS,
    OF_EARLIER_ANSWERS,
    OF_REASONING,
    OF_STREAM_OPTIONS,
    Strict,
)

INT32, _SEED = 2**31 - 1, 2**63

# In the JSON schema, this entry marks a token id. `app.py` replaces the entry by the largest token id.
VOCABULARY = {"x-vocabulary": True}


def _read(value: Any) -> Any:
    """Return a whole number such as 1.0 as an integer, because JSON does not distinguish 1.0 from 1. Return the number
    or truth value that a short text holds, because forms and configuration files of clients send "128" for 128."""
    if isinstance(value, str) and len(value) < 32:
        try:
            held = json.loads(value)
        except (ValueError, RecursionError):
            return value
        value = held if isinstance(held, (int, float)) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole_list(value: Any) -> Any:
    """Return a list with `_read` applied to its items. Prompts may be long, so a list without floats is not copied."""
    return [_read(item) for item in value] if isinstance(value, list) and float in set(map(type, value)) else value


_WHOLE_LIST = BeforeValidator(_whole_list)


def one_message(text: str) -> WrapValidator:
    """Return a validator for a union type. It replaces pydantic's errors, one for each member of the union, by the
    single error message `text`."""

    def validate(value: Any, inner: Any) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("shape", text) from None

    return WrapValidator(validate)


def contradiction(field: str, text: str) -> PydanticCustomError:
    return PydanticCustomError("contradiction", text, {"field": field})


# In an Annotated type, READ must come after the Field with the bounds: otherwise, the schema lacks the bounds.
READ = BeforeValidator(_read)
Flag = Annotated[bool, READ]
TopCount = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), READ]
NewTokens = Annotated[int, Field(ge=1, le=INT32, description="default: up to the context limit"), READ]
Kept = Annotated[int, Field(ge=-1, le=INT32, description="how many last tokens to keep; -1: as many as fit"), READ]
TokenId = Annotated[int, Field(ge=0, le=INT32, json_schema_extra=VOCABULARY)]
Text = Annotated[str, Field(min_length=1)]
# `fail_fast` stops at the first invalid item, because describing many errors takes tens of milliseconds.
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
Bias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100), READ]],
    Field(max_length=MAX_BIAS, json_schema_extra={"additionalProperties": False}),
]
AddSpecial = Annotated[bool, Field(description="add the BOS token; default: true for text, false for messages"), READ]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[
    StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)],
    one_message(f"must be text or a list of up to {MAX_STOPS} texts, each of 1 to {MAX_STOP_CHARACTERS} characters"),
]
Schema = Annotated[dict[str, Any] | str, Field(description="a JSON schema as an object or as text")]
_Texts = Annotated[list[Text], Field(min_length=1, max_length=1024)]
_BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_CHARACTERS)]


class JsonSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Flag | None = None


class ResponseFormat(Strict):
    """The OpenAI API's field `response_format`, extended by llama.cpp's key `schema`. The answer always follows the
    schema, whatever `strict` says."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class StructuredOutputs(Strict):
    """vLLM's field `structured_outputs`."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: _Texts | None = None
    grammar: Text | None = None
    json_object: Flag | None = None


# The older fields of vLLM and SGLang that name a form of the answer, with their names in StructuredOutputsParams.
_FORMS = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
_FORMS |= {"regex": "regex", "ebnf": "grammar"}


class Body(Strict):
    model: Annotated[str, Field(description="a name that /v1/models lists; default: the first one")] | None = None


class Truncated(Body):
    truncate_prompt_tokens: Kept | None = None


class Sampled(Truncated):
    """The fields that every generating endpoint accepts."""

    temperature: Annotated[float, Field(ge=0, le=2), READ] | None = None
    top_p: Annotated[float, Field(gt=0, le=1), READ] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32), READ] | None = None
    min_p: Annotated[float, Field(ge=0, le=1), READ] | None = None
    seed: Annotated[int, Field(ge=-_SEED, lt=_SEED), READ] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2), READ] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), READ] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6), READ] | None = None
    logit_bias: Bias | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS), _WHOLE_LIST] | None = None
    ignore_eos: Flag | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32), READ] | None = None
    include_stop_str_in_output: Flag | None = None
    skip_special_tokens: Annotated[bool, Field(description="leave out special tokens; default: true"), READ] | None = (
        None
    )
    stream: Flag | None = None

    def sampling(
        self,
        defaults: Mapping[str, float],
        max_tokens: int,
        structured: StructuredOutputsParams | None = None,
        **more: Any,
    ) -> SamplingParams:
        """Return the engine's sampling parameters. The model's `defaults` replace those of SamplingParams and limit
        `max_tokens`. `structured` is the format that the answer must match. Raises MegakernelError if fields
        contradict each other."""
        names = (
            "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty stop stop_token_ids"
            " ignore_eos min_tokens include_stop_str_in_output skip_special_tokens allowed_token_ids bad_words"
        )
        given = {name: value for name in names.split() if (value := getattr(self, name, None)) is not None}
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        seed = None if self.seed is None else self.seed % 2**64
        more |= {"structured_outputs": structured, "logit_bias": bias, "seed": seed}
        more["max_tokens"] = min(max_tokens, defaults.get("max_tokens", max_tokens))
        return SamplingParams(**{**defaults, **given, **more})


class StreamOptions(Strict):
    where = "stream_options"
    ignored = OF_STREAM_OPTIONS

    include_usage: Flag | None = None


class Choices(Sampled):
    """The fields that completions and chat accept."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), READ] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES, description="must equal n"), READ] | None = None
    prompt_logprobs: TopCount | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: AddSpecial | None = None
    return_token_ids: Annotated[bool, Field(description="also return `token_ids`"), READ] | None = None
    return_tokens_as_token_ids: Annotated[bool, Field(description="write `token_id:N` for text"), READ] | None = None

    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    bad_words: Annotated[list[_BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: _Texts | None = None
    guided_grammar: Text | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _choices_agree(self) -> Self:
        # At temperature 0, all choices are the same, so the best of several is the first.
        if self.best_of is not None and self.best_of != (self.n or 1) and self.temperature != 0:
            raise contradiction("best_of", "best_of must equal n, because this server does not rank choices")
        if self.prompt_logprobs is not None and self.stream:
            raise contradiction("prompt_logprobs", "prompt_logprobs cannot be streamed: set stream to false")
        return self

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def structured(self) -> StructuredOutputsParams | None:
        """Return the format that the answer must match, or None if no field sets one. Raises an HTTP error 400 if the
        format is invalid or if several fields set one."""
        given: dict[str, dict[str, Any]] = {
            name: {field: value} for name, field in _FORMS.items() if (value := getattr(self, name)) is not None
        }
        if (outputs := self.structured_outputs) is not None:
            given["structured_outputs"] = {"json": outputs.json_, **outputs.model_dump(exclude={"json_"})}
        wanted = self.response_format
        if wanted is not None and wanted.type == "json_schema":
            if wanted.json_schema is None or wanted.json_schema.schema_ is None:
                told = "response_format.json_schema.schema is required with type json_schema"
                raise APIError(400, told, param="response_format")
            given["response_format"] = {"json": wanted.json_schema.schema_}
        elif wanted is not None and wanted.type == "json_object":
            given["response_format"] = {"json_object": True} if wanted.schema_ is None else {"json": wanted.schema_}
        if len(given) > 1:
            raise APIError(400, f"{' and '.join(given)} exclude each other: give one of them", param=list(given)[1])
        for name, fields in given.items():
            try:
                return StructuredOutputsParams(**fields)
            except MegakernelError as e:
                raise APIError(400, str(e), param=name) from e
        return None


def prompt_list(given: Any) -> list[str] | list[list[int]]:
    """Return the prompts of a field of type `Prompt` as a list, also if there is only one."""
    one = isinstance(given, str) or isinstance(given[0], int)
    return [given] if one else given


class CompletionRequest(Choices):
    where = "/v1/completions"

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=INT32, description="default: 16"), READ] | None = None
    echo: Flag | None = None
    logprobs: TopCount | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, le=INT32, description="max_tokens"), READ] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.max_tokens is None:
            self.max_tokens = self.max_completion_tokens
        if self.max_tokens == 0 and not self.echo:
            raise contradiction("max_tokens", "max_tokens may be 0 only with echo, to score a prompt")
        return self


MOST_TOOLS = 128  # the OpenAI API's limit
_HOSTED = re.compile(f"({HOSTED_TOOLS})(_[0-9_]+)?")


def _callable(tools: Any) -> Any:
    """Return the tools without those that only another server can run."""
    if not isinstance(tools, list):
        return tools
    return [t for t in tools if not (isinstance(t, dict) and _HOSTED.fullmatch(str(t.get("type"))[:64]))]


CALLABLE = BeforeValidator(_callable)
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Function(Strict):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


# JSON, or a part of it if the answer was cut. Clients of other APIs send an object.
Arguments = Annotated[str | dict[str, Any], one_message("must be JSON text or an object")]


class CalledFunction(Strict):
    name: str
    arguments: Arguments | None = None


def _parsed(given: str | dict[str, Any]) -> Any:
    """Return the value of a JSON text. A text that is not JSON, or not representable in UTF-8, is returned itself."""
    try:
        value = json.loads(given) if isinstance(given, str) else given
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return given
    return value


class Called(Strict):
    """A tool call from an earlier answer."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """Return the call in the form that chat templates read: the arguments are an object if they are JSON."""
        arguments = _parsed(self.function.arguments or "{}")
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


ToolChoice = Literal["none", "auto", "required"] | Tool


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    where = "an entry of messages"
    ignored = OF_EARLIER_ANSWERS
    lenient = True

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)] | None,
        one_message(f'must be text or a list of up to {MAX_PARTS} parts {{"type": "text", "text": ...}}'),
    ] = None

    tool_calls: Annotated[list[Called], Field(max_length=MOST_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: Annotated[str, Field(description="the reasoning of an earlier answer")] | None = None
    reasoning: Annotated[str, Field(description="the same as reasoning_content")] | None = None
    thinking: Annotated[str, Field(description="the same as reasoning_content")] | None = None
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message in the form that chat templates read."""
        content = self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        more: dict[str, Any] = {"tool_call_id": self.tool_call_id, "name": self.name}
        more["reasoning_content"] = self.reasoning_content or self.reasoning or self.thinking or None
        if self.tool_calls:
            more["tool_calls"] = [call.plain() for call in self.tool_calls]
        return {"role": self.role, "content": text} | {key: value for key, value in more.items() if value is not None}


_CHOICES = 'must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class Reasoning(Strict):
    where = "reasoning"
    ignored = OF_REASONING

    effort: str | None = None


class Conversation(Strict):
    """A conversation, and how the model's chat template turns it into a prompt."""

    messages: Messages
    add_generation_prompt: Annotated[bool, Field(description="begin a new answer; usually true"), READ] | None = None
    continue_final_message: Annotated[bool, Field(description="continue the last message"), READ] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(description="more variables for the template")] | None = None
    reasoning_effort: Annotated[str, Field(description="a variable for the template; none: no thinking")] | None = None
    reasoning: Annotated[Reasoning, Field(description="reasoning.effort is reasoning_effort")] | None = None
    add_special_tokens: AddSpecial | None = None

    @model_validator(mode="after")
    def _prompt_has_one_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            told = "continue_final_message and add_generation_prompt exclude each other"
            raise contradiction("continue_final_message", told)
        for name in sorted(OWN_NAMES & set(self.chat_template_kwargs or ())):
            told = f"chat_template_kwargs must not contain {name}: the server sets it"
            raise contradiction("chat_template_kwargs", told)
        return self

    @property
    def template_values(self) -> dict[str, Any]:
        """Return the variables that the request sets for the chat template."""
        values: dict[str, Any] = {}
        if effort := self.reasoning_effort or (self.reasoning and self.reasoning.effort):
            values["reasoning_effort"] = effort
            if effort == "none":
                values["enable_thinking"] = False
        if self.add_generation_prompt is not None:
            values["add_generation_prompt"] = self.add_generation_prompt
        return values | (self.chat_template_kwargs or {})


class ChatRequest(Conversation, Choices):
    where = "/v1/chat/completions"

    max_completion_tokens: NewTokens | None = None
    max_tokens: NewTokens | None = None  # the older name of max_completion_tokens
    logprobs: Flag | None = None
    top_logprobs: TopCount | None = None
    echo: Annotated[bool, Field(description="repeat the last message if the assistant wrote it"), READ] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS), CALLABLE] | None = None
    tool_choice: Annotated[ToolChoice | None, one_message(_CHOICES)] = None
    parallel_tool_calls: Flag | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise contradiction("top_logprobs", "top_logprobs requires logprobs=true")
        return self


class TokenizeText(Body):
    where = "/tokenize with a text"

    prompt: str
    add_special_tokens: AddSpecial | None = None


class TokenizeMessages(Conversation, Body):
    where = "/tokenize with messages"


def _which(given: Any) -> str:
    return "(messages)" if isinstance(given, dict) and given.get("messages") is not None else "(text)"


# The tags are in parentheses, so that errors.py can recognise them and leave them out of the path of an invalid field.
TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag("(text)")] | Annotated[TokenizeMessages, Tag("(messages)")], Discriminator(_which)
]


class DetokenizeRequest(Body):
    where = "/detokenize"

    tokens: Annotated[list[TokenId], _WHOLE_LIST]
