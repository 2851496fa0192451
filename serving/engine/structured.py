"""Structured outputs: the formats that a request may demand, under vLLM's names, and the grammar of each format."""

from __future__ import annotations

import json as jsons
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from megakernel.errors import MegakernelError

# The maximum length of a schema or grammar. A schema becomes a grammar of about the same length, and the largest common
# ones have thousands of characters.
MOST_GRAMMAR_CHARACTERS = 1 << 20
GRAMMAR, COMPLETE = "grammar", "complete"
# The white space in JSON is what Python's json module writes, because models know this form, and because fixed white
# space need not be sampled. With lenient=False, the library refuses schema keywords that it does not implement.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The format that the whole text must match. Exactly one of the fields is given.

    json         a JSON schema, as a dict or as JSON text
    regex        a regular expression
    choice       a list of texts; the answer is one of them
    grammar      a context-free grammar, in Lark's notation or in GBNF (EBNF)
    json_object  True: any JSON object

    Raises MegakernelError with the reason if the fields are invalid.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] * bool(self.json_object)
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise MegakernelError(
                f"structured outputs need one of json, regex, choice, grammar and json_object, not {found}"
            )
        for name in ("regex", "grammar"):
            if (text := getattr(self, name)) is not None and (not isinstance(text, str) or not text):
                raise MegakernelError(f"structured outputs: {name} must be a non-empty string")
        if self.choice is not None and (
            isinstance(self.choice, str) or not self.choice or not all(isinstance(c, str) and c for c in self.choice)
        ):
            raise MegakernelError("structured outputs: choice must be a list of non-empty strings")
        size = sum(map(len, self.choice or ())) + len(self.regex or "") + len(self.grammar or "")
        if size > MOST_GRAMMAR_CHARACTERS:
            raise MegakernelError(f"structured outputs: {given[0]} has more than {MOST_GRAMMAR_CHARACTERS} characters")

    def source(self) -> tuple[str, str]:
        """Return the pair (notation, grammar).

        The notation GRAMMAR means Lark or GBNF; the worker process finds out which. COMPLETE means that the grammar
        library can read the grammar as it is.
        """
        try:
            found = (GRAMMAR, self.grammar) if self.grammar is not None else (COMPLETE, self._text())
        except (ValueError, RecursionError) as e:
            raise MegakernelError(f"structured outputs: {str(e)[:500]}") from e
        if len(found[1]) > 2 * MOST_GRAMMAR_CHARACTERS:
            raise MegakernelError(f"structured outputs: the grammar has more than {MOST_GRAMMAR_CHARACTERS} characters")
        return found

    def _text(self) -> str:
        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex)
        if self.choice is not None:
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(jsons.dumps, self.choice)))
        schema = {"type": "object"} if self.json is None else self.json
        if isinstance(schema, str):
            schema = jsons.loads(schema)
        if not isinstance(schema, Mapping):
            raise ValueError(f"a JSON schema must be an object, not {schema!r:.80}")
        return LLMatcher.grammar_from_json_schema(jsons.dumps(schema), overrides=JSON_OPTIONS)  # type: ignore[arg-type]
