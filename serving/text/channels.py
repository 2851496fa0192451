"""Reads the answers of gpt-oss, whose text consists of messages for different readers (the format is called harmony).

A message has a header, which names its channel and, if it calls a function, the function:

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>
    <|start|>assistant<|channel|>final<|message|>TEXT<|return|>

An answer ends after a call or after the text. See https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from typing import Literal

from megakernel.serving.text.tool_calls import Functions, Reader, beginning

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
# How a header may begin. An answer that begins in another way has no header, for example because a grammar forces JSON.
_HEADERS = ("<|channel|>", "<|constrain|>", "<|start|>", _MESSAGE, " to=")
_MOST_HEADER = 300  # maximum characters of a header; longer ones are text of a confused model
_TO = re.compile(r"\bto=(?:functions\.)?([a-zA-Z0-9_.-]{1,64})")


class ChannelReader(Reader):
    """Reads an answer that consists of messages. A call of a function that `functions` does not list is content."""

    def __init__(self, functions: Functions, most: int | None = None) -> None:
        super().__init__(functions, most)
        self._header = True  # whether the next text belongs to a header
        self._fresh = True  # whether no header has been read
        self._kind: Literal["content", "reasoning", "arguments"] = "content"  # of the current message
        self._told: set[str] = set()  # kinds of earlier messages
        self._gap = ""  # what separates the current message from an earlier one

    def _read(self, *, last: bool) -> bool:
        return self._read_header(last) if self._header else self._read_message(last)

    def _read_header(self, last: bool) -> bool:
        at = self._held.find(_MESSAGE)
        headed = not self._fresh or any(start.startswith(self._held[: len(start)]) for start in _HEADERS)
        if headed and at < 0 and len(self._held) <= _MOST_HEADER:
            if last:
                self._held = ""  # the answer was cut off in the header
            return False
        header = self._held[:at] if headed and at >= 0 else ""
        self._held = self._held[len(header) + len(_MESSAGE) :] if headed and at >= 0 else self._held
        self._header = self._fresh = False
        if (to := _TO.search(header)) and to[1] in self._functions:
            self._kind, self._gap = "arguments", ""
            self._tell("call", to[1])
        else:
            self._kind = "reasoning" if "<|channel|>analysis" in header else "content"
            self._gap = "\n\n" if self._kind in self._told else ""
        return bool(self._held)

    def _read_message(self, last: bool) -> bool:
        text = self._held
        at, mark = min(((text.find(mark), mark) for mark in _ENDS if mark in text), default=(-1, ""))
        kept = 0 if mark or last else max(beginning(text, mark) for mark in _ENDS)
        end = at if mark else len(text) - kept
        self._held = text[end + len(mark) :]
        if text[:end]:
            self._tell(self._kind, self._gap + text[:end])
            self._told.add(self._kind)
            self._gap = ""
        self._header = bool(mark)
        return bool(mark and self._held)
