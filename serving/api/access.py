"""Who may ask: keys, the names that a server is addressed by, and pages of other sites."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from ipaddress import ip_address

from ..live_routes import CHAT_PAGE
from .errors import APIError, quoted

_HEALTH, _METRICS = "/health", "/metrics"


@dataclass(frozen=True)
class Access:
    """What a request must show before its body is read. `/health` and the page at `/chat` need no key.

    keys          one of them must come with the request; without any, none is asked for
    open_metrics  `/metrics` asks for no key
    hosts         names that the header Host may have, in lower case; None admits any name
    origins       sites whose pages may read answers in a browser; `*` is any site
    """

    keys: tuple[str, ...] = ()
    open_metrics: bool = False
    hosts: frozenset[str] | None = None
    origins: tuple[str, ...] = ()

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raises a 403 for a wrong host, a 401 for a missing or wrong key."""
        host = headers.get(b"host", b"").decode("latin-1")
        if self.hosts is not None and path != _HEALTH and _name(host) not in self.hosts:
            raise APIError(403, f"the host {quoted(host)} is not served here: name it in --allowed-hosts")
        if self.guards(path):
            self._authorise(headers.get(b"authorization", b""))

    def guards(self, path: str) -> bool:
        """Whether a path asks for a key."""
        return bool(self.keys) and path not in (_HEALTH, CHAT_PAGE) and not (self.open_metrics and path == _METRICS)

    def _authorise(self, header: bytes) -> None:
        given = _digest(_key(header))
        # Every key is compared, in time that depends on none of them.
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
    """Names of a server that only its own machine can reach; None where `address` can be reached from elsewhere.

    A page on the web can have its own name resolve to 127.0.0.1 and then read from such a server (DNS rebinding). The
    browser still sends the page's name, which is not among these.
    """
    if not ip_address(address).is_loopback:
        return None
    return frozenset({"localhost", "127.0.0.1", "::1", address, host.lower()})


def _name(host: str) -> str:
    """The header Host without its port and the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _key(header: bytes) -> bytes:
    """The key in the header Authorization. A browser asks a person for it and sends it as the password of Basic."""
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
    """Keys of any length become equally long."""
    return hashlib.sha256(key).digest()
