"""Renders one chat template in a process of its own, because a template is a program from an unknown author.

The first line of standard input is the template, and each further line has the values for one rendering. Every line is
answered by a line of JSON: {"text": ...}, {"long": ...}, {"broken": ...} or {"failed": ...}. The operating system ends
the process if it uses too much time or memory. To start quickly, the script imports nothing from the package."""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(jinja2.ext.Extension):
    """Renders the text between `{% generation %}` and `{% endgeneration %}` (marks for training) like any other. A
    variable that is set there exists only there."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Like Jinja's filter `tojson`, but without escaping HTML, because a prompt is not HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def environment() -> ImmutableSandboxedEnvironment:
    """Return a Jinja environment with the functions and whitespace rules that Hugging Face's templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _answer(kind: str, make: Callable[[], str | None], most: int) -> dict[str, str]:
    try:
        text = make() or ""
        return {"text": text} if len(text) <= most else {"long": f"{len(text)} characters, more than {most}"}
    except Exception as e:  # a template can raise anything that Python code can raise
        return {kind: (str(e) or type(e).__name__)[:500]}


def main(cpu_seconds: float, memory_bytes: int, most_characters: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Ctrl-C is meant for the parent process. When the parent ends, standard input closes, and this process ends too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines = iter(sys.stdin.readline, "")
    source = json.loads(next(lines))
    template: jinja2.Template | None = None

    def compile() -> None:
        nonlocal template
        template = environment().from_string(source)

    def timed(kind: str, make: Callable[[], str | None], most: int = most_characters) -> None:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        answer = json.dumps(_answer(kind, make, most))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)

    timed("broken", compile)
    for line in lines:
        values = json.loads(line)
        now = values.pop("now", None)  # in seconds since 1970
        most = min(values.pop("most_characters", most_characters), most_characters)
        values["strftime_now"] = (datetime.now() if now is None else datetime.fromtimestamp(now)).strftime
        assert template is not None
        timed("failed", lambda values=values: template.render(values), most)  # type: ignore[misc]


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
