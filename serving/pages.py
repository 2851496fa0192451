"""Which KV pages are free."""

from __future__ import annotations

from collections.abc import Sequence


class PagePool:
    """A free list of page ids 0..pages-1, last freed first taken."""

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages; the caller has checked that they are there."""
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken[::-1]

    def give(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))
