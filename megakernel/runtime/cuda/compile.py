"""Compiles csrc/cuda into a cubin (GPU machine code) at first use, with NVRTC, or with nvcc if NVRTC is missing.

Cubins are cached on disk. A cubin's name is a hash of everything it depends on, so an outdated one is never used.
`python -m megakernel.runtime.cuda.compile` fills the cache in advance, including the variants for benchmarks.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import MegakernelError, regular
from ...isa import FIXED_SIZES, Dims, Forward, Units
from ...library import source_folder
from ...model.cache import cache_folder
from ...targets.launch import Ablation
from ...targets.pages import one_row
from .limits import wide

KERNEL = "megakernel"
# Profilers, and tests that inspect the machine code, need information about source lines.
_FLAGS = ["-std=c++20", "-lineinfo", "--ptxas-options=-v"]
_NVRTC_ARCH = ["--gpu-architecture=sm_90a"]
_NVCC_ARCH = ["-gencode=arch=compute_90a,code=sm_90a"]
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


@dataclass(frozen=True)
class Compiler:
    """A compiler for csrc/cuda: nvcc at this path, or NVRTC if `nvcc` is None."""

    version: str
    nvcc: str | None = None

    def compile(self, build: Build) -> Cubin:
        """Compile one variant. Raises MegakernelError for the first error, or if the compiler reports slow code."""
        cubin = _with_nvcc(self.nvcc, build.defines) if self.nvcc else _with_nvrtc(build.defines)
        if slow := _SLOW.search(cubin.log):
            raise MegakernelError(f"{self.version} compiled csrc/cuda into slow code: {slow[0]}; try another compiler")
        return cubin


def sources() -> dict[str, bytes]:
    """Return the contents of all source files that a cubin depends on, by their path relative to csrc."""
    folder = source_folder()
    files = (path for part in ("common", "cuda") for path in sorted((folder / part).rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.suffix in (".h", ".cuh", ".cu")}


@functools.cache
def compiler() -> Compiler:
    """Return NVRTC if it is installed, otherwise nvcc. Raises MegakernelError if there is neither."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
        return Compiler(f"NVRTC {major}.{minor}")
    except (ImportError, RuntimeError):
        pass
    if path := nvcc_path():
        return nvcc(path)
    raise MegakernelError("there is no CUDA compiler: pip install nvidia-cuda-nvrtc")


def nvcc_path() -> str | None:
    """Return the path of nvcc, found in PATH or in CUDA's default folder; None if there is no nvcc."""
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def nvcc(path: str) -> Compiler:
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release [\d.]+, V([\d.]+)", answer)
    return Compiler(f"nvcc {release[1] if release else answer}", path)


def cubin(build: Build) -> bytes:
    """Return the machine code of the interpreter, from the cache or compiled now. Compiling takes half a minute, which
    is announced on a terminal."""
    with_ = compiler()
    path = cache_folder() / "cubin" / f"{key(with_, build)}.cubin"
    try:
        return regular(path).read_bytes()
    except OSError:
        pass
    terminal = sys.stderr.isatty()
    if terminal:
        few = " for few rows" if build.units is Units.DOTS else ""
        models = " with experts" if build.experts else " with wide heads" if build.wide else ""
        parts = f"{models}{' with tracing' if build.trace else ''}"
        what = f"the CUDA interpreter{few}{parts}"
        print(f"compiling {what} with {with_.version}, once ...", file=sys.stderr, flush=True)
    code = with_.compile(build).code
    _store(path, code)
    return code


def key(with_: Compiler, build: Build) -> str:
    """Return a hash of all that the machine code depends on: the compiler's version, flags, and source files."""
    digest = hashlib.sha256(repr((with_.version, _FLAGS, _NVRTC_ARCH, _NVCC_ARCH, *build.defines)).encode())
    for name, text in sources().items():
        digest.update(f"{name} {len(text)} ".encode())
        digest.update(text)
    return digest.hexdigest()[:32]


def _store(path: Path, code: bytes) -> None:
    """Store a cubin in the cache, completely or not at all. If this fails, the next process compiles again."""
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as f:
            part = Path(f.name)
            f.write(code)
            f.flush()
            os.fsync(f.fileno())
        part.replace(path)
    except OSError:
        if part is not None:
            part.unlink(missing_ok=True)


def _with_nvcc(path: str, defines: list[str]) -> Cubin:
    folder = source_folder() / "cuda"
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "megakernel.cubin"
        command = [path, "-cubin", *_NVCC_ARCH, *_FLAGS, *defines, "-o", str(target)]
        done = subprocess.run([*command, "megakernel.cu"], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise _failed(done.stderr)
        return Cubin(target.read_bytes(), done.stderr)


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
        options = [*_NVRTC_ARCH, *_FLAGS, *defines, f"-I{folder}"]
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
        _made = [_pool.submit(cubin, build) for build in _builds]
    for _one in _made:
        _one.result()
