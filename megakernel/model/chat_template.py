"""Chat templates: untrusted Jinja programs from model files, run in Jinja's sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import MegakernelError


class ChatTemplate:
    """A compiled template with the globals and whitespace rules that Hugging Face's templates are written for."""

    def __init__(self, source: str, origin: str) -> None:
        self._origin = origin
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as e:
            raise MegakernelError(f"the chat template of {origin} is broken: {e}") from e

    def render(self, messages: Sequence[Mapping[str, str]], special: Mapping[str, str]) -> str:
        """The prompt's text, up to where the assistant's answer begins. `special`: bos_token and the like."""
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, tools=None, **special)
        except Exception as e:  # a template can fail in any way a Python expression can
            raise MegakernelError(f"the chat template of {self._origin} failed: {e or type(e).__name__}") from e


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; here it is only text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
