"""Chooses the replica that answers a request: one that has already answered a prompt with the same beginning, unless it
has many more requests than the others."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from typing import TypeVar

import msgspec

R = TypeVar("R")
_BLOCK = 256  # prompts are compared in blocks of this many bytes, which are about 60 English tokens or a few KV pages
_MOST_BLOCKS = 128  # maximum number of blocks of a prompt that are compared
_KEPT = 1 << 16  # number of blocks that are remembered for each replica


class _Prompted(msgspec.Struct):
    """The raw JSON of the request fields that make up a prompt, in the order in which templates use the fields."""

    tools: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Prompted).decode


def prefix_of(body: bytes) -> list[bytes]:
    """Return hashes of the beginnings of the prompt in a request's body, the shortest beginning first. Hash i is that
    of the first i blocks of _BLOCK bytes. If two prompts begin with the same k blocks, the first k hashes of both are
    equal. A body without a prompt gives an empty list."""
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []  # any replica will do, because its server reports what is wrong with the body
    raw = (fields.tools, fields.instructions, fields.messages, fields.prompt, fields.input)
    text = b"".join(bytes(field) for field in raw)[: _BLOCK * _MOST_BLOCKS]
    names, chain = [], hashlib.blake2b(digest_size=8)
    for start in range(0, len(text) - _BLOCK + 1, _BLOCK):
        chain.update(text[start : start + _BLOCK])
        names.append(chain.digest())
    return names


def choose(prefix: Sequence[bytes], known: Mapping[R, Container[bytes]], loads: Mapping[R, int], slack: int) -> R:
    """Return the replica that should answer a request with the hashes `prefix` (see `prefix_of`). `known` holds the
    hashes of the prompts that each replica has answered, and `loads` the number of requests at each replica.

    Only replicas with at most `slack` requests more than the least loaded one are considered. Of these, the result is
    the one that knows the longest part of the prompt or, of several such replicas, the least loaded one."""
    least = min(loads.values())
    fair = [replica for replica, load in loads.items() if load - least <= slack]

    def matched(replica: R) -> int:
        seen = known.get(replica, ())
        return next((number for number, name in enumerate(prefix) if name not in seen), len(prefix))

    return max(fair, key=lambda replica: (matched(replica), -loads[replica]))


def remember(seen: OrderedDict[bytes, None], prefix: Sequence[bytes], most: int = _KEPT) -> None:
    """Add the hashes `prefix` to the `most` hashes that one replica has answered most recently (see `prefix_of`)."""
    for name in prefix:
        seen[name] = None
        seen.move_to_end(name)
    while len(seen) > most:
        seen.popitem(last=False)
