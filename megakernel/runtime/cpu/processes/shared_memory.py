"""Memory that rank processes share. It has no name and disappears when the last process that maps it ends."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ....errors import MegakernelError

LINE = 64  # bytes of a cache line; each counter or array in shared memory starts at a new line
_PROT_NONE, _PROT_READ_WRITE = 0, 1 | 2


def create(what: str, size: int) -> int:
    """Create an anonymous file of `size` zero bytes and return its descriptor. Every page is
    allocated, so that later accesses cannot fail with a signal.

    Raises MegakernelError if the system has no room or no anonymous files.
    """
    if not hasattr(os, "memfd_create"):
        raise MegakernelError("rank processes need Linux's anonymous files: use thread ranks on this system")
    try:
        fd = os.memfd_create(f"megakernel {what}", os.MFD_CLOEXEC)
    except OSError as e:
        raise MegakernelError(f"cannot make shared memory for {what}: {e.strerror}; use thread ranks") from e
    try:
        os.posix_fallocate(fd, 0, max(size, 1))
    except OSError as e:
        os.close(fd)
        raise MegakernelError(
            f"{size / 2**20:.1f} MiB of shared memory for {what} could not be allocated ({e.strerror}): "
            "use thread ranks, fewer ranks or a shorter context"
        ) from e
    return fd


class Mapping:
    """A shared file, mapped into this process as long as this object or an array of it exists. The
    constructor closes `fd`.

    `window` marks another rank's memory in a process whose stores are audited. The host may access this
    memory only inside `opened`.
    """

    def __init__(self, fd: int, *, window: bool = False) -> None:
        try:
            self._map = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        self.size = len(self._map)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.address = int(self._bytes.ctypes.data)
        self._window = window
        if window:
            self._protect(_PROT_NONE)

    def array(self, offset: int, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return a view of the elements that start at byte `offset`."""
        kind = np.dtype(dtype)
        end = offset + int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        return self._bytes[offset:end].view(kind).reshape(shape)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """A context in which the host may access this memory even if it is a window."""
        if self._window:
            self._protect(_PROT_READ_WRITE)
        try:
            yield
        finally:
            if self._window:
                self._protect(_PROT_NONE)

    def _protect(self, protection: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size), protection):
            raise MegakernelError(f"cannot protect another rank's memory: {os.strerror(ctypes.get_errno())}")


def aligned(size: int) -> int:
    """`size` bytes rounded up to whole cache lines."""
    return -(-size // LINE) * LINE
