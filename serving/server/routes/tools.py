"""Tool definitions in requests, the choice among them, and earlier tool calls in a conversation."""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from megakernel.serving.engine.sampling import StructuredOutputsParams
from megakernel.serving.server.errors import APIError
from megakernel.serving.server.routes.strict import Strict
from megakernel.serving.text.codec import Codec
from megakernel.serving.text.tool_calls import ToolReader, calls_grammar

MOST_TOOLS = 128  # The OpenAI API's limit.
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Strict):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


def _checked_json(text: str) -> str:
    try:
        json.loads(text or "{}")
    except (ValueError, RecursionError) as e:
        raise PydanticCustomError("json", "is not JSON: {why}", {"why": str(e)}) from e
    return text


Arguments = Annotated[str, AfterValidator(_checked_json)]  # the arguments of a call, as JSON text


class CalledFunction(Strict):
    name: str
    arguments: Arguments


class Called(Strict):
    """A tool call from an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """Return the call in the form that chat templates read: the arguments are an object, not JSON text."""
        arguments = json.loads(self.function.arguments or "{}")
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class Tools:
    """The tools of a request and the field `tool_choice`, which says which of them the model may or must call.

    The constructor raises an HTTP error 400 if the tools and the choice contradict each other.
    """

    def __init__(self, given: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> None:
        self.functions = {tool.function.name: tool.function.parameters for tool in given or ()}
        if len(self.functions) < len(given or ()):
            raise APIError(400, "tools: two functions have the same name", param="tools")
        if not given and choice not in (None, "none", "auto"):
            raise APIError(400, "tool_choice needs tools, but the request has none", param="tool_choice")
        named = choice.function.name if isinstance(choice, NamedTool) else None
        if named is not None and named not in self.functions:
            raise APIError(400, f"tool_choice names {named!r:.80}, which is none of the tools", param="tool_choice")
        self.told = [tool.model_dump(exclude_none=True) for tool in given or ()]
        self.used = bool(given) and choice != "none"
        self._required = choice == "required" or named is not None
        self._callable = self.functions if named is None else {named: self.functions[named]}
        self._several = parallel is not False and named is None

    def structured(self, asked: StructuredOutputsParams | None, codec: Codec) -> StructuredOutputsParams | None:
        """Return the format that the answer must match.

        This is a grammar of tool calls if the request requires a tool call, and otherwise `asked`, the format that the
        request's other fields set. Raises an HTTP error 400 if the request requires a tool call and also sets `asked`.
        """
        if not self._required or codec.tokenizer is None:
            return asked
        if asked:
            raise APIError(
                400, "a required tool call cannot be combined with another constraint on the answer: give one of them"
            )
        grammar = calls_grammar(self._callable, codec.tools, codec.tokenizer, several=self._several)
        return StructuredOutputsParams(grammar=grammar)

    def reader(self, codec: Codec) -> ToolReader | None:
        """Return a parser that finds the tool calls in the text of one answer, or None if no tool may be called."""
        return ToolReader(codec.tools, self._callable, None if self._several else 1) if self.used else None


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
