"""KV pages: which are free, and which hold the tokens that a new sequence begins with.

A page that a finished step has filled is known by the hash of all tokens up to its end, so equal prefixes share pages.
A shared page is never written again. Pages that nobody uses stay known until they are taken for something else, the
longest unused first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

ROOT = b""  # what the hash of a first page continues


def page_hash(before: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a prefix that ends with a page of `tokens` and whose earlier pages hash to `before`."""
    return blake2b(before + array("i", tokens).tobytes(), digest_size=16).digest()


class PagePool:
    """Page ids 0..pages-1 with a count of users each."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._users = [0] * pages
        self._unknown = list(range(pages - 1, -1, -1))  # free, and nothing worth keeping in them
        self._unused: OrderedDict[int, None] = OrderedDict()  # free, but known; longest unused first
        self._page: dict[bytes, int] = {}
        self._hash: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        return len(self._unknown) + len(self._unused)

    def take(self, count: int) -> list[int]:
        """`count` pages of one's own; the caller has checked that they are free."""
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
        """The known pages of the longest prefix; they are not yet the caller's."""
        found: list[int] = []
        for key in hashes:
            page = self._page.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def unused(self, pages: Sequence[int]) -> int:
        """How many of `pages` nobody uses."""
        return sum(not self._users[page] for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """Use pages that `find` gave."""
        for page in pages:
            if not self._users[page]:
                del self._unused[page]
            self._users[page] += 1

    def learn(self, key: bytes, page: int) -> None:
        """`page` is full and its prefix hashes to `key`. Of equal pages the first is known."""
        if key not in self._page and page not in self._hash:
            self._page[key], self._hash[page] = page, key

    def give(self, pages: Sequence[int]) -> None:
        """Stop using a sequence's pages. Of one prefix, the end is forgotten before its beginning."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._hash:
                self._unused[page] = None
            else:
                self._unknown.append(page)

    def forget(self) -> None:
        """No page holds anything known any more."""
        self._unknown.extend(self._unused)
        self._unused.clear()
        self._page.clear()
        self._hash.clear()
