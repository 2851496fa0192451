"""Formats of tool calls: how models of several families write calls, how a prompt describes tools, and the grammar that
forces calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megakernel.errors import MegakernelError
from megakernel.model.tokenizer import Tokenizer

_MOST_CALLS = 16  # maximum number of calls in an answer, if a grammar constrains it


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls: `begin`, then JSON objects, then `end`."""

    begin: str
    end: str
    between: str  # the text that separates two calls
    arguments: str  # the JSON key for a call's arguments
    each: bool = False  # whether every call has its own `begin` and `end`; otherwise `begin` precedes a JSON list
    bare: bool = False  # whether there is no list, and no `begin` either if the answer consists of calls only
    # What precedes text for the user, if answers consist of messages, as channels.py describes. `begin` then has the
    # place of the function's name, and the arguments follow it.
    final: str = ""


FORMATS = {
    "hermes": ToolFormat("<tool_call>\n", "\n</tool_call>", "\n", "arguments", each=True),
    "llama3_json": ToolFormat("<|python_tag|>", "", "; ", "parameters", bare=True),
    "mistral": ToolFormat("[TOOL_CALLS]", "", ", ", "arguments"),
    "granite": ToolFormat("<|tool_call|>", "", ", ", "arguments"),
    "seed_oss": ToolFormat("<seed:tool_call>\n", "\n</seed:tool_call>", "\n", "arguments", each=True),
    "openai": ToolFormat(
        "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
        "",
        "\n",
        "arguments",
        final="<|channel|>final<|message|>",
    ),
}


def tool_format(name: str | None, template: str | None) -> ToolFormat:
    """Return the format called `name`; None: the one that the chat template shows, or else `hermes`."""
    if name is not None:
        if name not in FORMATS:
            raise MegakernelError(f"unknown tool call parser {name!r}: choose from {', '.join(FORMATS)}")
        return FORMATS[name]
    marks = {"<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama3_json"}
    marks |= {
        "<seed:tool_call>": "seed_oss",
        "<|tool_call|>": "granite",
        "<|start_header_id|>": "llama3_json",
        "<|channel|>": "openai",
    }
    return FORMATS[next((kind for mark, kind in marks.items() if mark in (template or "")), "hermes")]


def with_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], form: ToolFormat
) -> list[dict[str, Any]]:
    """Rewrite a conversation for a chat template without tool support: tools, calls and results become plain text."""
    listed = "\n".join(json.dumps(tool) for tool in tools)
    call = _written([{"name": "FUNCTION", form.arguments: {"PARAMETER": "VALUE"}}], form)
    told = (
        f"You can call these functions, whose parameters are given as JSON schemas:\n<tools>\n{listed}\n</tools>\n"
        f"To call one, answer with its name and its arguments:\n{call}"
    )
    first = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
    rest = list(messages)[bool(first) :]
    return [{"role": "system", "content": f"{first}\n\n{told}".strip()}, *(_told(message, form) for message in rest)]


def _told(message: dict[str, Any], form: ToolFormat) -> dict[str, Any]:
    """Return the message with its tool calls, or with the result of a tool call, written as text."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    if not calls:
        return message
    text = _written([{"name": call["name"], form.arguments: call["arguments"]} for call in calls], form)
    return {"role": message["role"], "content": f"{message['content']}\n{text}".strip()}


def _written(calls: Iterable[dict[str, Any]], form: ToolFormat) -> str:
    """Return calls as the model writes them."""
    if form.final:
        return form.between.join(form.begin.format(call["name"]) + json.dumps(call[form.arguments]) for call in calls)
    texts = [json.dumps(call) for call in calls]
    if form.each:
        return form.between.join(f"{form.begin}{text}{form.end}" for text in texts)
    text = form.between.join(texts)
    return form.begin + (text if form.bare else f"[{text}]")


def calls_grammar(
    functions: Mapping[str, Any], form: ToolFormat, tokenizer: Tokenizer, *, several: bool, answer: str | None = None
) -> str:
    """Return the grammar, in Lark's notation, of an answer that consists of a call of one of `functions`. If `several`
    is set, the answer may have more calls. If `answer` is given, a JSON schema, the answer may match it instead, or
    must if there are no functions. `functions` maps names to JSON schemas of parameters. Two keys in the schemas are
    for `grammar_worker.py`: `x-root` makes a schema the root for the references in it, and `title` is its name in
    errors."""
    rules = []
    for number, (name, parameters) in enumerate(functions.items()):
        # A function without parameters takes none.
        arguments = {"type": "object", **(parameters or {"properties": {}}), "x-root": True}
        members = {"name": {"const": name}, form.arguments: arguments}
        schema = {"type": "object", "properties": members, "required": list(members)}
        schema = (arguments if form.final else schema) | {"title": f"the tool {name}"}
        rules.append(f"f{number}: %json {json.dumps(schema)}")
    if form.final:
        heads = [_text(form.begin.format(name), tokenizer) for name in functions]
        calls = " | ".join(f"{head} f{number}" for number, head in enumerate(heads))
    else:
        begin, end = _text(form.begin, tokenizer), _text(form.end, tokenizer)
        call = f"({' | '.join(f'f{number}' for number in range(len(functions)))})"
        one = f"{begin} {call} {end}" if form.each else call
        more = f" ({json.dumps(form.between)} {one}){{0,{_MOST_CALLS - 1}}}" if several else ""
        calls = one + more if form.each or form.bare else f'{begin} "[" {one}{more} "]"'
    if answer is None:
        return "\n".join([f"start: {calls}", *rules])
    try:
        schema = {**json.loads(answer), "title": "the format of the answer"}
    except (TypeError, ValueError, RecursionError) as e:
        raise MegakernelError(f"structured outputs: the JSON schema is not a JSON object: {str(e)[:500]}") from e
    rules.append(f"answer: {_text(form.final, tokenizer)} json")
    rules.append(f"json: %json {json.dumps(schema)}")
    start = f"start: {calls} | answer" if functions else "start: answer"
    return "\n".join([start, *rules])


def _text(text: str, tokenizer: Tokenizer) -> str:
    """Return a text in Lark's notation. If marks in the text, such as <|message|>, <tool_call> or [TOOL_CALLS], are
    special tokens of the model, the result names these tokens."""
    parts = [text] if tokenizer.special_id(text) is not None else re.split(r"(<[^<>\s]+>|\[\w+\])", text)
    tokens = [(part, tokenizer.special_id(part)) for part in parts if part]
    return " ".join(json.dumps(part) if token is None else f"<[{token}]>" for part, token in tokens)
