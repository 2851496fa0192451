"""Limits on what one request may ask for. The comment beside each limit gives its reason.

All work on the event loop delays every client, and so does every C call that does not release Python's global lock
(GIL). So the server checks the size of a body before it reads the body, the number of JSON values before it parses
them, and the size of a text before it tokenizes the text.
"""

from __future__ import annotations

from dataclasses import dataclass

BODY_SECONDS = 60.0  # Maximum seconds for a body to arrive. Until then, a slow client occupies memory.
LARGE_BODY = 1 << 18  # A body of more bytes takes milliseconds to parse, so short requests go first.
THREADS = 4  # Threads for tokenizing and detokenizing. There are few, because each holds the GIL part of the time.
TURNS = 4  # A large body waits this many event loop iterations, in which a short request can be answered.
MAX_PROMPTS = 2048  # Maximum prompts in a request, because each prompt needs its own queue entry.
MAX_MESSAGES = 2048  # Maximum messages in a conversation, because the chat template loops over them in Python.
MAX_PARTS = 1024  # Maximum parts of a message, because Python code joins the parts.

# Maximum number and length of stop strings. The server searches for all of them after every token.
MAX_STOPS, MAX_STOP_CHARACTERS = 64, 1024
MAX_VALUES = 1 << 17  # Parsing and validating this many JSON values takes tens of milliseconds.


@dataclass(frozen=True)
class Limits:
    """Limits of a server. `max_waiting` is the number of choices of one client that may wait for their first engine
    step.
    """

    max_waiting: int = 65536
    max_body: int = 16 << 20  # bytes
    request_timeout: float | None = None  # seconds until an answer must be complete
    stall_timeout: float = 120.0  # If the engine has work but no step ends for this many seconds, /health answers 503.
    max_bodies: int = 256 << 20  # maximum bytes of all bodies together; a body counts until its request is answered


def max_values(context: int) -> int:
    """Return the maximum number of JSON values in one body. It is also the maximum number of tokens in all prompts of a
    body together.

    The result is larger than the context length, so that one prompt may always fill the context.
    """
    return max(MAX_VALUES, context + 4096)


def has_more_values(body: bytes, most: int) -> bool:
    """Whether a JSON body has more than `most` values. The body is not parsed.

    Every array element and every object member follows a comma, `[` or `{`. So the function counts these characters
    outside of strings.
    """
    if _marks(body) < most:
        return False
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > 4 * most:  # A value needs at most four quotes: two around itself and two around its key.
        return True
    return _marks(b"".join(plain.split(b'"')[::2])) >= most


def _marks(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")
