"""Reads calls of functions as Qwen3-Coder and Seed-OSS write them: in tags instead of JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

BEGIN = "<function="
KEY = re.compile(r"[^<>\n\/]{1,256}")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,256})>\n?")
_VALUE_END = "</parameter>"
_END = re.compile(r"\s*</function>")
_TAGS = ("<parameter=", "</function>")
_MOST_DEPTH = 8  # how many references and alternatives are followed to find a value's type


class Tags:
    """Reads the arguments of a call while they stream. They follow the tag with the function's name:

        <parameter=KEY>
        VALUE
        </parameter>
        </function>

    The JSON schema of the function's parameters says which values are numbers, objects and so on. All other values are
    strings."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._count = 0  # number of parameters read
        self._begun = False
        self._searched = 0  # characters of an unfinished parameter in which its end has been sought

    def read(self, text: str) -> tuple[int, str, bool]:
        """Read all complete tags of `text`. Returns the number of characters read, the JSON that they add to the
        arguments, and whether the arguments are complete. Text that cannot be a tag ends the arguments too."""
        at, told = 0, "" if self._begun else "{"
        self._begun = True
        while found := _PARAMETER.match(text, at):
            end = text.find(_VALUE_END, max(found.end(), at + self._searched))
            if end < 0:
                self._searched = max(0, len(text) - at - len(_VALUE_END))
                return at, told, False
            key, value = found[1].strip(), text[found.end() : end].removesuffix("\n")
            types = types_of(_member(_member(self._schema, "properties"), key), self._schema)
            told += f"{', ' if self._count else ''}{json.dumps(key, ensure_ascii=False)}: {_json(value, types)}"
            self._count, self._searched, at = self._count + 1, 0, end + len(_VALUE_END)
        if found := _END.match(text, at):
            return found.end(), told + "}", True
        rest = text[at:].lstrip()
        if rest and not any(tag.startswith(rest[: len(tag)]) for tag in _TAGS):
            return at, told + "}", True
        return at, told, False


def _json(text: str, types: set[str]) -> str:
    """Return, as JSON, the parameter value that a model wrote as `text`, if the schema allows `types`. Text that is
    JSON already, such as a number, stays as it is."""
    string = json.dumps(text, ensure_ascii=False)
    if types <= {"string"}:
        return string
    written = text.strip()
    try:
        kinds = _kinds(json.loads(written, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return string
    return written if "string" not in types or types & kinds else string


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def types_of(schema: Any, root: Any, depth: int = 0) -> set[str]:
    """Return the types that a JSON schema allows, as far as it names types. References are looked up in `root`."""
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
    return found.union(*(types_of(branch, root, depth + 1) for branch in branches))


def _member(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _kinds(value: Any) -> set[str]:
    """Return JSON Schema's names for the type of a value. An integer has two names."""
    if isinstance(value, bool):
        return {"boolean"}
    kinds = {int: {"integer", "number"}, float: {"number"}, str: {"string"}, list: {"array"}, dict: {"object"}}
    return kinds.get(type(value), {"null"})
