"""Lets another server continue an answer when the server that gave it is lost.

Results do not depend on the batch, so a server that gets the same request with the same random seed generates the same
tokens, bit for bit. The front, which passes requests to servers, adds the header HEADER to each request, with a
`Replay`. A server honours the header only with the key in the environment variable KEY, which only the front's
processes know.

Such an answer has separate events for each token, so the events do not depend on how many tokens arrive at once. After
the events of a token comes a mark with the number of the choice. By counting the marks, the front knows which tokens
the client has. A server that gets the request again leaves out the events of these tokens."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar

import msgspec

from megakernel.serving.server.client import Delta

HEADER, KEY = "x-megakernel-replay", "MEGAKERNEL_REPLAY_KEY"
# A mark is an SSE comment with the choice of the events before it. JSON has no line breaks, so no event contains one.
MARK = re.compile(rb"^:(\d+)\n\n", re.MULTILINE)


class Replay(msgspec.Struct):
    """What servers need to give the same answer: `seed`, from which random numbers and ids are derived, and the time
    `created`. `given` has, by choice, the number of tokens whose events the client already has."""

    seed: int
    created: int
    given: dict[int, int] = {}

    def header(self, key: str) -> str:
        return f"{key} {msgspec.json.encode(self).decode()}"


class Replayed:
    """An answer that begins after the tokens that the client already has."""

    def __init__(self, asked: Replay) -> None:
        self.seed, self.created, self._given = asked.seed, asked.created, asked.given
        self._passed: Counter[int] = Counter()  # choice -> number of its tokens generated so far
        self._at, self._ids = "", 0  # the current token, and the number of ids that its events have so far

    def events(self, make: Callable[[Delta], bytes], delta: Delta) -> bytes:
        """Return the stream events for a choice's next token, `delta`, followed by a mark. Return nothing if the client
        has this token already. `make` makes the events and is called in both cases, because later events depend on
        earlier ones."""
        self._passed[delta.index] += 1
        count = self._passed[delta.index]
        self._at, self._ids = f"{delta.index} {count}", 0
        events = make(delta)
        return b"" if count <= self._given.get(delta.index, 0) else b"%s:%d\n\n" % (events, delta.index)

    def new_id(self) -> str:
        """Return an id that depends on the seed and the current token only."""
        self._ids += 1
        return hashlib.blake2b(f"{self.seed} {self._at} {self._ids}".encode(), digest_size=12).hexdigest()


REPLAYED: ContextVar[Replayed | None] = ContextVar("replayed", default=None)  # of the request being answered


def replayed(header: bytes | None) -> Replayed | None:
    """Return the `Replayed` that the value of HEADER asks for, or None without the header or with a wrong key."""
    key, _, asked = (header or b"").partition(b" ")
    known = os.environ.get(KEY, "").encode()
    if not known or not hmac.compare_digest(key, known):
        return None
    return Replayed(msgspec.json.decode(asked, type=Replay))


def new_id() -> str:
    """Return the id of an answer or of a part of it: 24 random hexadecimal digits."""
    asked = REPLAYED.get()
    return asked.new_id() if asked else secrets.token_hex(12)


def created() -> int:
    """Return the time at which the request that is being answered began, in seconds since 1970."""
    asked = REPLAYED.get()
    return asked.created if asked else int(time.time())
