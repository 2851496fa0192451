"""Tool calls in a model's text: formats of several models, their grammar, and a parser for streamed text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megakernel.errors import MegakernelError
from megakernel.model.tokenizer import Tokenizer
from megakernel.serving.engine.sampling import JSON_OPTIONS

_MOST_CALLS = 16  # maximum number of calls in an answer, if a grammar constrains it


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls: `begin`, then JSON objects, then `end`."""

    begin: str
    end: str
    between: str  # the text that separates two calls
    arguments: str  # the JSON key for a call's arguments
    each: bool = False  # whether every call has its own `begin` and `end`; otherwise all calls share one pair
    bare: bool = False  # whether the model may omit `begin` if its answer consists of calls only


FORMATS = {
    "hermes": ToolFormat("<tool_call>\n", "\n</tool_call>", "\n", "arguments", each=True),
    "llama3_json": ToolFormat("<|python_tag|>", "", "; ", "parameters", bare=True),
    "mistral": ToolFormat("[TOOL_CALLS]", "]", ", ", "arguments"),
}


def tool_format(name: str | None, template: str | None) -> ToolFormat:
    """Return the format called `name`; None: the one that the chat template shows, or else `hermes`."""
    if name is not None:
        if name not in FORMATS:
            raise MegakernelError(f"unknown tool call parser {name!r}: choose from {', '.join(FORMATS)}")
        return FORMATS[name]
    marks = {"<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama3_json"}
    marks["<|start_header_id|>"] = "llama3_json"
    return FORMATS[next((kind for mark, kind in marks.items() if mark in (template or "")), "hermes")]


def with_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], form: ToolFormat
) -> list[dict[str, Any]]:
    """Rewrite a conversation for a chat template without tool support: tools, calls and results become plain text."""
    listed = "\n".join(json.dumps(tool) for tool in tools)
    call = json.dumps({"name": "FUNCTION", form.arguments: {"PARAMETER": "VALUE"}})
    told = (
        f"You can call these functions, whose parameters are given as JSON schemas:\n<tools>\n{listed}\n</tools>\n"
        f"To call one, answer with its name and its arguments:\n{form.begin}{call}{form.end}"
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
    written = [json.dumps({"name": call["name"], form.arguments: call["arguments"]}) for call in calls]
    text = form.begin + (form.end + form.between + form.begin if form.each else form.between).join(written) + form.end
    return {"role": message["role"], "content": f"{message['content']}\n{text}".strip()}


def calls_grammar(functions: Mapping[str, Any], form: ToolFormat, tokenizer: Tokenizer, *, several: bool) -> str:
    """Return the grammar, in Lark's notation, of an answer that consists of a call of one of `functions`. If `several`
    is set, the answer may have more calls. `functions` maps names to JSON schemas of parameters. Each schema is a rule
    of its own, so that references within the schema stay valid."""
    rules = []
    for number, (name, parameters) in enumerate(functions.items()):
        head = f'{{"name": {json.dumps(name)}, {json.dumps(form.arguments)}: '
        schema = {**(parameters or {"type": "object"}), "x-guidance": JSON_OPTIONS}
        rules += [f'f{number}: {json.dumps(head)} a{number} "}}"', f"a{number}: %json {json.dumps(schema)}"]
    call = f"({' | '.join(f'f{number}' for number in range(len(functions)))})"
    begin, end = _text(form.begin, tokenizer), _text(form.end, tokenizer)
    one = f"{begin} {call} {end}" if form.each else call
    more = f" ({json.dumps(form.between)} {one}){{0,{_MOST_CALLS - 1}}}" if several else ""
    start = one + more if form.each or form.bare else f'{begin} "[" {one}{more} {end}'
    return "\n".join([f"start: {start}", *rules])


def _text(text: str, tokenizer: Tokenizer) -> str:
    """Return a text in Lark's notation. If the text is a special token of the model, the result names that token."""
    token = tokenizer.special_id(text)
    return json.dumps(text) if token is None else f"<[{token}]>"


@dataclass(slots=True)
class CallDelta:
    """A new piece of the call number `index` of an answer: first the function's name, then pieces of its arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


class ToolReader:
    """Splits a streamed answer into content and calls of the functions `names`, at most `most` calls. Text that begins
    like a call but turns out to be no call is content."""

    def __init__(self, form: ToolFormat, names: Collection[str], most: int | None = None) -> None:
        self.calls = 0
        self._form, self._names, self._most = form, names, most
        self._mark = form.begin.strip()
        self._held = ""  # text not yet read, or text that may be the start of `begin`
        self._calling = False
        self._object: _Object | None = None
        self._fresh = True  # whether only white space has arrived so far
        self._space = ""  # white space that becomes content if more content follows

    def add(self, text: str, last: bool = False) -> tuple[str, list[CallDelta]]:
        """Read more text. Returns the text that is now known to be content, and new pieces of calls. With the `last`
        text, everything that was held back is returned."""
        self._held += text
        content: list[str] = []
        deltas: list[CallDelta] = []
        while self._held:
            if self._object is not None:
                self._read(self._object, content, deltas)
            elif self._calling:
                if not self._between(last):
                    break
            elif not self._outside(content, last):
                break
        if last and self._object is not None:
            self._give_up(self._object, content)
        return "".join(content), deltas

    def _outside(self, content: list[str], last: bool) -> bool:
        """Read content up to the next `begin`. Returns whether more of the held text can be read now."""
        text = self._held
        if self._form.bare and self._fresh and text.lstrip().startswith("{"):
            self._held, self._calling = text.lstrip(), True
            return True
        at = text.find(self._mark)
        if at >= 0:
            self._give(text[:at], content)
            self._held, self._calling = text[at + len(self._mark) :], True
            return True
        kept = 0 if last else _beginning(text, self._mark)
        if self._form.bare and self._fresh and not last and not text.strip():
            kept = len(text)
        self._held = text[len(text) - kept :]
        self._give(text[: len(text) - kept], content)
        return False

    def _give(self, text: str, content: list[str]) -> None:
        """Emit content, but hold back trailing white space, because white space around calls is not content."""
        text = self._space + text
        self._space = "" if text.strip() else text
        if not self._space and text:
            content.append(text)
            self._fresh = False

    def _between(self, last: bool) -> bool:
        """Read the text between calls. Returns whether more of the held text can be read now."""
        end = self._form.end.strip()
        text = self._held.lstrip(" \n\r\t,;[")
        if text.startswith("{"):
            self._held, self._object = text, _Object((self._form.arguments, "arguments", "parameters"))
            return True
        if end and end.startswith(text[: len(end)]) and len(text) < len(end) and not last:
            self._held = text
            return False
        self._held = text.removeprefix(end)
        self._calling = not text
        return bool(self._held)

    def _read(self, found: _Object, content: list[str], deltas: list[CallDelta]) -> None:
        self._held = self._held[found.add(self._held) :]
        more = self._most is None or self.calls < self._most
        arguments = found.arguments
        if arguments is not None and (found.begun or (more and found.name in self._names)):
            if not found.begun:
                found.begun, self.calls, self._fresh, self._space = True, self.calls + 1, False, ""
                deltas.append(CallDelta(self.calls - 1, found.name))
            if len(arguments) > found.told:
                deltas.append(CallDelta(self.calls - 1, None, arguments[found.told :]))
                found.told = len(arguments)
        if found.done:
            if not found.begun and more:
                self._give_up(found, content)
            self._object = None

    def _give_up(self, found: _Object, content: list[str]) -> None:
        if not found.begun:
            self._give(found.text, content)
        self._object = None


# Text up to a token of JSON that matters here: a whole string, bracket, comma, or colon with white space after it.
_TOKEN = re.compile(r'[^][{}:,"]*("[^"\\]*(?:\\.[^"\\]*)*"|[][{},]|:\s*(?=\S))', re.DOTALL)


@dataclass(slots=True)
class _Object:
    """A JSON object that may describe a call, read while it streams. A JSON parser would not do: the arguments are
    passed on as they are written, and models write line breaks into strings, which JSON forbids."""

    keys: tuple[str, ...]  # names of the member that has the arguments
    text: str = ""
    begun: bool = False  # whether the reader has returned the function's name
    told: int = 0  # number of characters of the arguments that the reader has returned
    done: bool = False
    _read: int = 0  # length of the text that has been read
    _depth: int = 0  # number of open brackets
    _last: str = ""  # the last string of the object itself
    _values: dict[str, slice] = field(default_factory=dict)  # where the members' values are in `text`; no stop: open

    def add(self, text: str) -> int:
        """Read `text` up to the object's end. Returns how many characters of `text` were used."""
        before = len(self.text)
        self.text += text
        while not self.done and (found := _TOKEN.match(self.text, self._read)):
            token, at, self._read = found[1], found.start(1), found.end()
            if self._depth == 1:
                if token[0] == ":":
                    self._values[_string(self._last)] = slice(self._read, None)
                elif token in (",", "}"):
                    self._values = {key: slice(v.start, v.stop or at) for key, v in self._values.items()}
                elif token[0] == '"':
                    self._last = token
            self._depth += (token in ("{", "[")) - (token in ("}", "]"))
            self.done = self._depth == 0
        if self.done:
            self.text = self.text[: self._read]
        return len(self.text) - before

    @property
    def name(self) -> str | None:
        """The function's name, as soon as all of it has arrived."""
        value = self._values.get("name", slice(None))
        return _string(self.text[value].strip()) if value.stop else None

    @property
    def arguments(self) -> str | None:
        """The arguments as far as they have arrived. None: they have not begun."""
        return next((self.text[self._values[key]] for key in self.keys if key in self._values), None)


def _string(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        return ""


def _beginning(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
