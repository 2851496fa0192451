"""Random JSON schemas that allow only short texts, so that an answer ends even if the model prefers to go on."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
_WORDS = ("name", "age", "id", "tags", "kind", "ünit", "a b", 'q"uote', "x", "total", "items", "$ref_")
_PATTERNS = ("^[a-c]{1,4}$", r"^\d{2}-\d{2}$", "^(yes|no)$", "^[A-Z][a-z]{0,3}$")


def closed(**properties: Schema) -> Schema:
    """Return a schema for an object that has all of these properties and no others."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """Return a schema with a few keywords, as in JSON-Schema-Test-Suite, nested up to `depth` levels deep."""
    leaves: list[Callable[[], Schema]] = [
        lambda: {"type": "string", "maxLength": rng.randint(0, 12)},
        lambda: {"type": "string", "minLength": 2, "maxLength": rng.randint(2, 6)},
        lambda: {"type": "string", "pattern": rng.choice(_PATTERNS)},
        lambda: {"type": "string", "format": rng.choice(["date", "ipv4", "uuid"])},
        lambda: {"enum": rng.sample([1, "two", None, True, 4.5, ["a"], {"b": 1}], rng.randint(1, 4))},
        lambda: {"const": rng.choice([0, "é\n", False, [1, 2], {"k": "v"}])},
        lambda: {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 10**6)},
        lambda: {"type": "integer", "exclusiveMinimum": -3, "maximum": 30, "multipleOf": rng.choice([2, 3, 5])},
        lambda: {"type": "number", "minimum": -1, "maximum": 1, "multipleOf": 0.125},
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"type": ["boolean", "null"]},
    ]
    nested = [_object, _array, _tuple, _any_of, _all_of]
    return rng.choice(nested)(rng, depth - 1) if depth and rng.random() < 0.6 else rng.choice(leaves)()


def random_root(rng: random.Random) -> Schema:
    """Return a schema for an object, which sometimes refers to a definition in `$defs`."""
    schema = _object(rng, 2)
    if rng.random() < 0.3:
        schema["$defs"] = {"part": random_schema(rng, 1)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema.setdefault("required", []).append("part")
    return schema


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    required = [name for name in names if rng.random() < 0.7]
    return closed(**{name: random_schema(rng, depth) for name in names}) | {"required": required}


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    return {"type": "array", "items": random_schema(rng, depth), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _tuple(rng: random.Random, depth: int) -> Schema:
    items = [random_schema(rng, depth) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(rng, depth) for _ in range(rng.randint(2, 3))]}


def _all_of(rng: random.Random, depth: int) -> Schema:
    return {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": rng.randint(3, 90)}]}
