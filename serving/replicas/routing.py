"""Chooses the replica that answers a request: one that has had the beginning of the request's prompt before, unless
that replica has too much to do.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from typing import TypeVar

import msgspec

R = TypeVar("R")
_BLOCK = 256  # bytes of a prompt; about 60 tokens of English, so a few pages of the KV cache
_MOST_BLOCKS = 128  # blocks of a prompt that are compared
_KEPT = 1 << 16  # blocks that are remembered for each replica


class _Prompted(msgspec.Struct):
    """The fields of a body that make up a prompt, as they were sent, in the order in which templates use them."""

    tools: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Prompted).decode


def prefix_of(body: bytes) -> list[bytes]:
    """A name for each beginning of the prompt in a request's body, the shortest first; none for a body without a
    prompt.

    Two bodies share as many names as their prompts share blocks from the start.
    """
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []  # the replica will say what is wrong with it
    raw = (fields.tools, fields.instructions, fields.messages, fields.prompt, fields.input)
    text = b"".join(bytes(field) for field in raw)[: _BLOCK * _MOST_BLOCKS]
    names, chain = [], hashlib.blake2b(digest_size=8)
    for start in range(0, len(text) - _BLOCK + 1, _BLOCK):
        chain.update(text[start : start + _BLOCK])
        names.append(chain.digest())
    return names


def choose(prefix: Sequence[bytes], known: Mapping[R, Container[bytes]], loads: Mapping[R, int], slack: int) -> R:
    """The replica to ask, among the keys of `loads`, which holds the number of requests at each replica.

    Of the replicas with at most `slack` requests more than the least loaded one, it is the replica that knows the
    longest part of the prefix. If several know equally much, it is the least loaded of these.
    """
    least = min(loads.values())
    fair = [replica for replica, load in loads.items() if load - least <= slack]

    def matched(replica: R) -> int:
        seen = known.get(replica, ())
        return next((number for number, name in enumerate(prefix) if name not in seen), len(prefix))

    return max(fair, key=lambda replica: (matched(replica), -loads[replica]))


class Seen:
    """The beginnings of the prompts that a replica had most recently."""

    def __init__(self, most: int = _KEPT) -> None:
        self._names: OrderedDict[bytes, None] = OrderedDict()
        self._most = most

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def add(self, prefix: Sequence[bytes]) -> None:
        for name in prefix:
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._most:
            self._names.popitem(last=False)
