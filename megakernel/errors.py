"""The one exception that a user sees: a sentence that says what failed, where, and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MegakernelError(Exception):
    """Bad input or a failed operation. The command line prints its text as one line and exits with 1."""


@contextmanager
def file_errors(task: str) -> Iterator[None]:
    """Raises MegakernelError for an OSError in the block: "cannot `task`", and what the system says."""
    try:
        yield
    except OSError as e:
        raise MegakernelError(f"cannot {task}: {e.strerror}") from e
