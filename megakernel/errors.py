"""The exception for all errors that users see. Its text says what failed, where, and what to do about it."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG


class MegakernelError(Exception):
    """Raised for invalid input or a failed operation. The command line prints its text as one line and exits with
    status 1.

    A text may contain names from files, so characters that would control a terminal are replaced by their codes.
    """

    def __str__(self) -> str:
        text = super().__str__()
        return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@contextmanager
def file_errors(task: str) -> Iterator[None]:
    """Turn an OSError in the `with` block into a MegakernelError: "cannot `task`" and the system's message."""
    try:
        yield
    except OSError as e:
        raise MegakernelError(f"cannot {task}: {e.strerror or e}") from e


def regular(path: Path) -> Path:
    """Return `path` if it is a regular file or a link to one, otherwise raise OSError. Reading a FIFO could wait
    forever, and reading a device may never end."""
    if not S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return path


@contextmanager
def whole_file(path: Path, what: str) -> Iterator[Path]:
    """Yield the path of a temporary file. It replaces `path` when the `with` block ends, so that nobody reads a partial
    file.

    If the disk is full, the old file stays and the temporary file is removed. Several processes may write `path` at
    once. A device is written directly. Raises MegakernelError, which says "cannot write `what`" and adds the system's
    message.
    """
    with file_errors(f"write {what}"):
        device = path.exists() and not path.is_file()
        part = path if device else path.with_name(f"{path.stem[:40]}.{secrets.token_hex(4)}.part")
        try:
            yield part
            if part != path:
                part.replace(path)
        except BaseException:
            if part != path:
                part.unlink(missing_ok=True)
            raise
