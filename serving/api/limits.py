"""How much one request may ask for. Each limit has its reason beside it.

Everything that runs on the event loop delays every client, and so does every call into C that keeps the interpreter's
lock. So the size of a body is checked before it is read, the number of its JSON values before it is parsed, and the
size of a text before it is encoded.
"""

from __future__ import annotations

from dataclasses import dataclass

BODY_SECONDS = 60.0  # A slow client may hold its share of the memory for bodies no longer.
LARGE_BODY = 1 << 18  # bytes; to parse more than that takes milliseconds, and others have their turn before each.
THREADS = 4  # that make ids of text and text of ids; each holds the interpreter's lock for a part of its time
TURNS = 4  # of the event loop, in which a short request on a new connection is answered
MAX_PROMPTS = 2048  # Each prompt of a request has a queue entry of its own.
MAX_MESSAGES = 2048  # A template walks over every message in Python.
MAX_PARTS = 1024  # The parts of a message are joined in Python.
MAX_STOPS, MAX_STOP_CHARACTERS = 64, 1024  # Every new token is compared with every stop string.
MAX_VALUES = 1 << 17  # Parsing and validating so many JSON values takes some tens of milliseconds.


@dataclass(frozen=True)
class Limits:
    """What a server takes on. `max_waiting` counts choices of one client that wait for their first step."""

    max_waiting: int = 65536
    max_body: int = 16 << 20  # bytes
    request_timeout: float | None = None  # seconds until an answer must be complete
    stall_timeout: float = 120.0  # seconds with work and without a finished step, after which /health is 503
    max_bodies: int = 256 << 20  # bytes of all bodies together, from their first byte to the end of their answers


def max_values(context: int) -> int:
    """JSON values of one body, and tokens of all its prompts: always enough for one prompt that fills the context."""
    return max(MAX_VALUES, context + 4096)


def has_more_values(body: bytes, most: int) -> bool:
    """Whether a body of JSON has more than `most` values, found without parsing it.

    A value follows a comma, a bracket or a brace, unless it is the whole body. Those within strings do not count.
    """
    if _marks(body) < most:
        return False
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > 4 * most:  # A value has at most two strings: its name and itself.
        return True
    return _marks(b"".join(plain.split(b'"')[::2])) >= most


def _marks(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")
