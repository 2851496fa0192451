"""Tests `megakernel chat` with input from a pipe and from a terminal, and conversations that exceed the context."""

import io
import json
import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from commands import Cli, command

from megakernel.cli import chat as chat_verb
from megakernel.errors import MegakernelError


def chat(cli: Cli, monkeypatch: pytest.MonkeyPatch, said: bytes, *flags: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(said)))
    return cli.run("chat", *flags)


def test_each_line_of_a_pipe_is_a_message(cli: Cli, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    flags = ("--model", model, "--max-tokens", "5", "--temperature", "0")
    status, out, err = chat(cli, monkeypatch, b"one\n\n/what\ntwo\xff\n/exit\nthree\n", *flags, "--json")
    told = json.loads(out)
    assert status == 0 and [m["role"] for m in told["messages"]] == ["user", "assistant"] * 2
    assert [told["messages"][at]["content"] for at in (0, 2)] == ["one", "two\ufffd"]
    assert all(a["tokens"] <= 5 and a["finish_reason"] in ("length", "stop") for a in told["answers"])
    assert err.count(" tokens · finish: ") == 2 and "/clear forgets the conversation" in err
    status, out, _ = chat(cli, monkeypatch, b"one\n/clear\none", *flags)
    half = len(out) // 2
    assert status == 0 and out[:half] == out[half:]  # nothing is remembered


def test_the_oldest_messages_are_left_out(cli: Cli, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    here = ("--model", model, "--max-model-len", "512")
    said = b"".join(b"%d" % n + b"x" * 150 + b"\n" for n in range(4))
    status, out, err = chat(cli, monkeypatch, said, *here, "--max-tokens", "3", "--json")
    left = [m["content"][0] for m in json.loads(out)["messages"] if m["role"] == "user"]
    assert status == 0 and left == ["2", "3"], err
    assert err.count("The context of 512 tokens is full: the oldest 2 messages are left out.") == 2
    status, out, err = chat(cli, monkeypatch, b"y" * 600 + b"\nz\n", *here, "--max-tokens", "3", "--json")
    assert status == 1 and "leaves no room for an answer in the context of 512" in err
    assert json.loads(out)["messages"][0]["content"] == "z"


@pytest.mark.parametrize(("tokens", "room"), [(511, 1), (512, None)])
def test_an_answer_may_have_the_last_token_of_the_context(tokens: int, room: int | None) -> None:
    talk = chat_verb._Talk(SimpleNamespace(count=lambda messages: (tokens, 512)), None, True)
    talk._messages.append({"role": "user", "content": "x"})
    if room:
        assert talk._fit() == room
    else:
        with pytest.raises(MegakernelError, match="leaves no room"):
            talk._fit()


def test_a_wrong_temperature_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, err = chat(cli, monkeypatch, b"hello\n", "--temperature", "-1")
    assert status == 1 and "temperature" in err and "Traceback" not in err and not out


class Terminal:
    """A process whose input and output are a terminal."""

    def __init__(self, *arguments: str) -> None:
        self._mine, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "dumb", "COLUMNS": "40"}
        self.process = subprocess.Popen(
            command(*arguments), stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
            preexec_fn=_takes_terminal,
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def send(self, text: str) -> None:
        os.write(self._mine, text.encode())

    def until(self, text: str) -> str:
        """Read until `text` appears, and return what came before it. Fails after two minutes."""
        self._read(lambda: text in self.seen)
        before, _, self.seen = self.seen.partition(text)
        return before

    def interrupt(self, text: str) -> str:
        """Press Ctrl-C once a second until `text` appears, and return what came before it. One Ctrl-C is not enough: if
        its signal arrives just before `input` waits for a key, Python handles the signal only when the next signal or
        key arrives."""
        deadline = time.monotonic() + 120
        while text not in self.seen and time.monotonic() < deadline:
            self.send("\x03")
            pause = time.monotonic() + 1
            self._read(lambda pause=pause: text in self.seen or time.monotonic() > pause)  # type: ignore[misc]
        return self.until(text)

    def ask(self, text: str) -> None:
        """Send a message, and wait until its answer begins. A Ctrl-C before the answer begins would cancel the message
        instead of the answer. If the message arrives before `input` controls the terminal, the terminal shows the
        message twice."""
        os.write(self._mine, f"{text}\n".encode())
        self.until(f"{text}\r\n")
        self._read(lambda: re.sub(rf"(> )?{text}|\s|\x1b\[[^a-zA-Z]*[a-zA-Z]", "", self.seen) != "")

    def _read(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not done():
            assert time.monotonic() < deadline, self.seen
            if select.select([self._mine], [], [], 0.1)[0]:
                self.seen += os.read(self._mine, 4096).decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._mine)


def _takes_terminal() -> None:
    # The first terminal that the leader of a new session opens becomes its controlling terminal, which Ctrl-C needs.
    os.close(os.open(os.ttyname(0), os.O_RDWR))


def test_ctrl_c_ends_an_answer_and_ctrl_d_the_program(model: str) -> None:
    terminal = Terminal("chat", "--model", model)
    try:
        terminal.until("> ")
        terminal.ask("one")
        assert "Traceback" not in terminal.interrupt("finish: ")
        terminal.until("> ")
        terminal.interrupt("/exit or Ctrl-D leaves")
        terminal.until("> ")
        terminal.ask("two")
        terminal.interrupt("finish: ")
        terminal.until("> ")
        terminal.send("\x04")
        assert terminal.process.wait(60) == 0, terminal.seen
    finally:
        terminal.close()


def test_a_terminal_gets_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    partner: Any = None
    for screen, shown in ((Screen(), "a\ufffd[2J\tb\n"), (io.StringIO(), "a\x1b[2J\tb\n")):
        monkeypatch.setattr("sys.stdout", screen)
        chat_verb._Talk(partner, None, False)._show("a\x1b[2J\tb\n")
        assert screen.getvalue() == shown


def test_ctrl_c_between_answers_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # A model raises this when its signal handler has seen Ctrl-C.
    model = Mock(count=Mock(return_value=(1, 9)), reply=Mock(side_effect=KeyboardInterrupt))
    talk = chat_verb._Talk(model, None, False)
    monkeypatch.setattr(talk, "_typed", True)
    monkeypatch.setattr("builtins.input", Mock(side_effect=EOFError))
    for part in (lambda: talk._turn("one"), lambda: list(talk._lines())):
        part()
        try:
            talk._interrupt()
        except KeyboardInterrupt:
            pytest.fail("Ctrl-C would have ended the program")
