"""`megakernel chat`: a conversation with a model. Messages come from a terminal, or as lines from a pipe."""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..errors import MegakernelError
from . import FAILED, on_interrupt, output
from .options import MODEL_RUN, open_llm, verb

if TYPE_CHECKING:
    from megakernel.serving import LLM, SamplingParams
    from megakernel.serving.text.codec import Token

Messages = list[dict[str, str]]

_HELP = "/clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C ends an answer"
_COMMAND = re.compile(r"/[a-z]+")
# If a conversation becomes too long, its oldest messages are left out until this fraction of the context is free.
_KEPT_FOR_ANSWERS = 0.25

# Replaces the characters that would control a terminal, except line ends and tabs.
_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "�")

_FLAGS = """
speculate generation_config
--temperature | x | (the model's, else 1) | 0 is greedy
--max-tokens | count | (the context's end) | end an answer after this many tokens
"""


@verb("chat", _FLAGS, MODEL_RUN)
def run(args: argparse.Namespace) -> int:
    from megakernel.serving import SamplingParams

    # SamplingParams checks the temperature. A wrong value should fail before the model is loaded.
    given = {} if args.temperature is None else {"temperature": args.temperature}
    SamplingParams(**given)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a pipe may contain any bytes
    with open_llm(args, max_num_seqs=1) as llm:
        partner = _Partner(llm, SamplingParams(**{"max_tokens": None, **llm.sampling, **given}))
        return _Talk(partner, args.max_tokens, args.json).run()


@dataclass
class _Answer:
    """The part of an answer that has been generated so far."""

    tokens: int = 0
    finish_reason: str | None = "stopped"
    text: str = ""
    _moments: list[float] = field(default_factory=lambda: [perf_counter()])  # when it began, and when each piece came

    def add(self, text: str) -> None:
        self.text += text
        self._moments.append(perf_counter())

    @property
    def ttft_s(self) -> float | None:
        return self._moments[1] - self._moments[0] if self.text else None

    @property
    def tpot_s(self) -> float | None:
        return (self._moments[-1] - self._moments[1]) / (self.tokens - 1) if self.text and self.tokens > 1 else None


class _Partner:
    """The model of the conversation. `name` is shown before the first message."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self.name, self._llm, self._params = llm.model, llm, params
        llm.get_tokenizer()  # raises an error if the model has no tokenizer

    def count(self, messages: Messages) -> tuple[int, int]:
        """Return the number of tokens of the conversation, and the context's maximum for the conversation and its
        answer together."""
        return len(self._llm.chat_ids(messages)), self._llm.engine.dims.bucket.max_context

    def reply(self, messages: Messages, answer: _Answer, show: Callable[[str], None], max_tokens: int) -> None:
        """Answer the last message. Each piece of text is added to `answer` and passed to `show` when it arrives. If
        Ctrl-C (KeyboardInterrupt) ends the answer, `answer` keeps the pieces so far."""
        reader = self._llm.codec.reader(None)

        def take(token: Token, text: str) -> None:
            answer.tokens += 1
            text = reader.content(text, token.finish_reason) if reader else text
            answer.add(text)
            show(text)

        ids = self._llm.chat_ids(messages)
        params = replace(self._params, max_tokens=max_tokens, skip_special_tokens=reader is None)
        with _interrupted_between_steps() as check:
            [result] = self._llm.generate([ids], params, on_token=take, on_step=lambda _: check())
        answer.finish_reason = result.finish_reason


@contextmanager
def _interrupted_between_steps() -> Iterator[Callable[[], None]]:
    """Delay Ctrl-C in the `with` block, so that no step of the engine is interrupted. The block calls the yielded
    function between two steps. If Ctrl-C was pressed, the function raises KeyboardInterrupt."""
    asked = False

    def note(*_: object) -> None:
        nonlocal asked
        asked = True

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    with on_interrupt(note):
        yield check


class _Talk:
    """A conversation with a model. If standard input is a terminal, the user types the messages, and Ctrl-C ends the
    current answer. Otherwise, each input line is a message, and Ctrl-C ends the program."""

    def __init__(self, partner: _Partner, max_tokens: int | None, as_json: bool) -> None:
        self._partner, self._max_tokens, self._as_json = partner, max_tokens, as_json
        self._typed = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
        self._shown = sys.stderr if as_json else sys.stdout
        self._messages: Messages = []
        self._answers: list[dict[str, Any]] = []
        self._failed = False
        self._may_interrupt = False

    def run(self) -> int:
        with on_interrupt(self._interrupt) if self._typed else nullcontext():
            return self._talk()

    def _interrupt(self, *_: object) -> None:
        """Handle Ctrl-C on a terminal: end the answer, or the line that the user is typing. Otherwise do nothing."""
        if self._may_interrupt:
            self._may_interrupt = False
            raise KeyboardInterrupt

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        self._may_interrupt = True
        try:
            yield
        finally:
            self._may_interrupt = False

    def _talk(self) -> int:
        if self._typed:
            with suppress(ImportError):
                import readline  # noqa: F401 -- gives `input` line editing and a history
            output.stderr.print(f"{self._partner.name}: {_HELP}".translate(_CONTROLS), style="dim")
        for line in self._lines():
            if not (text := line.strip()):
                continue
            if text == "/exit":
                break
            if text == "/clear":
                self._messages.clear()
            elif _COMMAND.fullmatch(text):
                output.stderr.print(_HELP, style="dim")
            else:
                self._turn(text)
        if self._as_json:
            output.emit({"model": self._partner.name, "messages": self._messages, "answers": self._answers})
        return FAILED if self._failed and not self._typed else 0

    def _lines(self) -> Iterator[str]:
        if not self._typed:
            yield from sys.stdin
            return
        while True:
            try:
                with self._interruptible():
                    line = input("> ")
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                output.stderr.print("\n/exit or Ctrl-D leaves", style="dim")
                continue
            yield line

    def _turn(self, text: str) -> None:
        """Send one message and show its answer. If no text arrives, the message is removed from the conversation."""
        self._messages.append({"role": "user", "content": text})
        answer = _Answer()
        try:
            with self._interruptible():
                room = self._fit()
                self._partner.reply(self._messages, answer, self._show, room)
        except KeyboardInterrupt:
            if not self._typed:
                raise
        except MegakernelError as e:
            self._failed, answer.finish_reason = True, "error"
            output.stderr.print(f"{answer.text and chr(10)}megakernel: error: {e}")
        if answer.text:
            self._messages.append({"role": "assistant", "content": answer.text})
        else:
            self._messages.pop()
        if answer.finish_reason != "error":
            self._show("\n")
            figures = {name: getattr(answer, name) for name in ("tokens", "finish_reason", "ttft_s", "tpot_s")}
            self._answers.append(figures)
            output.stderr.print(output.speed(**figures).translate(_CONTROLS), style="dim")

    def _fit(self) -> int:
        """Leave out the oldest messages until the remaining ones and an answer fit into the model's context. Return the
        maximum number of tokens of the answer."""
        tokens, context = self._partner.count(self._messages)
        before = len(self._messages)
        while tokens > context * (1 - _KEPT_FOR_ANSWERS) and len(self._messages) > 1:
            del self._messages[:2]
            tokens, _ = self._partner.count(self._messages)
        if gone := before - len(self._messages):
            output.stderr.print(f"The context of {context} tokens is full: the oldest {gone} messages are left out.")
        room = context - tokens
        if room < 1:
            raise MegakernelError(
                f"a message of {tokens} tokens leaves no room for an answer in the context of {context}: shorten it"
            )
        return min(self._max_tokens or room, room)

    def _show(self, text: str) -> None:
        self._shown.write(text.translate(_CONTROLS) if self._shown.isatty() else text)
        self._shown.flush()
