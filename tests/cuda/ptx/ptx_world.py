"""Compiles the interpreter to PTX, translates it, and runs it instead of a GPU in a process with the fake driver.

`built(build)` makes the library for a build of the interpreter. `Emulator` makes launches of a real `CudaBackend` run
in it."""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fake_gpu
from built_once import ROOT, WARNINGS, built_once, compiler, run, sources, version
from compiled import compiled
from ptx_code import Translator
from ptx_faults import FAULTS
from ptx_regions import Regions

from megakernel.isa import DIM_FIELDS, KV_BLOCK, Dims, Units
from megakernel.machine import MACHINES
from megakernel.model.config import ModelConfig
from megakernel.runtime.cuda import compile as cuda
from megakernel.runtime.cuda.compile import Build
from megakernel.scheduler import Options

HERE = Path(__file__).parent
_LLAMA = ModelConfig(vocab=139, hidden=2304, ffn=1280, layers=2, heads=8, kv_heads=2, head_dim=64, max_context=512)
_QWEN = {"family": "qwen3", "hidden": 1032, "heads": 3, "kv_heads": 3, "head_dim": 80, "qkv_bias": True, "window": 150}
MACHINE = replace(MACHINES["h100"], workers=3).with_tiles(page=KV_BLOCK)
# The models that have a build for one row, and their programs.
ROWS = {
    kind: (config, compiled(config, MACHINE, 1, options=Options(matmul="dots"), max_seqs=3, max_context=512))
    for kind, config in {"row dots": _LLAMA, "row norms dots": replace(_LLAMA, **_QWEN, full_layers=(0,))}.items()
}
BUILDS = {
    "dots": Build(False, Units.DOTS),
    "tensor": Build(False, Units.TENSOR),
    "experts dots": Build(False, Units.DOTS, experts=True),
    "experts tensor": Build(False, Units.TENSOR, experts=True),
    "wide dots": Build(False, Units.DOTS, wide=True),
    "wide tensor": Build(False, Units.TENSOR, wide=True),
    **{kind: Build.of(program.dims, program.forward) for kind, (_, program) in ROWS.items()},
}
_compiler = cuda.compiler  # the real compiler; in a test's process, `no_compiler` replaces it
_SAID = 1 << 16
_FLAGS = ["-std=c++20", *WARNINGS, "-Wno-clobbered", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-fPIC"]


class Schedule(ctypes.Structure):
    """How a launch runs; world.h explains the fields."""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("copies", ctypes.c_int32),
        ("unfair", ctypes.c_int32),
        ("races", ctypes.c_int32),
        ("planted", ctypes.c_int32),
        ("abort_at", ctypes.c_uint64),
        ("limit", ctypes.c_uint64),
        ("regions", ctypes.c_void_p),
    ]


def ptx_of(build: Build) -> str:
    from cuda.bindings import nvrtc

    def make(target: Path) -> None:
        def check(answer: tuple[Any, ...]) -> Any:
            assert int(answer[0]) == 0, nvrtc.nvrtcGetErrorString(answer[0])
            return answer[1] if len(answer) > 1 else None

        home = cuda.source_folder() / "cuda"
        source = (home / "megakernel.cu").read_bytes()
        program = check(nvrtc.nvrtcCreateProgram(source, b"megakernel.cu", 0, None, None))
        options = ["--gpu-architecture=compute_90a", "-std=c++20", "-lineinfo", *build.defines, f"-I{home}"]
        check(nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options]))
        code = b" " * check(nvrtc.nvrtcGetPTXSize(program))
        check(nvrtc.nvrtcGetPTX(program, code))
        target.write_bytes(code.rstrip(b"\0"))

    return built_once("megakernel.ptx", ("ptx" + cuda.key(_compiler(), build)).encode(), make).read_text()


@functools.cache
def kernel(build: Build) -> ctypes.CDLL:
    return ctypes.CDLL(str(built(build)))


def built(build: Build) -> Path:
    """Compile the library that runs launches of the interpreter as `build` configures it. The faults that tests plant
    in this build are compiled in, and a schedule may activate one of them.

    The library must exist before the process with the fake driver needs it: NVRTC crashes on the small stack of the
    fake driver's threads.
    """
    ptx = ptx_of(build)

    def translate(target: Path) -> None:
        faults = next((FAULTS.get(kind, []) for kind, other in BUILDS.items() if other == build), [])
        lines = {name.rpartition("/")[2]: text.decode().splitlines() for name, text in cuda.sources().items()}
        translator = Translator(lines, faults)
        target.write_text(translator.translate(ptx))
        unused = [fault for fault in faults if fault not in translator.applied]
        assert not unused, f"faults that change nothing: {unused}"

    def compile_kernel(target: Path) -> None:
        run([*compiler(), *_FLAGS, "-w", "-O1", *_processor(), f"-I{HERE}", "-c", str(source), "-o", str(target)])

    def compile_runtime(target: Path) -> None:
        run([*compiler(), *_FLAGS, "-O3", *_processor(), "-c", str(HERE / "runtime.cpp"), "-o", str(target)])

    def link(target: Path) -> None:
        run([*compiler(), "-shared", str(kernel_object), str(runtime_object), "-o", str(target)])

    translation = b"".join((HERE / name).read_bytes() for name in ("ptx_table.py", "ptx_faults.py", "ptx_code.py"))
    source = built_once("kernel.cpp", f"{build}{ptx}".encode() + translation, translate)
    flags = f"{version()} {_FLAGS} {_processor()}".encode()
    content = flags + source.read_bytes() + (HERE / "machine.h").read_bytes()
    kernel_object = built_once("kernel.o", content, compile_kernel)
    runtime_object = built_once("runtime.o", flags + sources(ROOT), compile_runtime)
    return built_once("ptx.so", f"{kernel_object} {runtime_object}".encode(), link)


@functools.cache
def _processor() -> tuple[str, ...]:
    """Flags for this processor's vector instructions, without which emulated matmuls are slow."""
    try:
        known = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return ()
    return tuple(f"-m{name}" for name in ("avx2", "fma") if name in known)


@dataclass
class Emulator(fake_gpu.Kernel):
    """Runs the launches of this process on the CPU. Each launch has another seed for the order of threads. `wrong`
    collects the errors of all launches, and `switches` is how often the last launch switched between threads. `changes`
    are fields of `Build` to change. `regions` says whether to compare accesses with what instructions declare. If
    `kind` is that of a build for one row, launches use this build."""

    schedule: Schedule = field(default_factory=lambda: Schedule(seed=1, races=1, limit=30_000_000))
    changes: dict[str, Any] = field(default_factory=dict)
    regions: bool = True
    kind: str = ""
    switches: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def run(self, grids: Sequence[Any]) -> None:
        sizes = fake_gpu.view(grids[0].dims, (1,), fake_gpu.DIMS)[0]
        dims = Dims.of(**{name: sizes[name].item() for name, _ in DIM_FIELDS})
        build = BUILDS[self.kind] if self.kind in ROWS else Build.of(dims)
        params = (ctypes.c_void_p * len(grids))(*map(ctypes.addressof, grids))
        blocks = (ctypes.c_int32 * len(grids))(*(grid.ranks * grid.workers for grid in grids))
        said = ctypes.create_string_buffer(_SAID)
        self.schedule.seed += 1
        regions = Regions(fake_gpu.Arguments(grids[0])) if self.regions else None
        self.schedule.regions = ctypes.addressof(regions) if regions else None
        launch = kernel(replace(build, **self.changes)).ptx_run
        launch.restype = ctypes.c_uint64
        self.switches = launch(params, blocks, len(grids), ctypes.byref(self.schedule), said, _SAID)
        if said.value:
            self.wrong.append(said.value.decode())
