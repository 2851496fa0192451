"""Reads the answers of gpt-oss, whose text consists of messages for different readers (the format is called harmony).

A message has a header, which names its channel and, if it calls a function, the function:

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>
    <|start|>assistant<|channel|>final<|message|>TEXT<|return|>

An answer ends after a call or after the text. See https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from megakernel.serving.text.tool_calls import CallDelta, Parts, beginning

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
# How a header may begin. An answer that begins in another way has no header, for example because a grammar forces JSON.
_HEADERS = ("<|channel|>", "<|constrain|>", "<|start|>", _MESSAGE, " to=")
_MOST_HEADER = 300  # maximum characters of a header; longer ones are text of a confused model
_TO = re.compile(r"\bto=(?:functions\.)?([a-zA-Z0-9_.-]{1,64})")


class ChannelReader:
    """Splits a streamed answer into content, reasoning and calls of the functions `names`, at most `most` calls. A call
    of another function is content."""

    def __init__(self, names: Collection[str], most: int | None = None) -> None:
        self.calls = 0
        self._names, self._most = names, most
        self._held = ""  # text that is not classified yet
        self._header = True  # whether the next text belongs to a header
        self._fresh = True  # whether no header has been read
        self._into = "content"  # where the current message belongs: content, reasoning, call or surplus (left out)
        self._told: set[str] = set()  # where earlier text belonged
        self._gap = ""  # what separates the current message from an earlier one
        self._empty = False  # whether the current call has no arguments yet

    def add(self, text: str, reason: str | None = None) -> Parts:
        """Read more text. With the last text comes `reason`, the finish reason of the answer."""
        self._held += text
        found: dict[str, list[str]] = {"content": [], "reasoning": [], "surplus": []}
        calls: list[CallDelta] = []
        last = reason is not None
        while self._read_header(calls, last) if self._header else self._read_message(found, calls, last):
            pass
        if reason == "stop":
            self._end_call(calls)
        return Parts("".join(found["content"]), calls, "".join(found["reasoning"]))

    def _read_header(self, calls: list[CallDelta], last: bool) -> bool:
        """Read the header of a message. Returns whether more can be read now."""
        at = self._held.find(_MESSAGE)
        headed = not self._fresh or any(start.startswith(self._held[: len(start)]) for start in _HEADERS)
        if headed and at < 0 and len(self._held) <= _MOST_HEADER:
            if last:
                self._held = ""  # the answer was cut off in the header
            return False
        header = self._held[:at] if headed and at >= 0 else ""
        self._held = self._held[len(header) + len(_MESSAGE) :] if headed and at >= 0 else self._held
        self._header = self._fresh = False
        to = _TO.search(header)
        if to and to[1] in self._names and self.calls == self._most:
            self._into = "surplus"
        elif to and to[1] in self._names:
            self._into, self._empty, self.calls = "call", True, self.calls + 1
            calls.append(CallDelta(self.calls - 1, to[1]))
        else:
            self._into = "reasoning" if "<|channel|>analysis" in header else "content"
            self._gap = "\n\n" if self._into in self._told else ""
        return bool(self._held)

    def _read_message(self, found: dict[str, list[str]], calls: list[CallDelta], last: bool) -> bool:
        """Read a message up to its end. Returns whether more can be read now."""
        text = self._held
        at, mark = min(((text.find(mark), mark) for mark in _ENDS if mark in text), default=(-1, ""))
        kept = 0 if mark or last else max(beginning(text, mark) for mark in _ENDS)
        end = at if mark else len(text) - kept
        self._held = text[end + len(mark) :]
        if self._into == "call":
            if text[:end]:
                calls.append(CallDelta(self.calls - 1, None, text[:end]))
                self._empty = False
        elif text[:end]:
            found[self._into] += [self._gap, text[:end]]
            self._told.add(self._into)
            self._gap = ""
        if mark:
            self._end_call(calls)
            self._header = True
        return bool(mark and self._held)

    def _end_call(self, calls: list[CallDelta]) -> None:
        """End a call. Without arguments, they are an empty object."""
        if self._into == "call" and self._empty:
            calls.append(CallDelta(self.calls - 1, None, "{}"))
            self._empty = False
