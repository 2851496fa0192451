"""The conditions that a request must meet: API keys, allowed values of the Host header, and limits on its size.

The comment beside each limit gives its reason. All work on the event loop delays every client, and so does every C call
that does not release Python's global lock (GIL). So the server checks in advance: the size of a body before it reads
the body, the number of JSON values before it parses them, and the size of a text before it tokenizes the text."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from ipaddress import ip_address

from megakernel.serving.server.errors import APIError, quoted

BODY_SECONDS = 60.0  # Maximum seconds for a body to arrive. Until then, a slow client occupies memory.
LARGE_BODY = 1 << 18  # A body of more bytes takes milliseconds to parse, so short requests go first.
THREADS = 4  # Threads for tokenizing and detokenizing. There are few, because each holds the GIL part of the time.
TURNS = 4  # a large body waits this many iterations of the event loop, in which short requests can be answered
MAX_PROMPTS = 2048  # Maximum prompts in a request, because each prompt needs its own queue entry.
MAX_MESSAGES = 2048  # Maximum messages in a conversation, because the chat template loops over them in Python.
MAX_TOOLS = 128  # maximum functions in a request, and calls in a message: the OpenAI API's limit
MAX_PARTS = 1024  # Maximum parts of a message, because Python code joins the parts.

# Maximum number and length of stop strings. The server searches for all of them after every token.
MAX_STOPS, MAX_STOP_CHARACTERS = 64, 1024
# Maximum log-probabilities of an answer, which has about 50 bytes for each of them. Maximum stop strings of a request,
# where each string counts once per choice.
MAX_LOGPROBS, MAX_WATCHED = 1 << 20, 1 << 14
MAX_VALUES = 1 << 17  # Parsing and validating this many JSON values takes tens of milliseconds.

# The chat page is served without an API key, because the page asks its user for the key.
CHAT_PAGE, _HEALTH, _METRICS = "/chat", "/health", "/metrics"
_OPEN = {_HEALTH, "/", CHAT_PAGE}  # paths that need no key

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+(?:%\w+)?)\]|([^][\s:/?#@]*))(?::[0-9]*)?")


@dataclass(frozen=True)
class Limits:
    """Limits of a frontend, the process that serves HTTP."""

    max_body: int = 16 << 20  # bytes
    request_timeout: float | None = None  # seconds until an answer must be complete
    stall_timeout: float = 120.0  # If the engine has work but no step ends for this many seconds, /health answers 503.
    max_bodies: int = 256 << 20  # maximum bytes of all bodies together; a body counts until its request is answered


def max_values(context: int) -> int:
    """Return the maximum number of JSON values in one body, which is also the maximum number of tokens of all its
    prompts together. The result is larger than the context length, so that one prompt may always fill the context."""
    return max(MAX_VALUES, context + 4096)


def has_more_values(body: bytes, most: int) -> bool:
    """Whether a JSON body has more than `most` values. The body is not parsed. Every array element and every object
    member follows a comma, `[` or `{`. So the function counts these characters outside of strings."""
    if _marks(body) < most:
        return False
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > 4 * most:  # A value needs at most four quotes: two around itself and two around its key.
        return True
    return _marks(b"".join(plain.split(b'"')[::2])) >= most


def _marks(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


@dataclass(frozen=True)
class AccessRules:
    """The conditions that a request must meet before its body is read. Paths in _OPEN never need a key."""

    keys: tuple[str, ...] = ()  # API keys, one of which the request must carry; if empty, no key is needed
    open_metrics: bool = False  # whether `/metrics` is readable without a key
    hosts: frozenset[str] | None = None  # allowed Host headers, in lower case and without the port; None allows any
    origins: tuple[str, ...] = ()  # websites whose pages may read the answers in a browser (CORS); `*`: any

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Check the Host header and the API key. Raises a 400 for an invalid header. Raises a 403 for a host name
        that is not allowed. Raises a 401 for a missing or wrong key."""
        name = _name(host := headers.get(b"host", b"").decode("latin-1"))
        # Browsers always send the header. The checks of some balancers leave it out.
        if self.hosts is not None and b"host" in headers and path != _HEALTH and name not in self.hosts:
            told = f"the Host header {quoted(host)} is not allowed: add this name to the server's --allowed-hosts"
            raise APIError(403, told)
        if not self.guards(path):
            return
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        sent = (bearer.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b""))
        # Compare with every key in constant time, so that the response time reveals nothing about the keys.
        matches = [hmac.compare_digest(_digest(given), known) for given in sent for known in self._digests]
        if not any(matches):
            told = "the API key is missing or wrong: send the header Authorization: Bearer KEY or x-api-key: KEY"
            raise APIError(401, told, headers={"WWW-Authenticate": "Bearer"})

    def guards(self, path: str) -> bool:
        return bool(self.keys) and path not in _OPEN and not (self.open_metrics and path == _METRICS)

    @cached_property
    def _digests(self) -> list[bytes]:
        return [_digest(key.encode()) for key in self.keys]


def local_names(host: str, address: str) -> frozenset[str] | None:
    """Return the Host names that a server on a loopback address accepts, or None if other machines can reach `address`.
    A malicious web page can make its own domain name resolve to 127.0.0.1 and then read from a local server (DNS
    rebinding). The browser still sends that domain name in the Host header, so the server can refuse the request."""
    if not ip_address(address).is_loopback:
        return None
    return frozenset({"localhost", "127.0.0.1", "::1", address, host.lower()})


def _name(host: str) -> str:
    """Return the Host header without the port and without the brackets of an IPv6 address. Raises a 400 if anything
    else surrounds the name."""
    if (found := _HOST.fullmatch(host)) is None:
        raise APIError(400, f"the Host header {quoted(host)} must be a host name, with or without a port")
    return (found[1] or found[2]).lower()


def _digest(key: bytes) -> bytes:
    """Return the hash of a key. All hashes have the same length, so comparing them reveals no key's length."""
    return hashlib.sha256(key).digest()
