"""A process that compiles untrusted grammars, because a hostile grammar may take unlimited time or memory.

The process reads lines of JSON from standard input. The first line is the vocabulary. Each further line is a pair of a
notation and a text. The notation is "json" for a JSON schema, "regex" for a regular expression, "choice" for a JSON
list of texts, and "grammar" for a grammar in Lark's notation or GBNF. It is "calls" for a grammar, in Lark's notation,
of the tool calls that a model may make. In such a grammar, looser JSON schemas replace schemas that do not compile,
because tools may have any schema.

The process answers each line with one line of JSON: {"text": a JSON list} or {"failed": the reason}. The list has the
grammar in the notation of the library llguidance, the JSON Schema keywords that the grammar does not enforce, and the
compiled grammar's size in bytes. The operating system ends the process if it exceeds its limits on CPU time or memory.

This file imports nothing from the package, so that the process starts quickly."""

from __future__ import annotations

import base64
import ctypes
import json
import re
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)  # a rule of GBNF; Lark has ":" for "::="
_JSON_RULE = re.compile(r"^(\w+: %json )(\{.*\})$", re.MULTILINE)
# Generated JSON has the white space that Python's json module writes, because models know this form, and because fixed
# white space need not be sampled. With `lenient`, the library warns of schema keywords that it does not enforce.
_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OPTIONS |= {"lenient": True, "coerce_one_of": True}
_WARNING = re.compile(r"Unimplemented keys: (\[.*\])|Unknown (format)|(oneOf)")

# A fifth to a half of the library's own limits. A mask then takes at most about 10 ms, and a lexer at most 40 MB.
LIMITS = LLParserLimits(step_max_items=10_000, step_lexer_fuel=100_000, max_lexer_states=20_000)


class Vocabulary:
    """The vocabulary of a model, with the attributes that the grammar library requires from a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos: int | None) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos
        self._ids = {token: number for number, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        """Split a text into single bytes. Compiling a grammar needs no better tokenization."""
        data = text if isinstance(text, bytes) else text.encode()
        return [self._ids[byte] for byte in (data[i : i + 1] for i in range(len(data))) if byte in self._ids]


# -- JSON schemas

# Regular expressions for values of `format` that pydantic writes and the library does not know: versions of UUIDs.
_FORMAT_PATTERNS = {
    f"uuid{version}": f"^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"
    for version in range(1, 9)
}
# The library computes with doubles, which are exact for integers up to 2**53. It refuses bounds far below 1e-15.
_MOST_EXACT, _LEAST_BOUND = 2**53, 1e-15
_BOUNDS = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
# The library refuses sizes of _MOST_SIZE and more, which no answer reaches.
_SIZES = frozenset(["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"])
_MOST_SIZE = 2**31
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")  # keywords whose schemas apply to the same JSON value
_NESTED = frozenset(["items", "prefixItems", "additionalItems", "additionalProperties"])
_NAMED = frozenset(["properties", "patternProperties", "$defs", "definitions"])
# Keywords that the library does not implement, each with a value that forbids nothing.
_ALLOWS_ALL = {"uniqueItems": False, "not": False, "unevaluatedItems": True, "unevaluatedProperties": True}
_PARTS = "x-parts"  # key in the root schema for the list of rewritten schemas to which references point

# _LOOKAROUND matches a lookaround without nested groups. It also matches escapes and character classes, so that no
# lookaround is found inside them; `_pattern` keeps escapes and classes.
_ITEM = r"[^()\\\[]|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]"
_LOOKAROUND = re.compile(rf"(\\.)|(\[\^?\]?(?:\\.|[^\]\\])*\])|\(\?<?[=!](?:{_ITEM}|\((?:{_ITEM})*\))*\)", re.DOTALL)
# Syntax that the grammar library cannot express: word boundaries, back references, nested lookarounds, atomic groups.
# It does not enforce a class such as [\x00- ] either, but it does enforce negated ones (see `_pattern`).
_BEYOND = re.compile(r"\\[bBc0-9kZ]|(?<!\\)\(\?(?:<?[=!]|[>(]|P=)|\[(?!\^)[^]]*(?:\\x00|\\u0000|\x00)-")


class _Schema:
    """Rewrites a JSON schema for the grammar library.

    Models invent properties where they may. So the rewritten schema permits only the properties that the schema names,
    unless it has `additionalProperties`. If schemas are combined, for example by `allOf`, all their properties are
    permitted. `left` collects the keywords that the grammar does not, or not fully, enforce, such as unknown
    formats."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.left: set[str] = set()
        self._parts: list[Any] = []
        self._open: dict[str, str] = {}  # reference to a combined schema -> reference to its rewritten form

    def text(self) -> str:
        """Return the schema in the form that the library reads, as JSON."""
        rewritten = self._rewritten(self.root)
        parts = {_PARTS: self._parts} if self._parts else {}
        return json.dumps({**rewritten, **parts, "x-guidance": _OPTIONS}, allow_nan=False)

    def _rewritten(self, schema: Any, combined: bool = False) -> Any:
        """Return a schema in its rewritten form. With `combined`, other schemas apply to the same value too, for
        example through `allOf`. The rewritten schema then still permits properties that it does not name, because the
        combination as a whole forbids them."""
        if not isinstance(schema, dict):
            return schema
        schema = _given(schema)
        combining = [key for key in _COMBINING if key in schema]
        named = not schema.keys().isdisjoint(("properties", "patternProperties", "required"))
        combines = bool(combining) and (named or len(combining) > 1 or "allOf" in combining)
        out: dict[str, Any] = {}
        for key, value in schema.items():
            if key == "$ref":
                out[key] = self._reference(value, combined or combines)
            elif key in _COMBINING and isinstance(value, list):
                # The schemas exclude each other because of the discriminator, so `oneOf` can become `anyOf`.
                key = "anyOf" if key == "oneOf" and "discriminator" in schema and "anyOf" not in schema else key
                out[key] = [self._rewritten(one, combined or combines) for one in value]
            elif key in _NESTED:
                several = isinstance(value, list)
                out[key] = [self._rewritten(one) for one in value] if several else self._rewritten(value)
            elif key in _NAMED and isinstance(value, dict):
                out[key] = {name: self._rewritten(one) for name, one in value.items()}
            elif key == "pattern" and isinstance(value, str):
                if pattern := self._pattern(value):
                    out[key] = pattern
            elif key in ("enum", "const") and not _exact(value):
                self.left.add(key)
                if all(type(one) is int for one in (value if key == "enum" else [value])):
                    out["type"] = schema.get("type", "integer")
            elif _refused(key, value):
                self.left.add(key)
            elif key == "format" and value in _FORMAT_PATTERNS and "pattern" not in schema:
                out["pattern"] = _FORMAT_PATTERNS[value]
            elif key != "propertyNames" and not (key in _ALLOWS_ALL and value is _ALLOWS_ALL[key]):
                out[key] = value
        if "propertyNames" in schema:
            self._limit_names(schema["propertyNames"], out)
        if not combined and (named or combines):
            self._close(schema, out, combines)
        if not out.get("properties", {}).keys() <= set(out.get("required", ())):
            # The library enforces the number of properties only if all named properties are required.
            self.left |= {key for key in ("minProperties", "maxProperties") if out.pop(key, None) is not None}
        return out

    def _close(self, schema: dict[str, Any], out: dict[str, Any], combines: bool) -> None:
        every = list(self._combined(schema, set()))
        opened = "additionalProperties" in out or any("additionalProperties" in one for one in every)
        if opened or all("properties" not in one and "patternProperties" not in one for one in every):
            return
        names = {name: True for one in every for key in ("properties", "required") for name in one.get(key, ())}
        patterns = {pattern: True for one in every for pattern in one.get("patternProperties", ())}
        if combines:
            closing = {"properties": names, "patternProperties": patterns, "additionalProperties": False}
            out["allOf"] = [*out.get("allOf", ()), closing]
        else:
            out["properties"] = names | out.get("properties", {})
            out["additionalProperties"] = False

    def _combined(self, schema: Any, seen: set[str]) -> Iterator[dict[str, Any]]:
        """Yield the schema, and all schemas for the same JSON value, found through $ref, allOf, anyOf and oneOf."""
        if not isinstance(schema, dict):
            return
        yield (schema := _given(schema))
        for key in _COMBINING[1:]:
            for one in schema.get(key, ()):
                yield from self._combined(one, seen)
        if (reference := schema.get("$ref")) not in seen and isinstance(reference, str):
            seen.add(reference)
            yield from self._combined(self._target(reference), seen)

    def _reference(self, reference: Any, combined: bool) -> Any:
        """Return a reference to the rewritten form of the schema to which `reference` points. With `combined`, this
        form permits properties that the schema does not name. Other references to the same schema must forbid them, so
        a schema may be stored in both forms."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return reference
        if not combined or self._target(reference) is None:
            return reference
        if reference not in self._open:
            self._parts.append(True)
            self._open[reference], at = f"#/{_PARTS}/{len(self._parts) - 1}", len(self._parts) - 1
            self._parts[at] = self._rewritten(self._target(reference), True)
        return self._open[reference]

    def _target(self, reference: str) -> Any:
        """Return the schema that a reference points to, or None."""
        found: Any = self.root
        for part in filter(None, reference.removeprefix("#").split("/")):
            step = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and step.isdigit() and int(step) < len(found):
                found = found[int(step)]
            else:
                found = found.get(step) if isinstance(found, dict) else None
        return found

    def _limit_names(self, names: Any, out: dict[str, Any]) -> None:
        """Replace the keyword `propertyNames`, which the library does not support, by permitted names or a pattern."""
        if isinstance(names, dict) and isinstance(names.get("$ref"), str):
            names = self._target(names["$ref"])
        value, given = out.get("additionalProperties", True), names if isinstance(names, dict) else {}
        free = "properties" not in out and "patternProperties" not in out
        listed = given.get("enum", [given["const"]] if "const" in given else None)
        if free and isinstance(listed, list):
            out["properties"] = {name: value for name in listed if isinstance(name, str)}
        elif free and isinstance(given.get("pattern"), str):
            out["patternProperties"] = {self._pattern(given["pattern"]): value}
        elif given.keys() - {"type", "title", "description"}:
            self.left.add("propertyNames")
            return
        else:
            return
        out["additionalProperties"] = False

    def _pattern(self, pattern: str) -> str:
        """Return `pattern` without lookarounds, or an empty text if the library cannot express even the rest."""
        plain = _LOOKAROUND.sub(lambda found: found[1] or found[2] or "", pattern)
        beyond = _BEYOND.search(re.sub(r"\\\\", "", plain))
        self.left |= {"pattern"} if beyond or plain != pattern else set()
        # If a negated class matches all control characters, the library permits escaped quotes too. So exclude NUL.
        classes = _LOOKAROUND.sub(lambda m: m[1] or re.sub(r"(?s)\A\[\^.*", r"[\g<0>&&[^\\x00]]", m[2] or ""), plain)
        return "" if beyond else classes


def _refused(key: str, value: Any) -> bool:
    """Return whether the library refuses or rounds `value`, a bound or size that the schema keyword `key` sets."""
    if key in _SIZES:
        return type(value) in (int, float) and value >= _MOST_SIZE
    return key in _BOUNDS and not (_exact(value) and (value == 0 or abs(value) >= _LEAST_BOUND))


def _exact(value: Any) -> bool:
    """Return whether all numbers in a JSON value are within _MOST_EXACT, up to which doubles hold all integers. NaN
    and infinity, which JSON lacks, are left to the check of the whole schema."""
    if isinstance(value, (list, dict)):
        return all(map(_exact, value.values() if isinstance(value, dict) else value))
    number = isinstance(value, (int, float)) and value - value == 0
    return not number or abs(value) <= _MOST_EXACT


def _given(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without keywords that are null, which some programs write for absent ones. Properties that say
    `required: true`, as in the third draft of JSON Schema, are listed in the `required` of the schema around them."""
    given = {key: value for key, value in schema.items() if value is not None or key in ("const", "default")}
    if isinstance(given.get("required"), bool):
        del given["required"]
    properties = given.get("properties")
    each = properties.items() if isinstance(properties, dict) else ()
    wanted = [name for name, one in each if isinstance(one, dict) and one.get("required") is True]
    return {**given, "required": [*dict.fromkeys((*given.get("required", ()), *wanted))]} if wanted else given


# -- compilation


def _compile(tokenizer: LLTokenizer, notation: str, text: str, left: set[str] | None = None) -> dict[str, str]:
    schemas: list[tuple[_Schema, str]] = []
    release_memory()
    before = _resident()
    try:
        grammar = _read(notation, text, schemas)
    except RecursionError:
        return {"failed": "it is nested too deeply"}
    except ValueError as e:
        return {"failed": str(e)}
    matcher = matcher_of(tokenizer, grammar)
    if matcher.is_error():
        wrong: set[str] = set()
        for schema, written in schemas if notation in ("grammar", "calls") else ():
            alone = matcher_of(tokenizer, LLMatcher.grammar_from_json_schema(written))
            if alone.is_error() and notation == "grammar":
                return {"failed": f"{schema.root.get('title', '%json')}: {alone.get_error()}"}
            wrong |= {json.dumps(schema.root)} if alone.is_error() else set()
        if wrong:
            return _compile(tokenizer, notation, loosened(text, wrong), {"tools"})
        return {"failed": matcher.get_error()}
    left = (left or set()).union(*(schema.left for schema, _ in schemas))
    for warning in matcher.get_grammar_warnings():  # an unknown warning is listed itself
        found = _WARNING.match(warning)
        left |= {*filter(None, found.groups()[1:]), *json.loads(found[1] or "[]")} if found else {warning[:80]}
    return {"text": json.dumps([grammar, sorted(left), max(_resident() - before, len(grammar))])}


def matcher_of(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar. The library does some work only once, for the first mask. So the function computes a mask, and
    no step has to wait for this work."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def _read(notation: str, text: str, schemas: list[tuple[_Schema, str]]) -> str:
    """Return a grammar in the library's notation. Each JSON schema in the grammar is rewritten, and appended to
    `schemas` together with its new text."""

    def rewritten(schema: Any) -> str:
        if not isinstance(schema, dict):
            raise ValueError(f"a JSON schema must be an object, not {schema!r:.80}")
        found = _Schema(schema)
        try:
            written = found.text()
        except (TypeError, AttributeError):  # the schema is malformed, and the library gives a better reason
            written = json.dumps({**schema, "x-guidance": _OPTIONS})
        schemas.append((found, written))
        return written

    if notation == "json":
        return str(LLMatcher.grammar_from_json_schema(rewritten(json.loads(text))))
    if notation == "regex":
        return str(LLMatcher.grammar_from_regex(regex_to_lark(text, "dws")))
    if notation == "choice":
        choices = json.loads(text)
        "".join(choices).encode()  # raises a ValueError for a lone surrogate, half of a character
        return str(LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices))))
    if _GBNF_RULE.search(text):
        try:
            text = gbnf_to_lark(text)
        except Exception as e:  # the library raises only this general type
            raise ValueError(f"the grammar is not valid GBNF: {e}") from e
    text = _JSON_RULE.sub(lambda found: found[1] + rewritten(json.loads(found[2])), text)
    return str(LLMatcher.grammar_from_lark(text))


def loosened(text: str, schemas: set[str] | None = None) -> str:
    """Return a grammar of tool calls in which looser JSON schemas replace `schemas` (None: all). The looser schemas
    allow any object as a function's arguments, and any JSON value as a parameter."""

    def loose(found: re.Match[str]) -> str:
        if schemas is not None and json.dumps(json.loads(found[2])) not in schemas:
            return found[0]
        return found[1] + ('{"type": "object"}' if found[1].startswith("f") else "{}")

    return _JSON_RULE.sub(loose, text)


def release_memory() -> None:
    """Return freed memory to the operating system, where the C library can."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _resident() -> int:
    """Return the bytes of memory that this process takes now, or 0 if the operating system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def main(cpu_seconds: float, memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Ignore Ctrl-C, because the parent process handles it. When the parent exits, standard input ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines = iter(sys.stdin.readline, "")
    given = json.loads(next(lines))
    vocabulary = Vocabulary([base64.b64decode(token) for token in given["tokens"]], given["special"], given["eos"][0])
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=given["eos"])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    print(json.dumps({"text": ""}), flush=True)
    for line in lines:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        answer = json.dumps(_compile(tokenizer, *json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
