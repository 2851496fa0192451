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
from megakernel.serving.text import markup

_MOST_CALLS = 16  # maximum number of calls in an answer, if a grammar constrains it
_MOST_BITS = 60  # maximum number of parameters whose order is free and which cannot be repeated
# Keys of a schema with which it may allow parameters that its `properties` do not list.
_MORE = frozenset(["$ref", "allOf", "anyOf", "oneOf", "patternProperties"])
_KIND, _NAME = '"type": "function", ', '"name": '


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls: `begin`, then JSON objects, then `end`."""

    begin: str
    end: str
    between: str  # the text that separates two calls
    arguments: str  # the JSON key for a call's arguments
    # Whether every call has its own `begin` and `end`, and may also be written in tags (see `markup.py`). Otherwise,
    # `begin` precedes a JSON list of calls.
    each: bool = False
    bare: bool = False  # whether there is no list, and no `begin` either if the answer consists of calls only
    # The header before text for the user, if answers consist of messages (see channels.py), otherwise empty. With such
    # messages, the function's name is inserted into `begin`, and the arguments follow.
    final: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts with which calls begin."""
        return (self.begin.strip(), markup.BEGIN) if self.each else (self.begin,)

    @property
    def trigger(self) -> str:
        """A regular expression that finds where a model begins calls in free text. If it has a group, the group's text
        is part of the calls already: the grammar `CallsGrammar.begun` must accept it too."""
        if self.final:
            return r"<\|(?:start|channel)\|>[^<]{0,64}?to=functions\."
        mark = re.escape(self.begin.strip())
        if self.each:
            return f"{mark}|({markup.BEGIN})"
        return rf'{mark}|\A\s*(\{{(?:"type": "function", )?"name")' if self.bare else mark


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
    marks = {form.begin.strip(): kind for kind, form in FORMATS.items()}
    marks |= {"<|start_header_id|>": "llama3_json", "<|channel|>": "openai"}
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
    if form.final:
        return form.between.join(form.begin.format(call["name"]) + json.dumps(call[form.arguments]) for call in calls)
    texts = [json.dumps(call) for call in calls]
    if form.each:
        return form.between.join(f"{form.begin}{text}{form.end}" for text in texts)
    text = form.between.join(texts)
    return form.begin + (text if form.bare else f"[{text}]")


class CallsGrammar:
    """Makes grammars for calls, in Lark's notation. `functions` maps names to the JSON schemas of parameters. Errors
    show a schema's `title`, so each schema gets one that names the tool. An answer may have one call, or `several`."""

    def __init__(self, functions: Mapping[str, Any], form: ToolFormat, tokenizer: Tokenizer, *, several: bool) -> None:
        self._form, self._tokenizer, self._several = form, tokenizer, several
        # A function without a schema takes no parameters.
        self._functions = {
            name: {"type": "object", **(parameters or {"properties": {}}), "title": f"the tool {name}"}
            for name, parameters in functions.items()
        }
        self._rules = [f"f{at}: %json {json.dumps(schema)}" for at, schema in enumerate(self._functions.values())]

    def whole(self, answer: str | None = None) -> str:
        """Return the grammar of an answer that consists of calls. If the JSON schema `answer` is given, an answer may
        match it instead of calling. Without functions, an answer must match this schema."""
        form = self._form
        if form.final:
            calls = " | ".join(
                f"{self._text(form.begin.format(name))} f{at}" for at, name in enumerate(self._functions)
            )
        elif form.each:
            one = f"{self._text(form.begin)} {self._json()} {self._text(form.end)}"
            calls = one + self._more(one)
        else:
            calls = self._list() if form.bare else f"{self._text(form.begin)} {self._list()}"
        if answer is None:
            return "\n".join([f"start: {calls}", *self._rules])
        try:
            schema = {**json.loads(answer), "title": "the format of the answer"}
        except (TypeError, ValueError, RecursionError) as e:
            raise MegakernelError(f"structured outputs: the JSON schema is not a JSON object: {str(e)[:500]}") from e
        rules = [*self._rules, f"answer: {self._text(form.final)} json", f"json: %json {json.dumps(schema)}"]
        return "\n".join([f"start: {calls} | answer" if self._functions else "start: answer", *rules])

    def begun(self) -> str:
        """Return the grammar of what follows `ToolFormat.trigger`, up to where the model may write text again."""
        form, rules = self._form, [*self._rules, r"space: /[ \r\n\t]{0,4}/"]
        if form.final:
            channel, constrain, message = map(self._text, ("<|channel|>commentary", "<|constrain|>", "<|message|>"))
            names = " | ".join(f"{json.dumps(name)} head f{at}" for at, name in enumerate(self._functions))
            rules.append(f'head: " "? ({channel})? " "? ({constrain})? "json"? {message}')
            return "\n".join([f"start: {names}", *rules])
        if form.each:
            tags = [self._tags(at, name, schema) for at, (name, schema) in enumerate(self._functions.items())]
            start = f"({' | '.join([self._json(), *(f't{at}' for at in range(len(tags)))])}) {self._text(form.end)}"
            rules += [r"value[lazy]: /(?s:.*)<\/parameter>/", *(rule for each in tags for rule in each)]
            return "\n".join([f"start: space {start}", *rules])
        start = self._list()
        if not form.bare:  # newer Mistral models write the name before the arguments
            args = self._text("[ARGS]")
            start += "".join(f" | {json.dumps(name)} ({args})? f{at}" for at, name in enumerate(self._functions))
        return "\n".join([f"start: space ({start})", *rules])

    def _json(self) -> str:
        """Return the rule for a call that is written as a JSON object."""
        heads = [f'{json.dumps(name)}, "{self._form.arguments}": ' for name in self._functions]
        calls = " | ".join(f"{json.dumps(head)} f{at}" for at, head in enumerate(heads))
        kind = f"({json.dumps(_KIND)})? " if self._form.bare else ""
        return f'"{{" {kind}{json.dumps(_NAME)} ({calls}) "}}"'

    def _list(self) -> str:
        """Return the rule for all calls of an answer, in a format without marks around each call."""
        calls = self._json() + self._more(self._json())
        return calls if self._form.bare else f'"[" {calls} "]"'

    def _more(self, call: str) -> str:
        return f" ({json.dumps(self._form.between)} {call}){{0,{_MOST_CALLS - 1}}}" if self._several else ""

    def _tags(self, at: int, name: str, schema: dict[str, Any]) -> list[str]:
        """Return the rules for a call of one function, written in tags. Parameters may come in any order, but each at
        most once. If the schema does not list all parameters, any are allowed."""
        properties = schema.get("properties")
        begin, end = json.dumps(f"<function={name}>\n"), '"</function>"'
        if (
            not isinstance(properties, dict)
            or len(properties) > _MOST_BITS
            or schema.get("additionalProperties", False) is not False
            or not _MORE.isdisjoint(schema)
            or not all(markup.KEY.fullmatch(key) for key in properties)
        ):
            key = rf"/<parameter={markup.KEY.pattern}>\n/"
            return [f't{at}: {begin} (key{at} value "\\n")* {end}', f"key{at}: {key}"]
        if not properties:
            return [f"t{at}: {begin} {end}"]
        required, needed = schema.get("required"), "true"
        first, others, values = f"p{at}::_", list[str](), list[str]()
        for bit, (key, one) in enumerate(properties.items()):
            if isinstance(required, list) and key in required:
                needed = f"and({needed}, bit_set({bit}))"
            tag, number = json.dumps(f"<parameter={key}>\n"), f"{at}_{bit}"
            others.append(f'  | {tag} v{number} "\\n" p{at}::set_bit({bit}) %if bit_clear({bit})')
            types = markup.types_of(one, schema)
            if types and "string" not in types:
                parts = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
                value = {**parts, **one, "title": schema["title"]}
                values += [f'v{number}: j{number} "\\n</parameter>"', f"j{number}: %json {json.dumps(value)}"]
            elif types == {"string"} and isinstance(one.get("enum"), list):
                texts = " | ".join(json.dumps(text) for text in one["enum"])
                values.append(f'v{number}: ({texts}) "\\n</parameter>"')
            else:
                values.append(f"v{number}: value")
        return [f"t{at}: {begin} p{at}::0 {end}", f'{first}: "" %if {needed}', *others, *values]

    def _text(self, text: str) -> str:
        """Return a text in Lark's notation. If marks in the text, such as <|message|>, <tool_call> or [TOOL_CALLS], are
        special tokens of the model, the result names these tokens."""
        special = self._tokenizer.special_id
        parts = [text] if special(text) is not None else re.split(r"(<[^<>\s]+>|\[\w+\])", text)
        tokens = [(part, special(part)) for part in parts if part]
        return " ".join(json.dumps(part) if token is None else f"<[{token}]>" for part, token in tokens)
