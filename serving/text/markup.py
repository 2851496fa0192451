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
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_MOST_DEPTH = 8  # how many references and alternatives are followed to find a value's type


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
        self._schema: Any = None  # the JSON schema of the function's parameters
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
        self._schema = self._functions.get(name) if isinstance(self._functions, Mapping) else None

    def _give(self, key: str, value: str) -> None:
        comma = ", " if len(self.arguments) > 1 else ""
        types = _types(_member(_member(self._schema, "properties"), key), self._schema)
        self.arguments.append(f"{comma}{json.dumps(key, ensure_ascii=False)}: {_json(value, types)}")

    def end(self, how: str) -> None:
        """End a call without its last tag. `how` is explained at `tool_calls._Object.end`."""
        self.done = True
        if how != "length" and self.arguments:
            if self._rest:
                self._give(*self._rest)
            self.arguments.append("}")


def _json(text: str, types: set[str]) -> str:
    """Return, as JSON, the value that a model has written for a parameter of one of `types`. What is JSON already stays
    as it is written."""
    string = json.dumps(text, ensure_ascii=False)
    if types <= {"string"}:
        return string
    written = _PYTHON.get(text.strip(), text.strip())
    try:
        kinds = _kinds(json.loads(written, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return string
    return written if "string" not in types or types & kinds else string


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _types(schema: Any, root: Any, depth: int = 0) -> set[str]:
    """Return the types that a JSON schema allows, as far as it says so. References are looked up in `root`."""
    if not isinstance(schema, Mapping) or depth == _MOST_DEPTH:
        return set()
    given = schema.get("type")
    found = {kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str)}
    values = schema.get("enum")
    values = [*(values if isinstance(values, list) else ()), *([schema["const"]] if "const" in schema else ())]
    found = found.union(*map(_kinds, values))
    found |= {"object"} if "properties" in schema else set()
    branches = [
        branch for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list) for branch in schema[key]
    ]
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        target = root
        for part in reference.split("/")[1:]:
            target = _member(target, part)
        branches.append(target)
    return found.union(*(_types(branch, root, depth + 1) for branch in branches))


def _member(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _kinds(value: Any) -> set[str]:
    """Return the names in JSON Schema of a value's type."""
    if isinstance(value, bool):
        return {"boolean"}
    kinds = {int: {"integer", "number"}, float: {"number"}, str: {"string"}, list: {"array"}, dict: {"object"}}
    return kinds.get(type(value), {"null"})
