"""Reads the tool calls in a model's text while it streams. The grammar of `tool_formats.py` constrains a call once it
has begun, so the call has exactly the form of that grammar. Text in another form is content."""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from megakernel.serving.text import markup
from megakernel.serving.text.tool_formats import ToolFormat

Functions = Mapping[str, Any]  # name of a function that may be called -> JSON schema of its parameters, or None


class Piece(NamedTuple):
    """A new piece of an answer: more of its `content` or `reasoning`, the name of the function of a new `call`, or more
    of the `arguments` of the last call."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str


class Reader(ABC):
    """Splits an answer into pieces. It finds calls of `functions`, and leaves out all calls after the first `most`.
    `calls` counts the calls that are not left out. The joined pieces do not depend on how much text each `add` gets."""

    def __init__(self, functions: Functions, most: int | None = None) -> None:
        self.calls = 0
        self._functions, self._most = functions, most
        self._held = ""  # text that is not classified yet, such as the start of a mark
        self._surplus = False  # whether the last call is left out
        self._pieces: list[Piece] = []

    def add(self, text: str, reason: str | None = None) -> list[Piece]:
        """Read more text, and return the new pieces of the answer, in order. `reason`, the finish reason of the answer,
        is given with the last text. Then all text that was held back is returned too."""
        self._held += text
        self._pieces = []
        while self._read(last=reason is not None):
            pass
        return self._pieces

    def content(self, text: str, reason: str | None = None) -> str:
        """Read more text as `add` does, and return only the text for the user."""
        return "".join(piece.text for piece in self.add(text, reason) if piece.kind == "content")

    @abstractmethod
    def _read(self, *, last: bool) -> bool:
        """Read a part of the held text. Returns whether more can be read before new text arrives."""

    def _tell(self, kind: Literal["content", "reasoning", "call", "arguments"], text: str) -> None:
        """Add a piece, or extend the last one."""
        if kind == "call":
            self._surplus = self.calls == self._most
            self.calls += not self._surplus
        if not text or (self._surplus and kind in ("call", "arguments")):
            return
        if kind != "call" and self._pieces and self._pieces[-1].kind == kind:
            text = self._pieces.pop().text + text
        self._pieces.append(Piece(kind, text))


_SEPARATORS = " \n\r\t,;]"  # characters between two calls, besides the marks `begin` and `end`
_NAME = r"([a-zA-Z0-9_.-]{1,64})"
_KIND = r'(?:\s*"type"\s*:\s*"function"\s*,)?'
_JSON_HEAD = re.compile(
    rf'\s*(?:\[\s*)?\{{{_KIND}\s*"name"\s*:\s*"{_NAME}"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
_JSON_BEGINS = '{"name":"', '{"type":"function","name":"'  # without white space
_TAG_HEAD = re.compile(rf"\s*{markup.BEGIN}{_NAME}>")
# A call as recent Mistral models write it: the function's name, and then the arguments.
_NAMED_HEAD = re.compile(rf"{_NAME}(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{{)")
_MOST_HEAD = 300  # maximum characters of a call before its arguments


class CallReader(Reader):
    """Reads answers in which fixed texts (marks) surround each call or all calls. A call is in JSON or in tags."""

    def __init__(self, form: ToolFormat, functions: Functions, most: int | None = None) -> None:
        super().__init__(functions, most)
        self._form, self._end = form, form.end.strip()
        self._state = self._outside
        self._fresh = True  # whether only white space has arrived so far
        self._opened = False  # whether a mark began calls, so that `end` is a mark too
        self._space = ""  # white space that becomes content if more content follows
        self._said = False  # whether content has been told since the last call
        self._depth, self._quoted, self._escaped = 0, False, False  # of the arguments read so far
        self._closes = False  # whether a bracket follows the arguments
        self._tags: markup.Tags | None = None

    def _read(self, *, last: bool) -> bool:
        more = self._state(last)
        if last and not more and self._said:
            self._tell("content", self._space)
            self._space = ""
        return more

    def _outside(self, last: bool) -> bool:
        """Read content up to the next mark, a fixed text that begins or ends calls."""
        text = self._held
        if self._form.bare and self._fresh and (begun := "".join(text[:60].split())):
            if begun.startswith(_JSON_BEGINS):
                self._state = self._head
                return True
            if not last and any(head.startswith(begun) for head in _JSON_BEGINS):
                return False
        marks = (*self._form.marks, *((self._end,) if self._opened and self._end else ()))
        at, mark = min(((text.find(mark), mark) for mark in marks if mark in text), default=(-1, ""))
        if mark:
            self._give(text[:at])
            self._held = text[at if mark == markup.BEGIN else at + len(mark) :]
            self._opened = mark != self._end
            self._state = self._head if self._opened else self._outside
            return True
        kept = max(beginning(text, mark) for mark in marks)
        # At the end of an answer, the first character of a mark is content, but several are a cut-off mark and dropped.
        shown = len(text) - kept + (kept if last and kept == 1 else 0)
        self._give(text[:shown])
        self._held = text[shown:]
        return False

    def _give(self, text: str) -> None:
        """Report content, but hold back trailing white space, because white space around calls is not content."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._tell("content", shown)
            self._fresh, self._said = False, True

    def _head(self, last: bool) -> bool:
        """Read a call up to its arguments, or find that the text is no call."""
        text = self._held
        for head in (_JSON_HEAD, _TAG_HEAD, _NAMED_HEAD):
            if (found := head.match(text)) and found[1] in self._functions:
                self._tell("call", found[1])
                self._held, self._space = text[found.end() :], ""
                self._fresh = self._said = False
                self._depth, self._closes = 0, head is _JSON_HEAD
                self._tags = markup.Tags(self._functions[found[1]]) if head is _TAG_HEAD else None
                self._state = self._arguments
                return True
        if not last and len(text) < _MOST_HEAD:
            return False
        self._state = self._outside
        self._give(text[:1])  # otherwise this character would begin the same call again
        self._held = text[1:]
        return bool(text)

    def _arguments(self, last: bool) -> bool:
        if self._tags:
            used, told, done = self._tags.read(self._held)
            self._tell("arguments", told)
        else:
            used, done = self._object_end()
            self._tell("arguments", self._held[:used])
        self._held = self._held[used:]
        if done:
            self._state = self._after
        return done

    def _object_end(self) -> tuple[int, bool]:
        """Return how many characters of the held text belong to a JSON object, and whether it ends there."""
        for at, character in enumerate(self._held):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._quoted = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if not self._depth:
                    return at + 1, True
        return len(self._held), False

    def _after(self, last: bool) -> bool:
        """Read the text between a call and the next one."""
        text = self._held.lstrip("}" + _SEPARATORS if self._closes else _SEPARATORS)
        self._held = text
        if self._end and text.startswith(self._end):
            self._held, self._opened = text[len(self._end) :], False
            return True
        if not text or (not last and any(mark.startswith(text) for mark in (self._end, *self._form.marks))):
            return False
        self._state = self._head if text[0] == "{" else self._outside
        return True


def beginning(text: str, mark: str, most: int = sys.maxsize) -> int:
    """Return the length of the longest suffix of `text`, at most `most`, that is a proper prefix of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text), most), 0, -1) if mark.startswith(text[-n:])), 0)
