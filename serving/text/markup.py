"""Reads calls of functions as Qwen3-Coder and Seed-OSS write them: in tags instead of JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

BEGIN = "<function="
_HEAD = re.compile(r"<function=([a-zA-Z0-9_.-]{1,64})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,256})>\n?")
# Models leave out the end of a value, so the next tag ends it too.
_VALUE_END = re.compile(r"\n?(?:</parameter>|(?=<parameter=|</function>|</(?:seed:)?tool_call>))")
_LONGEST_END = len("\n</parameter>")
_END = re.compile(r"\s*</function>")
_TAGS = ("<parameter=", "</function>")
_MOST_HEAD = 100  # maximum characters up to the end of the function's name
_PYTHON = {"True": True, "False": False, "None": None}


class MarkupCall:
    """A call of one of `functions` that is read while it streams, with the interface of `tool_calls._Object`:

        <function=NAME>
        <parameter=KEY>
        VALUE
        </parameter>
        </function>

    If `functions` maps names to JSON schemas of parameters, these say which values are numbers, objects and so on. All
    other values are strings."""

    bare = False

    def __init__(self, functions: Collection[str]) -> None:
        self.name, self.text = "", list[str]()
        self.arguments: list[str] = []
        self.told, self.begun, self.done, self.closed = 0, False, False, False
        self._functions = functions
        self._properties: Mapping[str, Any] = {}
        self._searched = 0  # characters of an unfinished parameter in which its end has been sought
        self._rest: tuple[str, str] | None = None  # a parameter whose value has no end, at the end of the answer

    @property
    def is_call(self) -> bool:
        return self.name in self._functions and bool(self.arguments)

    def add(self, text: str, last: bool) -> int:
        """Read `text` as far as it is known what it means. Returns the number of characters read."""
        at = 0
        while not self.done and (end := self._next(text, at, last)) > at:
            self.text.append(text[at:end])
            at = end
        return at

    def _next(self, text: str, at: int, last: bool) -> int:
        """Read one tag at position `at`. Returns where it ends, or `at` if more text is needed."""
        if not self.arguments:
            if found := _HEAD.match(text, at):
                self._begin(found[1])
                return found.end()
            self.done = last or len(text) - at > _MOST_HEAD
            return len(text) if self.done else at
        if found := _PARAMETER.match(text, at):
            key, begin = found[1].strip(), found.end()
            if end := _VALUE_END.search(text, max(begin, at + self._searched)):
                self._searched = 0
                self._give(key, text[begin : end.start()])
                return end.end()
            self._searched = len(text) - at - _LONGEST_END
            self._rest = (key, text[begin:]) if last else None
            return len(text) if last else at
        if found := _END.match(text, at):
            self.done = self.closed = True
            self.arguments.append("}")
            return found.end()
        rest = text[at:].lstrip()
        if rest and not any(tag.startswith(rest[: len(tag)]) for tag in _TAGS):
            self.end("broken")
            return at
        return len(text) if last else at  # at the end of the answer, what is left is a tag that was cut off

    def _begin(self, name: str) -> None:
        self.name = name
        self.arguments.append("{")
        schema = self._functions.get(name) if isinstance(self._functions, Mapping) else None
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._properties = properties if isinstance(properties, Mapping) else {}

    def _give(self, key: str, value: str) -> None:
        comma = ", " if len(self.arguments) > 1 else ""
        content = json.dumps(_value(value, self._properties.get(key)), ensure_ascii=False)
        self.arguments.append(f"{comma}{json.dumps(key, ensure_ascii=False)}: {content}")

    def end(self, how: str) -> None:
        """End a call without its last tag. `how` is explained at `tool_calls._Object.end`."""
        self.done = True
        if how != "length" and self.arguments:
            if self._rest:
                self._give(*self._rest)
            self.arguments.append("}")


def _value(text: str, schema: Any) -> Any:
    """Return the value that a model has written for a parameter with this JSON schema."""
    types = _types(schema)
    if types <= {"string"}:
        return text
    try:
        value = _PYTHON[text] if text in _PYTHON else json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if "string" not in types or types & _kinds(value) else text


def _types(schema: Any) -> set[str]:
    """Return the types that a JSON schema allows, as far as it says so with `type`, `anyOf` and `oneOf`."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    found = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else set()
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        found = found.union(*map(_types, branches)) if isinstance(branches, list) else found
    return found


def _kinds(value: Any) -> set[str]:
    """Return the names in JSON Schema of a value's type."""
    if isinstance(value, bool):
        return {"boolean"}
    kinds = {int: {"integer", "number"}, float: {"number"}, str: {"string"}, list: {"array"}, dict: {"object"}}
    return kinds.get(type(value), {"null"})
