"""Compiles csrc/cuda into a cubin (GPU machine code) at first use, with NVRTC.

Cubins are cached on disk. A cubin's name is a hash of everything it depends on, so an outdated one is never used.
`python -m megakernel.runtime.cuda.compile` fills the cache in advance, including the variants for benchmarks.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...errors import MegakernelError, regular, whole_file
from ...isa import FIXED_SIZES, Dims, Forward, Units
from ...library import source_folder
from ...settings import cache_folder
from ...targets.launch import Ablation
from ...targets.pages import one_row
from .limits import wide

KERNEL = "megakernel"
# Profilers, and tests that inspect the machine code, need information about source lines.
_FLAGS = ["--gpu-architecture=sm_90a", "-std=c++20", "-lineinfo", "--ptxas-options=-v"]
# Messages in which the assembler ptxas says that it ignores setmaxnreg or serialises wgmma. Such code is several times
# slower, but ptxas does not treat this as an error.
_SLOW = re.compile(r"\(C75\d\d\)[^\n]*")


@dataclass(frozen=True)
class Build:
    """A variant of the interpreter: whether it records traces, which units compute matmuls, and which work it leaves
    out. It may have the code for models with experts, or for those with wide norms and heads. This code makes other
    models slower.

    A build for one row runs only programs of one model that compute one token row per step, on one GPU. Its
    `constants` are FIXED_SIZES, and whether any phase has a bias or normalises heads. Other builds have none."""

    trace: bool
    units: Units
    ablation: Ablation = Ablation.NONE
    experts: bool = False
    wide: bool = False
    constants: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls, dims: Dims, forward: Forward | None = None, *, trace: bool = False, ablation: Ablation = Ablation.NONE
    ) -> Build:
        """Return the variant that runs programs of these sizes and phases, or the generic one if `forward` is None."""
        units, model, constants = Units(dims.worker.units), dims.model, dict[str, str]()
        if forward and one_row(dims):
            constants = {f"size_{name}": str(dims.flat[name]) for name in FIXED_SIZES}
            constants["biases"] = f"{any(phase.bias is not None for phase in forward):d}"
            constants["head_norms"] = f"{any(phase.head_norm is not None for phase in forward):d}"
        return cls(trace, units, ablation, model.experts > 0, wide(model), tuple(constants.items()))

    @property
    def defines(self) -> list[str]:
        own = {name: int(value) for name, value in vars(self).items() if name != "constants"}
        of_row = {"one_row": 1, **dict(self.constants)} if self.constants else {}
        return [f"-DMK_{name.upper()}={value}" for name, value in (own | of_row).items()]


@dataclass(frozen=True)
class Cubin:
    """Machine code for sm_90a, and what the compiler reports about it: registers, spills and notes."""

    code: bytes
    log: str


def sources() -> dict[str, bytes]:
    """Return the contents of all source files that a cubin depends on, by their path relative to csrc."""
    folder = source_folder()
    files = (path for part in ("common", "cuda") for path in sorted((folder / part).rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.suffix in (".h", ".cuh", ".cu")}


@functools.cache
def compiler() -> str:
    """Return the name and the version of the compiler. Raises MegakernelError if NVRTC is not installed."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as e:
        raise MegakernelError("there is no CUDA compiler: pip install nvidia-cuda-nvrtc") from e
    return f"NVRTC {major}.{minor}"


def compiled(build: Build) -> Cubin:
    """Compile one variant. Raises MegakernelError for the first error, or if the compiler reports slow code."""
    cubin = _with_nvrtc(build.defines)
    if slow := _SLOW.search(cubin.log):
        raise MegakernelError(f"{compiler()} compiled csrc/cuda into slow code: {slow[0]}; try another version")
    return cubin


def cubin(build: Build) -> bytes:
    """Return the machine code of the interpreter, from the cache or compiled now. Compiling takes half a minute, which
    is announced on a terminal."""
    path = cache_folder() / "cubin" / f"{key(compiler(), build)}.cubin"
    with suppress(OSError):
        return regular(path).read_bytes()
    if sys.stderr.isatty():
        print(f"compiling a variant of the CUDA interpreter with {compiler()}, once ...", file=sys.stderr, flush=True)
    code = compiled(build).code
    with suppress(OSError, MegakernelError):  # without a cache, the next process compiles again
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, f"cubin {path}") as part:
            part.write_bytes(code)
    return code


def key(version: str, build: Build) -> str:
    """Return a hash of all that the machine code depends on: the compiler's version, flags, and source files."""
    digest = hashlib.sha256(repr((version, _FLAGS, *build.defines)).encode())
    for name, text in sources().items():
        digest.update(f"{name} {len(text)} ".encode())
        digest.update(text)
    return digest.hexdigest()[:32]


def _with_nvrtc(defines: list[str]) -> Cubin:
    from cuda.bindings import nvrtc

    def check(answer: tuple[Any, ...]) -> Any:
        if int(answer[0]) != 0:
            raise MegakernelError(f"NVRTC failed: {nvrtc.nvrtcGetErrorString(answer[0])[1].decode()}")
        return answer[1] if len(answer) > 1 else None

    folder = source_folder() / "cuda"
    text = (folder / "megakernel.cu").read_bytes()
    program = check(nvrtc.nvrtcCreateProgram(text, b"megakernel.cu", 0, None, None))
    try:
        options = [*_FLAGS, *defines, f"-I{folder}"]
        status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        # NVRTC writes into this object. CPython shares byte strings of length 1, so use at least two bytes.
        log = b" " * max(2, check(nvrtc.nvrtcGetProgramLogSize(program)))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        said = log.rstrip(b" \0").decode(errors="replace")
        if int(status[0]) != 0:
            raise _failed(said)
        code = b" " * max(2, check(nvrtc.nvrtcGetCUBINSize(program)))
        check(nvrtc.nvrtcGetCUBIN(program, code))
        return Cubin(code, said)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _failed(said: str) -> MegakernelError:
    lines = said.strip().splitlines()
    first = next((line for line in lines if "error" in line), lines[0] if lines else "it does not say why")
    return MegakernelError(f"compiling csrc/cuda failed: {first.strip()}")


if __name__ == "__main__":
    _units = (Units.TENSOR, Units.DOTS)
    _models = [(False, False), (True, False), (False, True)]  # with experts, with wide heads
    _builds = [Build(trace, units, Ablation.NONE, *m) for trace in (False, True) for units in _units for m in _models]
    _builds += [Build(False, units, ablation) for units in _units for ablation in (Ablation.COPIES, Ablation.COMPUTE)]
    with ThreadPoolExecutor(os.cpu_count()) as _pool:
        list(_pool.map(cubin, _builds))
