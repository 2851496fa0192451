"""Limits on what one request may ask for. Each limit has its reason beside it.

All work on the event loop delays every client, and so does every C call that does not release Python's global lock
(GIL). So the server checks the size of a body before it reads it, the number of JSON values before it parses them, and
the size of a text before it encodes it.
"""

from __future__ import annotations

from dataclasses import dataclass

BODY_SECONDS = 60.0  # Maximum time for a body to arrive: a slow client occupies memory for bodies until then.
LARGE_BODY = 1 << 18  # Bytes. A larger body takes milliseconds to parse, so other requests have their turn before it.
THREADS = 4  # Threads that tokenize and detokenize. Each holds the GIL for a part of its time.
TURNS = 4  # Event loop iterations that a short request on a new connection takes to get its answer.
MAX_PROMPTS = 2048  # Each prompt has its own queue entry.
MAX_MESSAGES = 2048  # A template walks over every message in Python.
MAX_PARTS = 1024  # The parts of a message are joined in Python.
MAX_STOPS, MAX_STOP_CHARACTERS = 64, 1024  # Every new token is compared with every stop string.
MAX_VALUES = 1 << 17  # Parsing and validating so many JSON values takes some tens of milliseconds.


@dataclass(frozen=True)
class Limits:
    """Limits of a server. `max_waiting` is how many choices of one client may wait for their first step."""

    max_waiting: int = 65536
    max_body: int = 16 << 20  # bytes
    request_timeout: float | None = None  # seconds until an answer must be complete
    stall_timeout: float = 120.0  # seconds with work but without a finished step until /health answers 503
    max_bodies: int = 256 << 20  # bytes of all bodies together; a body counts until its request is answered


def max_values(context: int) -> int:
    """Maximum JSON values of one body, and maximum tokens of all its prompts.

    One prompt may always fill the context.
    """
    return max(MAX_VALUES, context + 4096)


def has_more_values(body: bytes, most: int) -> bool:
    """Whether a JSON body has more than `most` values, found without parsing it.

    Every value but the outermost follows a comma, a bracket or a brace. So the function counts
    these characters outside of strings.
    """
    if _marks(body) < most:
        return False
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > 4 * most:  # A value has at most four quotes: its key's and its own.
        return True
    return _marks(b"".join(plain.split(b'"')[::2])) >= most


def _marks(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")
