"""Runs chat templates. They are Jinja programs from unknown authors, so they run in a process with limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.nodes

from ..errors import MegakernelError
from .limited import Ended, LimitedProcess
from .limits import MOST_PROMPT_CHARACTERS, MOST_TEMPLATE_BYTES, MOST_TEMPLATE_CHARACTERS, MOST_TEMPLATE_SECONDS
from .template_worker import environment

# Template variables that a request must not set in `chat_template_kwargs`: the server or other fields of the request
# set them. `now` is the time that the template's function `strftime_now` returns. A text of more characters than
# `most_characters` does not fit the context.
OWN_NAMES = {"messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"}
OWN_NAMES |= {"now", "most_characters"}
_WORKER = Path(__file__).with_name("template_worker.py")


class TooLong(MegakernelError):
    """Raised for a text that has more tokens than fit into the context."""


class ChatTemplate:
    """A chat template. A separate process, which starts at the first rendering, compiles and renders it.

    Jinja's sandbox keeps a template away from files and from Python's internal objects, but it does not prevent endless
    loops or huge numbers. Compiling a template is dangerous too, because Jinja evaluates constants while it compiles.
    So the server's process only checks the template's syntax.

    `takes_tools` says whether the template reads the variable `tools`. A template with a wrong syntax fails when it is
    used, because the model may work without it. `damage` says why its source could not be read.
    """

    def __init__(self, source: str, origin: str, damage: str = "") -> None:
        self.source, self._origin, self._damage = source, origin, damage
        self.takes_tools = bool(damage)
        limits = (MOST_TEMPLATE_SECONDS, MOST_TEMPLATE_BYTES, MOST_PROMPT_CHARACTERS)
        self._process = LimitedProcess(_WORKER, source, *limits)
        if len(source) > MOST_TEMPLATE_CHARACTERS:
            self._damage = f"its text has {len(source)} characters, more than {MOST_TEMPLATE_CHARACTERS}"
            return
        try:
            names = environment().parse(source).find_all(jinja2.nodes.Name)
            self.takes_tools = any(node.name == "tools" for node in names)
        except (jinja2.TemplateError, RecursionError) as e:
            self._damage, self.takes_tools = str(e), True

    def checked(self) -> ChatTemplate:
        """Return this template. Raises MegakernelError if its syntax is wrong."""
        if self._damage:
            raise self._error("broken", self._damage)
        return self

    def render(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
        """Return the text of the prompt, up to where the assistant's answer begins. `values` are template variables,
        which replace the default ones."""
        no: dict[str, Any] = {"tools": None, "documents": None}
        values = {"messages": list(messages), "add_generation_prompt": True, **no, **values}
        try:
            kind, text = self.checked()._process.ask(values)
        except Ended as e:
            raise self._error("failed", str(e)) from e
        if kind == "long":
            raise TooLong(f"the conversation has {text}")
        if kind != "text":
            raise self._error(kind, text)
        return text

    def _error(self, how: str, why: str) -> MegakernelError:
        return MegakernelError(f"the chat template of {self._origin} {'is ' * (how == 'broken')}{how}: {why}")
