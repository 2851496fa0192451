"""Launching programs: step tables, and one module per executor."""

from __future__ import annotations

from ..errors import MegakernelError
from ..isa import Dims, Dtype
from ..model.checkpoint import Checkpoint
from ..settings import SETTINGS
from .backend import Backend, Launch, Output
from .step import Chunk, SampleRow, build_step, check_step
from .torchrun import join as join_ranks

BACKENDS = ("auto", "reference", "cpu", "cuda", "null")
RANKS = ("threads", "processes")

__all__ = [
    "BACKENDS",
    "RANKS",
    "Backend",
    "Chunk",
    "Launch",
    "Output",
    "SampleRow",
    "build_step",
    "check_step",
    "create",
    "join_ranks",
]


def create(
    name: str,
    checkpoint: Checkpoint,
    dims: Dims,
    pages: int,
    *,
    dtype: Dtype,
    threads: int | None = None,
    ranks: str = "threads",
) -> Backend:
    """The backend `name` (one of BACKENDS; auto is cpu) with the checkpoint's weights and a KV pool of `pages` pages.

    `threads` defaults to the cores this process may use; the reference backend has one. `null` is the CPU backend
    without arithmetic. `ranks` (one of RANKS) says what executes dims.tp ranks on a CPU; in a torchrun job these are
    always its processes, and the call returns on rank 0 only. Raises MegakernelError for a backend that is unknown
    or not in this build.
    """
    if ranks not in RANKS:
        raise MegakernelError(f"ranks={ranks!r} is unknown: known are {', '.join(RANKS)}")
    if name == "reference":
        from .reference import ReferenceBackend

        return ReferenceBackend(checkpoint, dims, pages, dtype=dtype)
    if name in ("auto", "cpu", "null"):
        if dims.tp > 1 and (ranks == "processes" or join_ranks(dims.tp)):
            from .processes import ProcessBackend

            audit = SETTINGS["audit"].value() == "1"
            return ProcessBackend(
                checkpoint, dims, pages, dtype=dtype, threads=threads, null=name == "null", audit=audit
            )
        from .cpu import CpuBackend

        return CpuBackend(checkpoint, dims, pages, dtype=dtype, threads=threads, null=name == "null")
    if name == "cuda":
        raise MegakernelError("this build has no CUDA backend yet: use cpu")
    raise MegakernelError(f"unknown backend {name!r}: known are {', '.join(BACKENDS)}")
