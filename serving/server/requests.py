"""What the bodies of requests have in common: how they are checked, and the fields that several endpoints accept. The
bodies declare the range of every field, which the OpenAPI schema shows too. Names and defaults are those of vLLM and
the OpenAI API. A field that is null counts as absent, and the text "128" as the number 128, because forms and
configuration files of clients send it. `fields.py` has the fields that the server ignores or refuses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

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
from megakernel.serving.server.fields import IGNORED, NEUTRAL, OF_STREAM_OPTIONS, REFUSED
from megakernel.serving.server.limits import MAX_PROMPTS, MAX_STOP_CHARACTERS, MAX_STOPS

INT32, _SEED = 2**31 - 1, 2**63


def one_message(text: str) -> WrapValidator:
    """Return a validator for a union type. It replaces pydantic's errors, one for each member of the union, by the
    single error message `text`."""

    def validate(value: Any, inner: Any) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("shape", text) from None

    return WrapValidator(validate)


def typed(what: str, types: Collection[str], why: Mapping[str, str] | None = None) -> BeforeValidator:
    """Return a validator that refuses an object whose type is none of `types`. The error gives the type's
    reason in `why`, or lists `types`. If `types` has "text", an object of type "refusal" is read as text."""

    def check(given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if kind == "refusal" and "text" in types:
            return {"type": "text", "text": given.get("refusal")}
        if isinstance(kind, str) and kind not in types:
            reason = (why or {}).get(kind, f"the supported types are {', '.join(types)}")
            told = f"{what} of type {kind[:40]} is not supported: {reason}"
            raise PydanticCustomError("refused", "{why}", {"why": told, "field": "type"})
        return given

    return BeforeValidator(check)


def by_type(known: Collection[str], otherwise: str) -> Discriminator:
    """Return a discriminator that selects the member of a union by an object's type. An object of no `known` type
    counts as one of the type `otherwise`, so that its validation fails."""

    def tag(given: Any) -> str:
        kind = given.get("type") if isinstance(given, dict) else None
        return f"({kind if isinstance(kind, str) and kind in known else otherwise})"

    return Discriminator(tag)


# Says whether the content is a text or a list of parts, so that errors name the part that is wrong.
TEXT_OR_PARTS = Discriminator(lambda given: "(parts)" if isinstance(given, list) else "(text)")


def contradiction(field: str, text: str) -> PydanticCustomError:
    return PydanticCustomError("contradiction", text, {"field": field})


def _no_flags(value: Any) -> Any:
    """Refuse true and false, also in a list, where a number is wanted. Pydantic would read them as 1 and 0."""
    if bool in map(type, value if isinstance(value, list) else [value]):
        raise PydanticCustomError("number", "must be a number" if isinstance(value, bool) else "must have only numbers")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool) and value not in ("true", "false"):
        raise PydanticCustomError("flag", "must be true or false")
    return value in (True, "true")


Flag = Annotated[bool, BeforeValidator(_flag)]  # pydantic alone would also take texts such as "on", and 1
NUMBER = BeforeValidator(_no_flags)  # after the Field with the bounds: otherwise, the JSON schema lacks the bounds
TopCount = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), NUMBER]
NewTokens = Annotated[int, Field(ge=1, le=INT32, description="default: up to the context limit"), NUMBER]
Kept = Annotated[int, Field(ge=-1, le=INT32, description="how many last tokens to keep; -1: as many as fit"), NUMBER]
TokenId = Annotated[int, Field(ge=0, le=INT32)]
Text = Annotated[str, Field(min_length=1)]
# `fail_fast` stops at the first invalid item, because describing many errors takes tens of milliseconds.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True), NUMBER]
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
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100), NUMBER]],
    Field(max_length=MAX_BIAS, json_schema_extra={"additionalProperties": False}),
]
AddSpecial = Annotated[Flag, Field(description="add the BOS token; default: true for text, false for messages")]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[
    StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)],
    one_message(f"must be text or a list of up to {MAX_STOPS} texts, each of 1 to {MAX_STOP_CHARACTERS} characters"),
]


def _own_names(values: dict[str, Any]) -> dict[str, Any]:
    for name in sorted(OWN_NAMES & set(values)):
        raise contradiction("chat_template_kwargs", f"chat_template_kwargs must not contain {name}: the server sets it")
    return values


TemplateValues = Annotated[
    dict[str, Any], Field(description="more variables for the template"), AfterValidator(_own_names)
]
Schema = Annotated[dict[str, Any] | str, Field(description="a JSON schema as an object or as text")]
_Texts = Annotated[list[Text], Field(min_length=1, max_length=1024)]
_BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_CHARACTERS)]


def _describe(schema: dict[str, Any], model: type[Any]) -> None:
    """State in the OpenAPI schema that fields which the class `model` does not declare may only be null."""
    if model.where and not model.lenient:
        schema["additionalProperties"] = {"type": "null"}


class Strict(BaseModel):
    """A strictly validated JSON object of a request. Subclasses declare the supported fields; `where` is the name of
    the object in error messages.

    A field that the subclass does not declare causes an error, unless its value has no effect or `ignored` names the
    field, with a reason. A `lenient` class refuses only the fields in REFUSED and ignores other unknown fields. If
    `where` is empty, every undeclared field is ignored."""

    # JSON has neither infinity nor NaN.
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, json_schema_extra=_describe)
    where: ClassVar[str] = ""
    ignored: ClassVar[Mapping[str, str]] = IGNORED
    lenient: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, given: Any) -> Any:
        if cls.where and isinstance(given, dict):
            for name, value in given.items():
                if name in cls.model_fields or name in cls.ignored or value is None:
                    continue
                if name in REFUSED or not cls.lenient:
                    _check(cls.where, name, value)
        return given


def _check(where: str, name: str, value: Any) -> None:
    """Raise an error unless `value` has no effect: NEUTRAL lists such values. 0 and False count as different values."""
    if any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL.get(name, [])):
        return
    said = name if len(name) <= 60 else f"{name[:60]}..."
    why = f"{said} is not supported: {REFUSED[name]}" if name in REFUSED else f"{said} is not a field of {where}"
    raise PydanticCustomError("refused", "{why}", {"why": why, "field": said})


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

    def form(self) -> StructuredOutputsParams | None:
        named = self.json_schema.schema_ if self.json_schema else None
        schema = named if self.type == "json_schema" else self.schema_
        return form_of(self.type, schema, "response_format.json_schema.schema")


def form_of(kind: str, schema: dict[str, Any] | None, where: str) -> StructuredOutputsParams | None:
    """Return the format that the answer must match, or None. `kind` is "text", "json_object" or "json_schema". Raises
    an HTTP error 400 if the field `where` should have a schema and has none."""
    if kind == "text":
        return None
    if kind == "json_schema" and schema is None:
        raise APIError(400, f"{where} is required with type json_schema", param=where)
    return StructuredOutputsParams(json_object=True) if schema is None else StructuredOutputsParams(json=schema)


class StructuredOutputs(Strict):
    """vLLM's field `structured_outputs`."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: _Texts | None = None
    grammar: Text | None = None
    json_object: Flag | None = None


class Body(Strict):
    model: Annotated[str, Field(description="a name that /v1/models lists; default: the first one")] | None = None


class TokenizeText(Body):
    where = "/tokenize with a text"

    prompt: str
    add_special_tokens: AddSpecial | None = None


class DetokenizeRequest(Body):
    where = "/detokenize"

    tokens: Annotated[list[TokenId], NUMBER]


class Truncated(Body):
    truncate_prompt_tokens: Kept | None = None

    @property
    def wanted(self) -> int | None:
        """The maximum number of new tokens that the request asks for, or None if it does not say."""
        names = ("max_completion_tokens", "max_tokens", "max_output_tokens")  # in this order, if there are several
        return next((most for name in names if (most := getattr(self, name, None)) is not None), None)


class Sampled(Truncated):
    """The fields that every generating endpoint accepts."""

    temperature: Annotated[float, Field(ge=0, le=2), NUMBER] | None = None
    top_p: Annotated[float, Field(gt=0, le=1), NUMBER] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32), NUMBER] | None = None
    min_p: Annotated[float, Field(ge=0, le=1), NUMBER] | None = None
    seed: Annotated[int, Field(ge=-_SEED, lt=_SEED), NUMBER] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2), NUMBER] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), NUMBER] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6), NUMBER] | None = None
    logit_bias: Bias | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS), NUMBER] | None = None
    ignore_eos: Flag | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32), NUMBER] | None = None
    include_stop_str_in_output: Flag | None = None
    skip_special_tokens: Annotated[Flag, Field(description="leave out special tokens; default: true")] | None = None
    stream: Flag | None = None

    @property
    def shown(self) -> int | None:
        """How many top log-probabilities the answer shows for each token. None: it shows no log-probabilities."""
        return None

    def form(self) -> StructuredOutputsParams | None:
        """Return the format that the answer must match, or None."""
        return None

    def sampling(
        self, defaults: Mapping[str, float], max_tokens: int, structured: StructuredOutputsParams | None = None
    ) -> SamplingParams:
        """Return the engine's sampling parameters. The model's `defaults` replace those of SamplingParams and limit
        `max_tokens`. `structured` is the format that the answer must match. Raises MegakernelError if fields
        contradict each other."""
        names = (
            "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty stop stop_token_ids"
            " ignore_eos min_tokens include_stop_str_in_output skip_special_tokens allowed_token_ids bad_words n"
        )
        given = {name: value for name in names.split() if (value := getattr(self, name, None)) is not None}
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        seed = None if self.seed is None else self.seed % 2**64
        given |= {"structured_outputs": structured, "logit_bias": bias, "seed": seed}
        given |= {"logprobs": self.shown, "prompt_logprobs": getattr(self, "scored", None)}
        given["max_tokens"] = min(max_tokens, defaults.get("max_tokens", max_tokens))
        return SamplingParams(**{**defaults, **given})


class StreamOptions(Strict):
    where = "stream_options"
    ignored = OF_STREAM_OPTIONS

    include_usage: Flag | None = None


class Choices(Sampled):
    """The fields that completions and chat accept."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), NUMBER] | None = None
    prompt_logprobs: TopCount | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: AddSpecial | None = None
    return_token_ids: Annotated[Flag, Field(description="also return `token_ids`")] | None = None
    return_tokens_as_token_ids: Annotated[Flag, Field(description="write `token_id:N` for text")] | None = None

    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1), NUMBER] | None = None
    bad_words: Annotated[list[_BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    response_format: ResponseFormat | None = None

    @property
    def scored(self) -> int | None:
        """How many top log-probabilities are needed for each token of a prompt, or None if none are."""
        return self.prompt_logprobs

    @model_validator(mode="after")
    def _choices_agree(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise contradiction("prompt_logprobs", "prompt_logprobs cannot be streamed: set stream to false")
        return self

    def form(self) -> StructuredOutputsParams | None:
        """Return the format that the answer must match, or None if no field sets one. Raises an HTTP error 400 if the
        format is invalid or if several fields set one."""
        outputs, wanted = self.structured_outputs, self.response_format.form() if self.response_format else None
        if outputs is None:
            return wanted
        if wanted is not None:
            told = "structured_outputs and response_format exclude each other: give one of them"
            raise APIError(400, told, param="response_format")
        return StructuredOutputsParams(json=outputs.json_, **outputs.model_dump(exclude={"json_"}))


def prompt_list(given: Any) -> list[str] | list[list[int]]:
    """Return the prompts of a field of type `Prompt` as a list, also if there is only one."""
    one = isinstance(given, str) or isinstance(given[0], int)
    return [given] if one else given
