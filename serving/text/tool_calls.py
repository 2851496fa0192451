"""Reads the tool calls in a model's text while it streams."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megakernel.serving.text import markup
from megakernel.serving.text.tool_formats import ToolFormat


@dataclass(slots=True)
class CallDelta:
    """A new piece of the call number `index` of an answer: first the function's name, then pieces of its arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


class Parts(NamedTuple):
    """What the new text of an answer consists of."""

    content: str
    calls: list[CallDelta]
    reasoning: str = ""


def rest_of_call(pieces: list[CallDelta]) -> int:
    """Return how many of the first pieces belong to a call that began in an earlier event. These pieces must be sent
    before content that arrived together with them, and the other pieces after it."""
    return next((at for at, piece in enumerate(pieces) if piece.name is not None), len(pieces))


def pieces_of(text: str) -> list[str]:
    """Divide a whole answer into pieces for a reader. A piece never has the end of a call and content after it, so that
    content and calls can be kept in their order, as in a stream."""
    return re.findall(r"[^}\]>]*[}\]>]|[^}\]>]+", text)


_SEPARATORS = " \n\r\t,;[]}"  # characters that models write around calls, besides the marks `begin` and `end`
_BARE = re.compile(r"\s*(\[\s*)?(?=\{)")  # before a call without `begin`
_BARE_BEGINNING = re.compile(r"\s*(\[\s*)?")
# A call as recent Mistral models write it: the function's name, and then the arguments.
_NAMED = re.compile(r"([a-zA-Z0-9_.-]{1,64})((?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*)(?=\{)")
_NAMED_BEGINNING = re.compile(r"[a-zA-Z0-9_.-]{1,64}(?:\[[\w\]\[]{0,80})?\s*")


class ToolReader:
    """Splits a streamed answer into content and calls of the functions `names`, at most `most` calls. Text that cannot
    be read as a call is content, without the marks (`begin` and `end` of the format) around it."""

    def __init__(self, form: ToolFormat, names: Collection[str], most: int | None = None) -> None:
        self.calls = 0
        self._form, self._names, self._most = form, names, most
        self._begin, self._end = form.begin.strip(), form.end.strip()
        self._marks = tuple(mark for mark in (self._begin, self._end) if len(mark) > 1)
        self._begins = (self._begin, markup.BEGIN) if form.each else (self._begin,)  # what calls may begin with
        self._held = ""  # text that is not classified yet, such as the start of a mark
        self._calling = False  # whether a call comes next
        self._opened = False  # whether `begin` was read, so that `end` may follow
        self._object: _Object | markup.MarkupCall | None = None
        self._fresh = True  # whether only white space has arrived so far
        self._said = False  # whether content (text outside of calls) has been returned since the last call
        self._space = ""  # white space that becomes content if more content follows

    def add(self, text: str, reason: str | None = None) -> Parts:
        """Read more text. Returns the text that is now known to be content, and new pieces of calls. With the last text
        comes `reason`, the finish reason of the answer, and everything that was held back is returned. If only brackets
        of the last call are missing, they are added, unless the answer was cut off (`length`)."""
        self._held += text
        content: list[str] = []
        deltas: list[CallDelta] = []
        last = reason is not None
        while self._held:
            if self._object is not None:
                going = self._read(self._object, content, deltas, last)
            elif self._calling:
                going = self._between(last)
            else:
                going = self._outside(content, last)
            if not going:
                break
        if last:
            if self._object is not None:
                self._object.end(reason or "stop")
                self._tell(self._object, content, deltas)
            if self._said:
                content.append(self._space)
        return Parts("".join(content), deltas)

    def _outside(self, content: list[str], last: bool) -> bool:
        """Read content up to the next mark (begin or end of calls). Returns whether more can be read now."""
        text = self._held
        if self._form.bare and self._fresh:
            if found := _BARE.match(text):
                self._begin_object(text[: found.end()], text[found.end() :], bare=True)
                return True
            if not last and _BARE_BEGINNING.fullmatch(text):
                return False
        marks = {*self._begins, *(self._marks if self._opened else ())}
        at, mark = min(((text.find(mark), mark) for mark in marks if mark in text), default=(-1, ""))
        if mark:
            self._give(text[:at], content)
            self._calling = mark in self._begins
            self._held = text[at if mark == markup.BEGIN else at + len(mark) :]
            self._opened = self._opened or self._calling
            return True
        kept = max(beginning(text, mark) for mark in marks)
        self._give(text[: len(text) - kept], content)
        self._held = text[len(text) - kept :]
        if last and kept == 1:  # a single character is content, but more characters are a mark that was cut off
            self._give(self._held, content)
        return False

    def _give(self, text: str, content: list[str]) -> None:
        """Emit content, but hold back trailing white space, because white space around calls is not content."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            content.append(shown)
            self._fresh, self._said = False, True

    def _between(self, last: bool) -> bool:
        """Read the text before and between calls. Returns whether more of the held text can be read now."""
        text, at = self._held, 0
        while at < len(text) and text[at] in _SEPARATORS and not _at_mark(text, at, self._marks):
            at += 1
        self._held = text = text[at:]
        if text.startswith("{"):
            self._begin_object("", text)
        elif text.startswith(markup.BEGIN):
            self._object = markup.MarkupCall(self._names)
        elif (found := _NAMED.match(text)) and found[1] in self._names:
            self._begin_object(found[0], text[found.end() :], name=found[1])
        elif not last and (
            _NAMED_BEGINNING.fullmatch(text) or _at_mark(text, 0, (*self._marks, *self._begins)) == "cut"
        ):
            return False
        elif text:
            self._calling = False
        return bool(self._held)

    def _begin_object(self, before: str, rest: str, *, bare: bool = False, name: str | None = None) -> None:
        keys = (self._form.arguments, "arguments", "parameters")
        self._held, self._object = rest, _Object(self._names, keys, self._marks, bare=bare, before=before, name=name)

    def _read(
        self, found: _Object | markup.MarkupCall, content: list[str], deltas: list[CallDelta], last: bool
    ) -> bool:
        used = found.add(self._held, last)
        self._held = self._held[used:]
        self._tell(found, content, deltas)
        return used > 0 or found.done

    def _tell(self, found: _Object | markup.MarkupCall, content: list[str], deltas: list[CallDelta]) -> None:
        """Append what is new of a call to `deltas`, or an object that turns out to be no call to `content`."""
        more = self._most is None or self.calls < self._most
        if found.is_call and (found.begun or more):
            if not found.begun:
                found.begun, self.calls, self._fresh, self._said, self._space = True, self.calls + 1, False, False, ""
                deltas.append(CallDelta(self.calls - 1, found.name))
            if new := "".join(found.arguments[found.told :]):
                deltas.append(CallDelta(self.calls - 1, None, new))
                found.told = len(found.arguments)
        if found.done:
            self._object = None
            if not found.is_call:
                self._give("".join(found.text), content)
            self._calling = found.is_call or (found.closed and not found.bare)


_STRING_END = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*"\s*(\S?)', re.DOTALL)
_NAME_KEYS = ("name", "function")
_OTHER_KEYS = (*_NAME_KEYS, "type", "id")
_ESCAPES = '"\\/bfnrtu'  # the characters that may follow a backslash in JSON


class _Object:
    """A JSON object that may describe a tool call, read character by character while it streams. A JSON parser would
    not do: arguments are passed on before they are complete, and models leave out brackets and write line breaks into
    strings, which JSON forbids.

    `text` is what has been read. `arguments` has the arguments as far as they are known, in pieces. `told` counts the
    pieces that the reader has returned, and `begun` says whether it has returned the name. `bare` says that nothing
    announced a call, so the object may be an answer in JSON. `closed` says that the last bracket has been read."""

    def __init__(
        self,
        names: Collection[str],
        keys: tuple[str, ...],
        marks: tuple[str, ...],
        *,
        bare: bool,
        before: str,
        name: str | None,
    ) -> None:
        """`keys` are the possible names of the member with the arguments, and `marks` end an object early. `before` is
        the beginning of the object, which was read already. If `name` is given, the object is the arguments of that
        function."""
        self.bare, self.name, self.text = bare, name, [before]
        self.arguments: list[str] = []
        self.told, self.begun, self.done, self.closed = 0, False, False, False
        self._names, self._keys, self._marks = names, keys, marks
        self._only_arguments = name is not None
        self._open = ["}"] * self._only_arguments  # the closing brackets that are still missing
        self._key = keys[0] if self._only_arguments else None  # the key of the value being read
        self._item: list[str] = []  # characters of the key or of the value that is being read
        self._comma = ""  # a comma and white space that are dropped if no value follows
        self._quoted = self._escaped = False
        self._inner = False  # whether the members are those of an object `function`, as in the OpenAI API
        self._strange = False  # whether there is a key of which nothing is known
        self._hopeless = False  # whether the text read so far cannot be a call

    @property
    def is_call(self) -> bool:
        return not self._hopeless and self.name in self._names and bool(self.arguments)

    def add(self, text: str, last: bool) -> int:
        """Read `text` up to the object's end, or up to a mark that may end it. Returns the number of characters read.
        The characters after them may begin a mark, so the caller must pass them again, followed by more text. If `text`
        is the `last`, they are a mark that was cut off."""
        for at, character in enumerate(text):
            if self.done:
                return at
            if (marked := self._marked(text, at, last)) is None:
                return at
            if len(self._open) == 1 and not self._quoted:
                # If the closing bracket is missing, the object ends at the end of a list or where no member can follow.
                marked = marked or character == "]"
                if not marked and self._key is None and character not in ' \n\r\t,:"}':
                    self.end("broken")
                    return at
            if marked:
                self.end("mark")
                return at
            self.text.append(character)
            self._take(character)
        return len(text)

    def _marked(self, text: str, at: int, last: bool) -> bool | None:
        """Whether a mark that ends the object begins here, outside of strings. None: the next text will tell."""
        if (mark := _at_mark(text, at, self._marks)) != "whole":
            return None if mark and (not last or len(text) - at > 1) else False
        if not self._quoted:
            return True
        end = _STRING_END.match(text, at)
        if end is None or not end[1]:
            return end is None if last else None
        return end[1] not in ",:}]"

    def _take(self, character: str) -> None:
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._item += self._in_string(character)
        elif len(self._open) == 1 and character in ",:}":
            if character != ":":
                self._end_value()
            elif self._key is None:
                self._key, self._item = _string(self._item), []
                if self.bare and not self.arguments and self._key not in (*self._keys, *_OTHER_KEYS):
                    self.done = self._hopeless = True
            if character == "}" and self._inner:
                self._inner = False
            elif character == "}":
                self._no_arguments()
                self.done = self.closed = True
        elif character in "}]":
            self._comma = ""
            while character in self._open[1:] and (closer := self._open.pop()):
                self._item.append(closer)
                if closer == character:
                    break
            if len(self._open) == 1:
                self._end_value()
        elif character == "{" and self._key == "function" and len(self._open) == 1:
            self._inner, self._key = True, None
        elif character == "," or (self._comma and character.isspace()):
            self._comma += character
        else:
            if character == "{" and len(self._open) == 1 and self._key in self._keys and not self.arguments:
                self._item = self.arguments
            self._item.append(self._comma + character)
            self._comma, self._quoted = "", character == '"'
            if character in "{[":
                self._open.append("}" if character == "{" else "]")
                self._item = self._item if len(self._open) > 1 else []

    def _in_string(self, character: str) -> str:
        """Return how to write the next character of a string. A backslash waits for the character after it, because
        models write escapes that JSON does not have, as in "C:\\Users" or "don\\'t"."""
        written = json.dumps(character)[1:-1] if character < " " else character
        if self._escaped and character != "'":
            written = ("\\" if character in _ESCAPES else "\\\\") + written
        self._escaped = character == "\\" and not self._escaped
        return "" if self._escaped else written

    def _end_value(self) -> None:
        """Process the value of a member whose end has been read: the function's name or its arguments."""
        item, key, self._item, self._key = self._item, self._key, [], None
        if item is self.arguments:
            self.done = self._only_arguments
        elif key in _NAME_KEYS and self.name is None:
            self.name = _string(item)
            self._hopeless = self.name not in self._names
            self.done = self.bare and self._hopeless
        elif key is not None and key not in (*self._keys, *_OTHER_KEYS):
            self._strange = True
        elif key in self._keys and not self.arguments:
            value = "".join(item).strip()
            value = _string(item) if value.startswith('"') else value
            if _is_object(value):
                self.arguments.append(value)
            elif value.strip() not in ("", "null", "[]"):
                self._hopeless, self.done = True, self.bare
            self._no_arguments()

    def _no_arguments(self) -> None:
        """If the call has no arguments, take them to be an empty object, unless an unknown key may have them."""
        self._hopeless = self._hopeless or (self._strange and not self.arguments)
        if not self.arguments:
            self.arguments.append("{}")

    def end(self, how: str) -> None:
        """End an object whose last bracket is missing, and add the brackets. `how` says where it ends:

        mark    at the text that ends a call, such as </tool_call>
        broken  at a character that cannot follow
        stop    at the end of the answer
        length  where max_tokens has cut off the answer: no brackets are added
        """
        self.done = True
        if how == "length":
            return
        if self._item is not self.arguments:
            self._end_value()
            if how == "mark" or (how == "stop" and not self.bare):
                self._no_arguments()
            return
        closers = "".join(reversed(self._open[1:]))
        for tail in ("", '"', "null", ": null", '": null') if how == "mark" else ("",):
            if _is_object("".join(self.arguments) + tail + closers):
                self.arguments.append(tail + closers)
                return


def _string(text: Iterable[str]) -> str:
    try:
        found = json.loads("".join(text))
    except (ValueError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _at_mark(text: str, at: int, marks: tuple[str, ...]) -> str:
    """Return whether a mark begins at position `at` of the text: "whole", "cut" by the end of the text, or "" for
    no."""
    if text.startswith(marks, at):
        return "whole"
    return "cut" if any(text[at : at + 1] == mark[0] and mark.startswith(text[at:]) for mark in marks) else ""


def beginning(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
