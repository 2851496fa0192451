"""Tests how JSON schemas are rewritten for the grammar library: what matches, and which keywords are not enforced."""

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import uuid
from typing import Annotated, Any, Literal

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from pydantic import BaseModel, Discriminator, Field, Json, SecretStr, Tag, TypeAdapter, networks, types

from megakernel.serving.engine.grammar_worker import _BEYOND, Vocabulary, _compile

TOKENS = [bytes([byte]) for byte in range(256)]
TOKENIZER = LLTokenizer(TokenizerWrapper(Vocabulary([*TOKENS, b""], [256], 256)), eos_token=[256])


def compiled(notation: str, text: str) -> tuple[str, list[str]]:
    answer = _compile(TOKENIZER, notation, text)
    assert "text" in answer, (text, answer)
    grammar, left, size = json.loads(answer["text"])
    assert size >= len(grammar)
    return grammar, left


def matches(grammar: str, text: str) -> bool:
    matcher, tokens = LLMatcher(TOKENIZER, grammar, log_level=0), list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
INTEGERS = {"type": "object", "additionalProperties": {"type": "integer"}}
# A schema, texts that match it, texts that do not, and the keywords that the grammar does not enforce.
SCHEMAS: list[tuple[dict[str, Any], list[str], list[str], list[str]]] = [
    # Objects have only the properties of the schema, unless the schema allows others.
    (A, ["{}", '{"a": 1}'], ['{"b": 1}'], []),
    ({**A, "additionalProperties": True}, ['{"a": 1, "b": "x"}'], [], []),
    ({"type": "object"}, ['{"x": [1]}'], [], []),
    ({"type": "object", "properties": {}}, ["{}"], ['{"x": 1}'], []),
    ({**A, "required": ["z"]}, ['{"a": 1, "z": "q"}'], ['{"z": 1, "y": 2}'], []),
    ({"type": "object", "patternProperties": {"^x": {}}}, ['{"x1": 1}'], ['{"y": 1}'], []),
    ({"type": "array", "items": A, "maxItems": 1}, ['[{"a": 1}]'], ['[{"b": 1}]'], []),
    ({"anyOf": [A, {"type": "null"}]}, ["null", '{"a": 1}'], ['{"b": 1}'], []),
    # An object that must match several schemas may have the properties of all of them, but no others.
    ({"allOf": [A, B]}, ['{"a": 1, "b": 2}'], ['{"a": 1}', '{"b": 2, "c": 3}'], []),
    ({"allOf": [A], "title": "t"}, ['{"a": 1}'], ['{"c": 3}'], []),
    ({**A, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a": 1}', '{"b": 2}'], ["{}", '{"a": 1, "c": 2}'],
     []),
    ({"allOf": [A, {**B, "additionalProperties": True}]}, ['{"a": 1, "b": 2, "c": 3}'], [], []),
    ({"$ref": "#/$defs/A", "properties": {"b": {}}, "$defs": {"A": A}}, ['{"a": 1, "b": 2}'], ['{"a": 1, "c": 2}'], []),
    (
        {"$defs": {"A": A}, "properties": {"p": {"$ref": "#/$defs/A"}}, "allOf": [{"$ref": "#/$defs/A"}]},
        ['{"p": {"a": 1}, "a": 2}'],
        ['{"p": {"p": 1}}', '{"p": {}, "c": 1}'],
        [],
    ),
    ({"allOf": [{"$ref": "#/$defs/a~1b%20c"}], "$defs": {"a/b c": A}}, ['{"a": 1}'], ['{"c": 3}'], []),
    ({**A, "properties": {"n": {"$ref": "#"}}}, ['{"n": {"n": {}}}'], ['{"n": {"a": 1}}'], []),
    # Keywords that the grammar library does not support.
    ({**INTEGERS, "propertyNames": {"enum": ["x", "y"]}}, ['{"x": 1}'], ['{"z": 1}'], []),
    ({**INTEGERS, "propertyNames": {"$ref": "#/$defs/N"}, "$defs": {"N": {"const": "x"}}}, ['{"x": 1}'], ['{"z": 1}'],
     []),
    ({**INTEGERS, "propertyNames": {"pattern": "^a+$"}}, ['{"aa": 1}'], ['{"z": 1}'], []),
    ({**INTEGERS, "propertyNames": {"type": "string"}}, ['{"aa": 1}'], [], []),
    ({**INTEGERS, "propertyNames": {"minLength": 2}}, ['{"a": 1}'], ['{"a": "x"}'], ["propertyNames"]),
    ({"type": "array", "items": {"const": 1}, "uniqueItems": True}, ["[1, 1]"], ["[2]"], ["uniqueItems"]),
    ({"type": "array", "items": {"const": 1}, "uniqueItems": False}, ["[1, 1]"], [], []),
    ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, ["1", "null"], ['"x"'], []),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["1"], ['"x"'], ["oneOf"]),
    *(({"type": "string", "format": name}, ['"?"'], ["1"], ["format"]) for name in (
        "path", "uri-reference", "iri", "idn-email", "json-pointer", "uri-template", "regex")),
    ({"type": "string", "format": "uuid1"}, ['"c0f2d7f0-8a3b-11ee-b962-0242ac120002"'],
     ['"c0f2d7f0-8a3b-41ee-b962-0242ac120002"', '""'], []),
    # Numbers that doubles do not represent exactly, or that the library refuses.
    ({"const": 2**53}, [str(2**53)], [str(2**53 + 1)], []),
    ({"const": 18446744073709551615}, ["18446744073709551615"], ['"x"'], ["const"]),
    ({"enum": [1, 1234567890123456789]}, ["1", "1234567890123456789"], ["1.5"], ["enum"]),
    ({"enum": [True, 2**60]}, ["true", str(2**60)], ["x"], ["enum"]),
    ({"const": {"a": [-(2**63)]}}, ['{"a": [-9223372036854775808]}'], ["{a}"], ["const"]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["-5"], ["x"], ["maximum", "minimum"]),
    ({"type": "integer", "minimum": 2**53 + 1, "maximum": 5}, ["3"], ["6"], ["minimum"]),
    ({"type": "number", "minimum": 1e-300, "maximum": 1e300}, ["0.5"], ["x"], ["maximum", "minimum"]),
    ({"type": "string", "maxLength": 2**64, "minLength": 1}, ['"x"'], ['""'], ["maxLength"]),
    ({"type": "array", "maxItems": 1e30}, ["[1]"], ["1"], ["maxItems"]),
    # Control characters.
    ({"type": "string", "pattern": r"^\cA|\0$"}, ['"x"'], ["1"], ["pattern"]),
    ({"type": "string", "pattern": r'^\x01\t[^"\x00-\x1f]$'}, [r'"\u0001\tx"'], [r'"\u0001\t\n"', r'"\u0001\t\""'], []),
    ({"type": "string", "pattern": r'^[^-"\\][^]a]$'}, ['"ab"', r'"\n\""'], [r'"\\b"', r'"\"b"', '"a]"', '"aa"'], []),
    ({"type": "string", "pattern": r"^[\x00- ]$"}, ['"x"'], ["1"], ["pattern"]),
    ({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?\d*\.?\d*$"}, ['"-1.5"'], ['"x"', '"1.5x"'], ["pattern"]),
    ({"type": "string", "pattern": r"^(?=[(?=a)]+(b))a\(?=$"}, ['"a(="', '"a="'], ['"b"'], ["pattern"]),
    ({"type": "string", "pattern": r"^(a)\1$"}, ['"b"'], ["1"], ["pattern"]),
    ({"type": "string", "pattern": r"^(?>a+)b\Z"}, ['"b"'], ["1"], ["pattern"]),
    # Keywords that it does not implement, of which some occur in schemas of Zod, Java, Go and MCP servers.
    ({"type": "string", "not": {"const": "x"}}, ['"x"'], ["1"], ["not"]),
    ({**A, "properties": {"a": {"not": {}}}, "unevaluatedProperties": False}, ["{}"], ['{"b": 1}'],
     ["not", "unevaluatedProperties"]),
    ({**A, "if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {}}, ["{}"], ['{"b": 1}'],
     ["else", "if", "then"]),
    ({"type": "array", "contains": {"type": "integer"}, "minContains": 1}, ["[]"], ["1"], ["contains", "minContains"]),
    ({"type": "array", "contains": False, "not": False, "unevaluatedItems": True}, ["[]"], ["1"], ["contains"]),
    ({**A, "dependentRequired": {"a": ["b"]}}, ['{"a": 1}'], ["[]"], ["dependentRequired"]),
    ({**A, "minProperties": 1, "maxProperties": 2}, ["{}"], ['{"b": 1}'], ["maxProperties", "minProperties"]),
    ({**INTEGERS, "minProperties": 1}, ['{"x": 1}'], ["{}"], []),
    ({**A, "required": None, "description": None, "items": None, "$ref": None, "allOf": None}, ["{}"], ['{"b": 1}'],
     []),
    ({"const": None}, ["null"], ["1"], []),
    # Hand-written schemas often say of a property that it is required, as the third draft of JSON Schema does.
    ({"type": "object", "properties": {"a": {"const": 1, "required": True}, "b": {"const": 2, "required": False}}},
     ['{"a": 1}', '{"a": 1, "b": 2}'], ["{}", '{"a": 1, "c": 1}'], []),
    ({"properties": {"required": {"const": 1, "required": True}}, "required": ["required"]}, ['{"required": 1}'],
     ["{}"], []),
    ({**A, "x-guidance": {"whitespace_flexible": True, "lenient": True}}, ['{"a": 1}'], ['{"a" : 1}'], []),
    ({"const": {"$ref": "#/x", "uniqueItems": True}}, ['{"$ref": "#/x", "uniqueItems": true}'], [], []),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong", "left"), SCHEMAS)
def test_schemas(schema: dict[str, Any], right: list[str], wrong: list[str], left: list[str]) -> None:
    grammar, found = compiled("json", json.dumps(schema))
    assert found == left
    assert [text for text in right if not matches(grammar, text)] == []
    assert [text for text in wrong if matches(grammar, text)] == []


def test_a_warning_in_unknown_words_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megakernel.serving.engine.grammar_worker._WARNING", _BEYOND)  # matches no warning
    assert compiled("json", '{"contains": {}}')[1] == ['Unimplemented keys: ["contains"]']


class Colour(enum.Enum):
    RED = "red"


class Cat(BaseModel):
    kind: Literal["cat"]
    toys: "list[Cat] | None" = None


class Dog(BaseModel):
    kind: Literal["dog"]


def tag(value: Any) -> str:
    return str(value.kind)


COMBINED: list[Any] = [set[str], frozenset[Colour], dict[Colour, int], dict[uuid.UUID, Cat], Json[int], Cat | None]
COMBINED += [dict[Annotated[str, Field(pattern="^a")], int], Annotated[dict[str, int], Field(min_length=1)]]
COMBINED += [Annotated[Cat | Dog, Field(discriminator="kind")], Cat | Dog, dict[datetime.date, list[SecretStr]]]
COMBINED += [Annotated[Annotated[Cat, Tag("cat")] | Annotated[Dog, Tag("dog")], Discriminator(tag)]]
COMBINED += [Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2)], decimal.Decimal, complex, bytes]
COMBINED += [Annotated[dict[Colour, int], Field(min_length=1)], tuple[int, str]]
COMBINED += [pathlib.Path, datetime.timedelta, ipaddress.IPv4Interface, ipaddress.IPv6Network, Literal[1, "a", None]]


def test_every_type_of_pydantic_is_taken() -> None:
    named = [getattr(module, name) for module in (types, networks) for name in module.__all__]
    taken = 0
    for kind in [*named, *COMBINED]:
        try:
            schema = TypeAdapter(kind).json_schema()
        except Exception:  # not a type, or a type that needs another package
            assert kind in named
            continue
        compiled("json", json.dumps(schema))
        taken += 1
    assert taken > 60


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"required": 5}, "Expected array for 'required'"),
        ({"properties": ["a"]}, "properties must be an object"),
        ({"allOf": 5}, "allOf must be an array"),
        ({"$ref": 5, "properties": {}}, "must be a string"),
        ({"allOf": [{"$ref": "#/nowhere"}]}, "nowhere"),
        ({"const": float("inf")}, "JSON compliant"),
        ({"type": "string", "maxLength": -1}, "maxLength"),
        ('{"items":' * 5000 + "{}" + "}" * 5000, "deep"),
    ],
)
def test_what_is_wrong_with_a_schema_is_said(schema: Any, why: str) -> None:
    assert why in _compile(TOKENIZER, "json", schema if isinstance(schema, str) else json.dumps(schema))["failed"]


@pytest.mark.parametrize("escape", ["d", "w", "s", "D", "W", "S"])
def test_classes_of_regular_expressions_are_ascii(escape: str) -> None:
    inside = {"d": "7", "w": "_", "s": "\t"}[escape.lower()]
    for form in (rf"\{escape}", rf"[\{escape}\\]"):
        grammar = compiled("regex", form)[0]
        assert matches(grammar, inside) == escape.islower()
        for beyond in ("٣", "é", "\u00a0", "🯸"):
            assert matches(grammar, beyond) == escape.isupper()


def test_an_error_names_the_rule_and_not_the_grammar() -> None:
    tools = [{"title": f"the tool {i}", "type": "x" if i == 2 else "object"} for i in range(4)]
    rules = [f"f{i}: %json {json.dumps(tool)}" for i, tool in enumerate(tools)]
    grammar = "\n".join(["start: f0 | f1 | f2 | f3", *rules])
    assert _compile(TOKENIZER, "grammar", grammar) == {"failed": "the tool 2: Invalid type: x"}
