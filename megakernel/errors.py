"""The one exception that a user sees: a sentence that says what failed, where, and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class MegakernelError(Exception):
    """Bad input or a failed operation. The command line prints its text as one line and exits with 1.

    A file may have named what an error names. So characters that a terminal would obey are shown as their codes.
    """

    def __str__(self) -> str:
        text = super().__str__()
        return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@contextmanager
def file_errors(task: str) -> Iterator[None]:
    """Raises MegakernelError for an OSError in the block: "cannot `task`", and what the system says."""
    try:
        yield
    except OSError as e:
        raise MegakernelError(f"cannot {task}: {e.strerror or e}") from e


@contextmanager
def whole_file(path: Path, what: str) -> Iterator[Path]:
    """A file to write, which takes the place of `path` when the block ends: a reader never sees half of it.

    Where the disk is full, what was there stays, and nothing else is left. A device is written itself. Raises
    MegakernelError: "cannot write `what`", and what the system says.
    """
    part = path if path.exists() and not path.is_file() else path.with_name(path.name + ".part")
    with file_errors(f"write {what}"):
        try:
            yield part
            if part != path:
                part.replace(path)
        except BaseException:
            if part != path:
                part.unlink(missing_ok=True)
            raise
