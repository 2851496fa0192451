"""Text of a growing token sequence, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """What `Tokenizer.stream()` gives: text that never ends inside a UTF-8 character."""

    def add(self, token: int) -> str: ...
    def finish(self) -> str: ...


class TextStream:
    """Collects decoded text. `text` is all of it, cut before the first stop string; `take` what is new and certain."""

    def __init__(self, decoder: Decoder, stop: Sequence[str]) -> None:
        self.text = ""
        self.stopped = False
        self._decoder, self._stop = decoder, stop
        self._shown = 0

    def add(self, token: int, search: bool = True) -> None:
        """Append a token. `search` looks for stop strings that end in its text."""
        self._append(self._decoder.add(token), search)

    def finish(self, search: bool = True) -> None:
        """No more tokens: text that was held back as half a character comes out."""
        if not self.stopped:
            self._append(self._decoder.finish(), search)

    def take(self, final: bool) -> str:
        """Text not yet given out, less a tail that may still become a stop string unless `final`."""
        held = 0 if final else self._partial_stop()
        end = max(self._shown, len(self.text) - held)
        new = self.text[self._shown : end]
        self._shown = end
        return new

    def _append(self, piece: str, search: bool) -> None:
        before = len(self.text)
        self.text += piece
        if not search or not piece:
            return
        found = [self.text.find(s, max(0, before - len(s) + 1)) for s in self._stop]
        starts = [at for at in found if at >= 0]
        if starts:
            self.text = self.text[: min(starts)]
            self.stopped = True

    def _partial_stop(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(s.startswith(tail) for s in self._stop):
                return length
        return 0
