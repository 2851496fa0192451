"""The request fields for structured outputs, with the names of OpenAI, vLLM and SGLang."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megakernel.errors import MegakernelError
from megakernel.serving.engine.sampling import MAX_BAD_CHARACTERS, MAX_BAD_WORDS, StructuredOutputsParams
from megakernel.serving.server.errors import APIError
from megakernel.serving.server.routes.strict import Strict

_MOST_CHOICES = 1024
Schema = Annotated[dict[str, Any] | str, Field(description="a JSON schema as an object or as text")]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=_MOST_CHOICES)]
Text = Annotated[str, Field(min_length=1)]
_BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_CHARACTERS)]


class JsonSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """The OpenAI API's field `response_format`, extended by llama.cpp's key `schema`.

    The answer always follows the schema, whatever `strict` says.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class StructuredOutputs(Strict):
    """vLLM's field `structured_outputs`."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class Constrained(Strict):
    """The constraints on the answer that completions and chat share.

    The fields are OpenAI's, vLLM's current and older ones, and SGLang's.
    """

    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    bad_words: Annotated[list[_BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    response_format: ResponseFormat | None = None

    def structured(self) -> StructuredOutputsParams | None:
        """Return the format that the answer must match, or None if no field sets one.

        Raises an HTTP error 400 if the format is invalid or if several fields set one.
        """
        given: dict[str, dict[str, Any]] = {
            name: {field: value} for name, field in _PLAIN.items() if (value := getattr(self, name)) is not None
        }
        if (outputs := self.structured_outputs) is not None:
            given["structured_outputs"] = {"json": outputs.json_, **outputs.model_dump(exclude={"json_"})}
        if (wanted := self.response_format) is not None and wanted.type != "text":
            given["response_format"] = {"json_object": True} if wanted.schema_ is None else {"json": wanted.schema_}
            if wanted.type == "json_schema":
                if wanted.json_schema is None:
                    raise APIError(
                        400, "response_format.json_schema is required with type json_schema", param="response_format"
                    )
                schema = wanted.json_schema.schema_
                given["response_format"] = {"json": {} if schema is None else schema}
        if len(given) > 1:
            raise APIError(400, f"{' and '.join(given)} exclude each other: give one of them", param=list(given)[1])
        for name, fields in given.items():
            try:
                return StructuredOutputsParams(**fields)
            except MegakernelError as e:
                raise APIError(400, str(e), param=name) from e
        return None


_PLAIN = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
}
