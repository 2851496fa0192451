"""Launching programs: step tables, and one module per executor."""

from __future__ import annotations

from dataclasses import replace

from ..errors import MegakernelError
from ..isa import KV_BLOCK, Dims, Dtype
from ..isa.launch import PAGES
from ..machine import Machine, host
from ..model.checkpoint import Checkpoint, weight_dims
from ..model.config import LlamaConfig
from ..settings import SETTINGS
from .backend import Backend, Launch, Output
from .cpu.processes.torchrun import join as join_ranks
from .step import Chunk, SampleRow, build_step, check_step

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
    "choose_backend",
    "create",
    "join_ranks",
    "rank_machine",
]


def choose_backend(name: str, config: LlamaConfig, dtype: Dtype | None) -> tuple[str, Dtype | None]:
    """`auto` made definite, and the type to compute in; None is the checkpoint's own.

    cuda where there is a Hopper GPU with all that its use takes, and it can run a model of this shape; else cpu. Raises
    MegakernelError where `name` is unknown, or cuda and cannot run this.
    """
    if name not in BACKENDS:
        raise MegakernelError(f"unknown backend {name!r}: known are {', '.join(BACKENDS)}")
    if name not in ("auto", "cuda"):
        return name, dtype
    from .cuda.availability import missing
    from .cuda.limits import refusal

    device_dtype = Dtype.BF16 if dtype is None else dtype
    lack = missing() or refusal(replace(weight_dims(config, device_dtype), page=KV_BLOCK, pages=PAGES))
    if lack is None:
        return "cuda", device_dtype
    if name == "auto":
        return "cpu", dtype
    raise MegakernelError(f"the cuda backend cannot run here: {lack}")


def rank_machine(backend: str, threads: int | None, ranks: int) -> Machine:
    """What one of `ranks` ranks has of this machine: to compile for."""
    if backend == "cuda":
        from .cuda.availability import machine

        return machine(ranks)
    return host(max(1, host(threads).workers // ranks))


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
    """The backend `name` (auto as `choose_backend` says) with the checkpoint's weights and a KV pool of `pages` pages.

    `threads` defaults to the cores this process may use; the reference backend has one. `null` is the CPU backend
    without arithmetic. `ranks` (one of RANKS) says what executes dims.tp ranks on a CPU; in a torchrun job these are
    always its processes, and the call returns on rank 0 only. Raises MegakernelError for a backend that is unknown
    or not in this build.
    """
    if ranks not in RANKS:
        raise MegakernelError(f"ranks={ranks!r} is unknown: known are {', '.join(RANKS)}")
    if name == "auto":
        name, _ = choose_backend(name, checkpoint.config, dtype)
    if name == "reference":
        from .reference import ReferenceBackend

        return ReferenceBackend(checkpoint, dims, pages, dtype=dtype)
    if name in ("cpu", "null"):
        if dims.tp > 1 and (ranks == "processes" or join_ranks(dims.tp)):
            from .cpu.processes import ProcessBackend

            audit = SETTINGS["audit"].value() == "1"
            return ProcessBackend(
                checkpoint, dims, pages, dtype=dtype, threads=threads, null=name == "null", audit=audit
            )
        from .cpu import CpuBackend

        return CpuBackend(checkpoint, dims, pages, dtype=dtype, threads=threads, null=name == "null")
    if name == "cuda":
        from .cuda.backend import CudaBackend

        return CudaBackend(checkpoint, dims, pages, dtype=dtype)
    raise MegakernelError(f"unknown backend {name!r}: known are {', '.join(BACKENDS)}")
