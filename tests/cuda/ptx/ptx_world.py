"""Compiles the interpreter to PTX, translates it, and runs it instead of a GPU in a process with the fake driver.

`kernel(build)` returns the library for a build of the interpreter. `Emulator` makes launches of a real `CudaBackend`
run in it."""

import ctypes
import functools
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fake_gpu
import pytest
from built_once import ROOT, WARNINGS, built_once, compiler, sources, version
from ptx_code import Fault, Translator
from ptx_regions import Regions

from megakernel.isa import DIM_FIELDS, Units
from megakernel.runtime.cuda import compile as cuda
from megakernel.runtime.cuda.compile import Build
from megakernel.runtime.cuda.params import STRUCTURES

HERE = Path(__file__).parent
_compiler = cuda.compiler  # the real one, which `no_compiler` replaces in the test's process
SAID = 1 << 16
COPIES = ("random", "early", "late")
_FLAGS = [
    "-std=c++20",
    *WARNINGS,
    "-Wno-unused-variable",
    "-Wno-unused-label",
    "-Wno-unused-but-set-variable",
    "-Wno-clobbered",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]
_FLAGS += ["-ffp-contract=off", "-U_FORTIFY_SOURCE", "-fPIC"]
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.POINTER(STRUCTURES["Params"]), ctypes.c_int, ctypes.c_int)


class Schedule(ctypes.Structure):
    """How a launch runs; world.h explains the fields."""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("copies", ctypes.c_int32),
        ("unfair", ctypes.c_int32),
        ("races", ctypes.c_int32),
        ("planted", ctypes.c_int32),
        ("abort_at", ctypes.c_uint64),
        ("limit_s", ctypes.c_double),
        ("regions", ctypes.c_void_p),
    ]


class Statistics(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("switches", "copies", "accesses", "idle")]


def ptx_of(build: Build, folder: Path | None = None) -> str:
    """Return the PTX that NVRTC makes of a build, from the sources in `folder` (csrc by default)."""
    from cuda.bindings import nvrtc

    def make(target: Path) -> None:
        def check(answer: tuple[Any, ...]) -> Any:
            assert int(answer[0]) == 0, nvrtc.nvrtcGetErrorString(answer[0])
            return answer[1] if len(answer) > 1 else None

        home = (folder or cuda.source_folder()) / "cuda"
        program = check(
            nvrtc.nvrtcCreateProgram((home / "megakernel.cu").read_bytes(), b"megakernel.cu", 0, None, None)
        )
        options = ["--gpu-architecture=compute_90a", "-std=c++20", "-lineinfo", *build.defines, f"-I{home}"]
        status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = b" " * max(2, check(nvrtc.nvrtcGetProgramLogSize(program)))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        assert int(status[0]) == 0, log.decode()
        code = b" " * check(nvrtc.nvrtcGetPTXSize(program))
        check(nvrtc.nvrtcGetPTX(program, code))
        target.write_bytes(code.rstrip(b"\0"))

    content = ("ptx" + cuda.key(_compiler(), build)).encode()
    return built_once("megakernel.ptx", content, make).read_text()


@functools.cache
def kernel(build: Build, faults: tuple[Fault, ...] = ()) -> ctypes.CDLL:
    return ctypes.CDLL(str(built(build, faults)))


def emulated(
    *builds: Build, faults: tuple[Fault, ...] = (), **env: object
) -> Callable[[Callable[[], None]], Callable[..., None]]:
    """Like `fake_gpu.pretended`, a decorator for tests. The test's process finds the libraries for `builds` built."""

    def test_of(body: Callable[[], None]) -> Callable[..., None]:
        run = fake_gpu.pretended(**env)(body)

        def test() -> None:
            pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
            for build in builds:
                built(build, faults)
            run()

        test.body = body  # type: ignore[attr-defined]
        return test

    return test_of


def built(build: Build, faults: tuple[Fault, ...] = ()) -> Path:
    """Build the library that runs launches of a build. `faults` are compiled in; a schedule may activate one of them.

    It must exist before the test's process needs it: NVRTC crashes on the small stack of the fake driver's threads.
    """
    translator = Translator(
        {name.rpartition("/")[2]: text.decode().splitlines() for name, text in cuda.sources().items()}, faults
    )
    code = translator.translate(ptx_of(build))
    unused = [fault for number, fault in enumerate(faults, 1) if not translator.applied.get(number)]
    assert not unused, f"faults that change nothing: {unused}"

    def compile_kernel(target: Path) -> None:
        source = target.with_name("kernel.cpp")
        source.write_text(code)
        _run(*compiler(), *_FLAGS, "-w", "-O1", *_processor(), f"-I{HERE}", "-c", str(source), "-o", str(target))

    def compile_runtime(target: Path) -> None:
        flags = ["-O2", *_processor(), f"-DMK_SMS={build.sms}"]
        _run(*compiler(), *_FLAGS, *flags, "-c", str(HERE / "runtime.cpp"), "-o", str(target))

    def link(target: Path) -> None:
        _run(*compiler(), "-shared", str(kernel_object), str(runtime_object), "-o", str(target))

    shared = " ".join((version(), *_FLAGS, "-O1", *_processor())).encode() + (HERE / "machine.h").read_bytes()
    kernel_object = built_once("kernel.o", shared + code.encode(), compile_kernel)
    runtime_object = built_once("runtime.o", shared + sources(ROOT) + bytes([build.sms]), compile_runtime)
    return built_once("ptx.so", f"{kernel_object} {runtime_object}".encode(), link)


@functools.cache
def _processor() -> tuple[str, ...]:
    """Flags for this processor's vector instructions, without which emulated matmuls are slow."""
    try:
        known = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return ()
    return tuple(f"-m{name}" for name in ("avx2", "fma") if name in known)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]


@dataclass
class Emulator:
    """Runs the launches of this process. `wrong` collects what went wrong in them, `statistics` has an entry for each.
    Each launch uses another seed."""

    schedule: Schedule = field(default_factory=lambda: Schedule(seed=1, races=1, limit_s=100))
    traced: bool = False
    faults: tuple[Fault, ...] = ()
    wrong: list[str] = field(default_factory=list)
    statistics: list[Statistics] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._grids: list[tuple[Any, int]] = []
        self._ended = 0
        self._callback = _CALLBACK(self._launch)
        fake_gpu.no_compiler()
        fake_gpu.library().fake_set_kernel(self._callback)

    def _launch(self, params: Any, blocks: int, cooperative: int) -> None:
        """Called by the fake driver for each grid, in the thread of its stream. The last grid of a launch runs all."""
        with self._changed:
            self._grids.append((params, blocks))
            kinds = [(name, "<f4" if kind is float else "<i4") for name, kind in DIM_FIELDS]
            dims = fake_gpu.view(params.contents.dims, (1,), kinds)[0]
            if sum(grid.contents.ranks for grid, _ in self._grids) == dims["tp"]:
                try:
                    self._run(Build(self.traced, Units(int(dims["units"])), int(dims["sms"])), self._grids)
                except BaseException as e:
                    self.wrong.append(repr(e))
                self._grids = []
                self._ended += 1
                self._changed.notify_all()
            else:
                ended = self._ended
                self._changed.wait_for(lambda: self._ended > ended)

    def _run(self, build: Build, grids: Sequence[tuple[Any, int]]) -> None:
        grids = sorted(grids, key=lambda grid: grid[0].contents.first_rank)
        params = (ctypes.c_void_p * len(grids))(*(ctypes.cast(p, ctypes.c_void_p) for p, _ in grids))
        blocks = (ctypes.c_int32 * len(grids))(*(n for _, n in grids))
        said, statistics = ctypes.create_string_buffer(SAID), Statistics()
        self.schedule.seed += 1
        regions = Regions(fake_gpu.Arguments(grids[0][0].contents)) if self.schedule.races else None
        self.schedule.regions = ctypes.addressof(regions) if regions else None
        kernel(build, self.faults).ptx_run(
            params, blocks, len(grids), ctypes.byref(self.schedule), ctypes.byref(statistics), said, SAID
        )
        self.statistics.append(statistics)
        if said.value:
            self.wrong.append(said.value.decode())
