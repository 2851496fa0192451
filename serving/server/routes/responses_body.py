"""The request body of POST /v1/responses, and its conversion into a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from megakernel.serving.engine.sampling import MAX_TOP_LOGPROBS, StructuredOutputsParams
from megakernel.serving.server.errors import APIError
from megakernel.serving.server.limits import MAX_MESSAGES, MAX_PARTS
from megakernel.serving.server.routes import fields
from megakernel.serving.server.routes.requests import INT32, WHOLE, Conversation, Message, Sampled, Text, one_message
from megakernel.serving.server.routes.strict import Strict
from megakernel.serving.server.routes.structured import JsonSchema
from megakernel.serving.server.routes.tools import (
    MOST_TOOLS,
    Arguments,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
)


class ResponsePart(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str


Content = Annotated[
    str | Annotated[list[ResponsePart], Field(max_length=MAX_PARTS)],
    one_message(f'must be text or a list of up to {MAX_PARTS} parts {{"type": "input_text", "text": ...}}'),
]


def _text(content: str | list[ResponsePart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class InputMessage(Strict):
    body = fields.ITEM

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class InputCall(Strict):
    """A function call from an earlier answer."""

    body = fields.ITEM

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Arguments


class InputResult(Strict):
    """The result of a function call."""

    body = fields.ITEM

    type: Literal["function_call_output"]
    call_id: str
    output: Content


_ITEMS = {"message": InputMessage, "function_call": InputCall, "function_call_output": InputResult}
Item = Annotated[
    Annotated[InputMessage, Tag("(message)")]
    | Annotated[InputCall, Tag("(function_call)")]
    | Annotated[InputResult, Tag("(function_call_output)")],
    Discriminator(lambda given: f"({_kind(given)})"),
]


def _kind(given: Any) -> str:
    """Return the kind of an input item. The result for an unknown kind is "message", and the validation as a message
    then fails.
    """
    kind = given.get("type") if isinstance(given, dict) else None
    return kind if isinstance(kind, str) and kind in _ITEMS else "message"


class TextFormat(JsonSchema):
    """The format of the answer's text. The answer always follows the schema, even if `strict` is false."""

    type: Literal["text", "json_object", "json_schema"]


class TextConfig(Strict):
    body = fields.TEXT

    format: TextFormat | None = None


class _OfType(Strict):
    """A base class that adds only the field `type`.

    pydantic validates the fields of a class's last base first, so a wrong `type` is reported before a missing `name`.
    """

    type: Literal["function"]


class ResponseTool(Function, _OfType):
    pass


class NamedResponseTool(NamedFunction, _OfType):
    pass


_LOGPROBS = "message.output_text.logprobs"
_CHOICES = 'must be "none", "auto", "required" or {"type": "function", "name": ...}'


class ResponsesRequest(Sampled):
    body = fields.RESPONSES

    input: Annotated[
        Annotated[Text, Tag("(text)")]
        | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES - 1), Tag("(items)")],
        Discriminator(lambda given: "(items)" if isinstance(given, list) else "(text)"),
    ]
    instructions: Annotated[str, Field(description="a system message before the conversation")] | None = None
    max_output_tokens: (
        Annotated[int, Field(ge=1, le=INT32, description="default: up to the context limit"), WHOLE] | None
    ) = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    text: TextConfig | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedResponseTool | None, one_message(_CHOICES)] = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[str, str], Field(description="returned unchanged with the answer")] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def structured(self) -> StructuredOutputsParams | None:
        """Return the format that the answer's text must match, or None. Raises a 400 if the schema is missing."""
        wanted = self.text.format if self.text else None
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if wanted.schema_ is None:
            raise APIError(400, "text.format.schema is required", param="text.format.schema")
        return StructuredOutputsParams(json=wanted.schema_)

    def chat_tools(self) -> tuple[list[Tool], ToolChoice | None]:
        """Return the tools and the tool choice in the form of /v1/chat/completions."""
        tools = [
            Tool(type="function", function=Function(**tool.model_dump(exclude={"type"}))) for tool in self.tools or ()
        ]
        choice = self.tool_choice
        if isinstance(choice, NamedResponseTool):
            return tools, NamedTool(type="function", function=NamedFunction(name=choice.name))
        return tools, choice

    def conversation(self) -> Conversation:
        """Return the input items as the conversation that a chat template reads.

        A function call is added to the assistant message that precedes it, or to a new assistant message if none
        precedes it.
        """
        said: list[dict[str, Any]] = []
        if self.instructions:
            said.append({"role": "system", "content": self.instructions})
        for item in [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            if isinstance(item, InputMessage):
                said.append({"role": item.role, "content": _text(item.content)})
            elif isinstance(item, InputResult):
                said.append({"role": "tool", "content": _text(item.output), "tool_call_id": item.call_id})
            else:
                if not said or said[-1]["role"] != "assistant" or len(said[-1].get("tool_calls", ())) == MOST_TOOLS:
                    said.append({"role": "assistant", "content": ""})
                called = {"name": item.name, "arguments": item.arguments}
                said[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": called})
        return Conversation(messages=[Message.model_validate(message) for message in said])
