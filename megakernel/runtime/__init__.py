"""Launching programs: step tables, and one module per executor."""

from __future__ import annotations

from ..errors import MegakernelError
from ..isa import Dims, Dtype
from ..model.checkpoint import Checkpoint
from .backend import Backend, Launch, Output
from .step import Chunk, SampleRow, build_step, check_step

BACKENDS = ("auto", "reference", "cpu", "cuda", "null")

__all__ = ["BACKENDS", "Backend", "Chunk", "Launch", "Output", "SampleRow", "build_step", "check_step", "create"]


def create(
    name: str, checkpoint: Checkpoint, dims: Dims, pages: int, *, dtype: Dtype, threads: int | None = None
) -> Backend:
    """The backend `name` (one of BACKENDS; auto is cpu) with the checkpoint's weights and a KV pool of `pages` pages.

    `threads` defaults to the cores this process may use; the reference backend has one. `null` is the CPU backend
    without arithmetic. Raises MegakernelError for a backend that is unknown or not in this build.
    """
    if name == "reference":
        from .reference import ReferenceBackend

        return ReferenceBackend(checkpoint, dims, pages, dtype=dtype)
    if name in ("auto", "cpu", "null"):
        from .cpu import CpuBackend

        return CpuBackend(checkpoint, dims, pages, dtype=dtype, threads=threads, null=name == "null")
    if name == "cuda":
        raise MegakernelError("this build has no CUDA backend yet: use cpu")
    raise MegakernelError(f"unknown backend {name!r}: known are {', '.join(BACKENDS)}")
