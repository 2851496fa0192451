"""The table of all backends. `--backend`, `doctor`, the engine and benchmarks use it to choose a backend.

A backend's modules are imported only when the backend is used. So a machine without GPU packages can run the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..errors import MegakernelError
from ..isa import Dims, Dtype
from ..machine import CPU, Machine, cpu_count, host
from ..model.checkpoint import Checkpoint
from ..model.config import ModelConfig
from ..targets import HOPPER
from .backend import Backend

# A function with the arguments of `create` that returns a backend.
_Make = Callable[[Checkpoint, Dims, int, int | None], Backend]


@dataclass(frozen=True)
class Registered:
    """What the rest of the project needs to know about a backend before using it.

    `lack` returns why the backend cannot run a model in a compute type on this machine, or None if it can. `machine`
    takes the numbers of threads and ranks, and describes the device of one rank, for which programs are compiled.
    `dtype` is the default compute type; None means the checkpoint's. Programs must be compiled for `target`.

    If `stores` is true, weights and KV cache may have other types than the compute type. If `automatic` is true,
    `--backend auto` may choose the backend. If `devices` is true, each rank has its own memory. If `arithmetic` is
    false, nothing is computed and the results are meaningless.
    """

    what: str
    create: _Make
    machine: Callable[[int | None, int], Machine]
    lack: Callable[[ModelConfig, Dtype], str | None] = lambda config, dtype: None
    dtype: Dtype | None = None
    target: str = CPU
    stores: bool = True
    automatic: bool = False
    devices: bool = False
    arithmetic: bool = True

    def refuses(self, weights: str, kv_cache: str = "auto") -> str | None:
        """Return why the backend cannot store weights or the KV cache as these flags request; None if it can."""
        if not self.stores and weights != "auto":
            return f"weights in {weights} are not supported on {self.what}: use --weights auto"
        if not self.stores and kv_cache != "auto":
            return f"a KV cache in {kv_cache} is not supported on {self.what}: use --kv-cache-dtype auto"
        return None


def _host_share(threads: int | None, ranks: int) -> Machine:
    """One rank's part of this machine, with at most one worker per core, because workers on one core would wait for
    each other."""
    cores = cpu_count()
    return host(max(1, min(threads or cores, cores) // ranks))


def _reference(checkpoint: Checkpoint, dims: Dims, pages: int, threads: int | None) -> Backend:
    from .reference import ReferenceBackend

    return ReferenceBackend(checkpoint, dims, pages)


def _cpu(checkpoint: Checkpoint, dims: Dims, pages: int, threads: int | None, null: bool = False) -> Backend:
    from .cpu.backend import CpuBackend

    return CpuBackend(checkpoint, dims, pages, threads=threads, null=null)


def _cuda(checkpoint: Checkpoint, dims: Dims, pages: int, threads: int | None) -> Backend:
    from .cuda.backend import CudaBackend

    return CudaBackend(checkpoint, dims, pages)


def _cuda_share(threads: int | None, ranks: int) -> Machine:
    from .cuda.availability import machine

    return machine(ranks)


def _cuda_lack(config: ModelConfig, dtype: Dtype) -> str | None:
    from .cuda.availability import missing
    from .cuda.limits import model_refusal

    return missing() or model_refusal(config.sizes(dtype))


# The value `auto` means the first backend that is `automatic` and can run the model here (`lack` returns None).
REGISTRY: dict[str, Registered] = {
    "cuda": Registered(
        "a Hopper GPU", _cuda, _cuda_share, _cuda_lack, Dtype.BF16, HOPPER, stores=False, automatic=True, devices=True
    ),
    "cpu": Registered("CPU threads", _cpu, _host_share, automatic=True),
    "reference": Registered("NumPy, slow", _reference, _host_share),
    "null": Registered("no arithmetic; measures all the rest", partial(_cpu, null=True), _host_share, arithmetic=False),
}
BACKENDS = ("auto", *REGISTRY)


def registered(name: str) -> Registered:
    """Return the backend `name`. Raises MegakernelError if there is none."""
    if name not in REGISTRY:
        raise MegakernelError(f"unknown backend {name!r}: choose from {', '.join(BACKENDS)}")
    return REGISTRY[name]


def backend_for(target: str) -> Registered:
    """Return the backend that runs programs compiled for `target`."""
    return next(backend for backend in REGISTRY.values() if backend.automatic and backend.target == target)


def choose_backend(
    name: str, config: ModelConfig, dtype: Dtype | None, weights: str = "auto", kv_cache: str = "auto"
) -> tuple[str, Dtype | None]:
    """Return the name of the backend to use, which replaces `auto`, and its compute type; None means the checkpoint's
    type. `weights` and `kv_cache` are the values of `--weights` and `--kv-cache-dtype`.

    Raises MegakernelError if `name` is unknown, or if that backend cannot run this model here.
    """
    candidates = [n for n, r in REGISTRY.items() if r.automatic] if name == "auto" else [name]
    lack = None
    for candidate in candidates:
        backend = registered(candidate)
        wanted = backend.dtype if dtype is None else dtype
        lack = backend.refuses(weights, kv_cache) or backend.lack(config, Dtype.F32 if wanted is None else wanted)
        if lack is None:
            return candidate, wanted
    raise MegakernelError(f"the {candidates[-1]} backend cannot run here: {lack}")


def create(name: str, checkpoint: Checkpoint, dims: Dims, pages: int, *, threads: int | None = None) -> Backend:
    """Create the backend `name` with the checkpoint's weights and a KV cache of `pages` pages. `auto` is resolved by
    `choose_backend`.

    `threads` is by default the number of cores that this process may use. The reference backend always uses one thread.
    Raises MegakernelError if the backend is unknown, or if it cannot run here or with these sizes.
    """
    if name == "auto":
        name, _ = choose_backend(name, checkpoint.config, Dtype(dims.model.dtype))
    return registered(name).create(checkpoint, dims, pages, threads)
