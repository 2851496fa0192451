"""The pool of KV pages: which pages are free, and which cached pages match the prefix of a new sequence. A page holds
the keys and values of a fixed number of consecutive tokens.

Once finished steps have filled a page, it is identified by the hash of all tokens up to its end, so sequences with the
same prefix share pages. A shared page is never written again. A page without users stays in the cache until the memory
is needed for other tokens; the least recently used page is taken first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile

import numpy as np
from numpy.typing import ArrayLike

ROOT = b""  # the hash of an empty prefix


def page_hash(before: bytes, tokens: ArrayLike) -> bytes:
    """Return the hash of a prefix of whole pages: `tokens` are those of the last page, `before` is the hash without
    it."""
    return blake2b(before + np.asarray(tokens, np.int32).tobytes(), digest_size=16).digest()


class PagePool:
    """The KV pages with ids 0 to `pages` - 1. Each page counts its users, the sequences that read it."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._users = [0] * pages
        self._unknown = list(range(pages - 1, -1, -1))  # free pages without cached tokens
        self._unused: OrderedDict[int, None] = OrderedDict()  # free pages with cached tokens, least recently used first
        self._page: dict[bytes, int] = {}
        self._hash: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        return len(self._unknown) + len(self._unused)

    def take(self, count: int) -> list[int]:
        """Allocate `count` pages for one sequence and return their ids. The caller has checked that they are free."""
        taken = []
        for _ in range(count):
            if self._unknown:
                page = self._unknown.pop()
            else:
                page, _ = self._unused.popitem(last=False)
                del self._page[self._hash.pop(page)]
            self._users[page] = 1
            taken.append(page)
        return taken

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the cached pages of the longest known prefix, given a hash per page. To use them, call `share`."""
        return [self._page[key] for key in takewhile(self._page.__contains__, hashes)]

    def unused(self, pages: Sequence[int]) -> int:
        """Return how many of `pages` no sequence uses. Using them takes these pages from the free ones."""
        return sum(not self._users[page] for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """Add a user to each of the pages that `find` returned."""
        for page in pages:
            if not self._users[page]:
                del self._unused[page]
            self._users[page] += 1

    def learn(self, key: bytes, page: int) -> None:
        """Cache a full `page` under the hash `key` of its prefix. If a page with the same hash is cached already, the
        cache keeps that page and ignores the new one."""
        if key not in self._page and page not in self._hash:
            self._page[key], self._hash[page] = page, key

    def give(self, pages: Sequence[int]) -> None:
        """Release a sequence's pages, last page first, so that the end of a prefix is evicted before its beginning."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._hash:
                self._unused[page] = None
            else:
                self._unknown.append(page)

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._unknown.extend(self._unused)
        self._unused.clear()
        self._page.clear()
        self._hash.clear()
