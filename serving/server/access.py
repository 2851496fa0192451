"""Access control: API keys, allowed Host headers, and allowed origins of web pages."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from ipaddress import ip_address

from megakernel.serving.server.errors import APIError, quoted
from megakernel.serving.server.routes.live import CHAT_PAGE

_HEALTH, _METRICS = "/health", "/metrics"


@dataclass(frozen=True)
class Access:
    """The conditions that a request must meet before its body is read. `/health` and `/chat` never need a key.

    keys          API keys, one of which the request must carry; if empty, no key is needed
    open_metrics  whether `/metrics` is readable without a key
    hosts         allowed values of the Host header, in lower case and without the port; None allows any
    origins       websites whose pages may read the answers in a browser (CORS); `*` means any website
    """

    keys: tuple[str, ...] = ()
    open_metrics: bool = False
    hosts: frozenset[str] | None = None
    origins: tuple[str, ...] = ()

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise a 403 for a Host header that is not allowed, and a 401 for a missing or wrong key."""
        host = headers.get(b"host", b"").decode("latin-1")
        if self.hosts is not None and path != _HEALTH and _name(host) not in self.hosts:
            raise APIError(
                403, f"the Host header {quoted(host)} is not allowed: add this name to the server's --allowed-hosts"
            )
        if self.guards(path):
            self._authorise(headers.get(b"authorization", b""))

    def guards(self, path: str) -> bool:
        """Whether a path requires a key."""
        return bool(self.keys) and path not in (_HEALTH, CHAT_PAGE) and not (self.open_metrics and path == _METRICS)

    def _authorise(self, header: bytes) -> None:
        given = _digest(_key(header))
        # Compare with every key in constant time, so that the response time reveals nothing about the keys.
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        if not any(matches):
            raise APIError(
                401,
                "the API key is missing or wrong: send the header Authorization: Bearer KEY",
                headers={"WWW-Authenticate": 'Bearer, Basic realm="megakernel"'},
            )

    @cached_property
    def _digests(self) -> list[bytes]:
        return [_digest(key.encode()) for key in self.keys]


def local_names(host: str, address: str) -> frozenset[str] | None:
    """Return the Host names that a server on a loopback address accepts, or None if other machines can reach `address`.

    A malicious web page can make its own domain name resolve to 127.0.0.1 and then read from a local server (DNS
    rebinding). The browser still sends that domain name in the Host header, so the server can refuse the request.
    """
    if not ip_address(address).is_loopback:
        return None
    return frozenset({"localhost", "127.0.0.1", "::1", address, host.lower()})


def _name(host: str) -> str:
    """Return the Host header without the port and without the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _key(header: bytes) -> bytes:
    """Return the key in the Authorization header. Browsers use the Basic scheme, in which the password is the key."""
    scheme, _, value = header.partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


def _digest(key: bytes) -> bytes:
    """Return the hash of a key. All hashes have the same length, so comparing them reveals no key's length."""
    return hashlib.sha256(key).digest()
