"""A fake GPU for tests of the launcher: the fake driver of tests/support/fake_cuda, and a kernel that runs the CUDA
interpreter's own code on the CPU. The fake GPU needs a process of its own, in which the fake driver is loaded instead
of NVIDIA's: `run` calls a function of a test module in such a process."""

import ctypes
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import extras
import numpy as np
import pytest
from built_once import linked
from launch_image import FLAGS, host_library
from numpy.typing import NDArray

from megakernel.isa import BUFFERS, Buffer, Dims, Forward, Operation, Phase, Result, Rows, StepTable
from megakernel.isa.dims import DIM_FIELDS
from megakernel.isa.phases import MAX_PHASES, PHASE_FIELDS
from megakernel.isa.record import WORDS, phase_number
from megakernel.program import Program, Segment
from megakernel.runtime.cuda.loaded import Params

ROOT = Path(__file__).parents[2]
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.POINTER(Params), ctypes.c_int, ctypes.c_int)


def run(function: Callable[[], None], **env: object) -> str:
    """Call a function of a test module in a new process that uses the fake driver, and return what it printed. The
    environment variable HOST of that process is the path of the library for HostKernel."""
    extras.needs("cuda")
    source = ROOT / "tests" / "support" / "fake_cuda" / "libcuda.cpp"
    driver = linked("libcuda.so.1", source, *FLAGS, "-shared", "-fPIC", "-pthread")
    forks = _forks(Path(function.__code__.co_filename), driver.parent)
    assert forks.stdin is not None and forks.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        settings = os.environ | {key: str(value) for key, value in env.items()} | {"HOST": host_library()._name}
        forks.stdin.write(json.dumps([function.__name__, settings, folder]) + "\n")
        forks.stdin.flush()
        if not select.select([forks.stdout], [], [], 600)[0]:
            os.killpg(forks.pid, signal.SIGKILL)
            _forks.cache_clear()
            pytest.fail(f"{function.__name__} does not end")
        assert forks.stdout.readline() == "0\n", (Path(folder) / "err").read_text()[-3000:]
        return (Path(folder) / "out").read_text()


_FORKS = """
import json, os, sys
sys.path[:0] = {paths!r}
import {module} as there
for line in sys.stdin:
    name, settings, folder = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.environ.update(settings)
    for number, file in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(folder, file), os.O_WRONLY | os.O_CREAT), number)
    function = getattr(there, name)
    getattr(function, "body", function)()
    break
"""


@functools.cache
def _forks(module: Path, driver: Path) -> subprocess.Popen[str]:
    """Start a process that uses the fake driver and has imported a test module. It forks for each call of a function of
    this module, so that the imports, which take two seconds, are done once."""
    paths = [module.parent, *(ROOT / folder / "support" for folder in ("tests", "benchmarks"))]
    code = _FORKS.format(paths=[str(path) for path in paths], module=module.stem)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        env=os.environ | {"LD_LIBRARY_PATH": str(driver)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def pretended(**env: object) -> Callable[[Callable[[], None]], Callable[..., None]]:
    """Return a decorator for tests, which makes the test's body run in a process that uses the fake driver."""

    def test_of(body: Callable[[], None]) -> Callable[..., None]:
        def test() -> None:
            run(body, **env)

        test.body = body  # type: ignore[attr-defined]
        return test

    return test_of


# -- inside that process


def library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def no_compiler() -> None:
    """Replace the CUDA compiler by a stub that returns arbitrary bytes, which the fake driver accepts as a cubin."""
    from megakernel.runtime.cuda import compile

    compile.cubin = lambda build: b"code"
    compile.compiler = lambda: "none"  # type: ignore[assignment]


def view(address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return memory of the fake device as a NumPy array, without copying it."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    if not size:
        return np.zeros(shape, dtype)
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype).reshape(shape)


DIMS = [(name, "<f4" if kind is float else "<i4") for name, kind in DIM_FIELDS]


class Arguments:
    """The program, step table, counters and buffers to which the arguments of a launch point."""

    def __init__(self, params: Any) -> None:
        self.params = params
        tp = int(view(params.dims, (1,), DIMS)[0]["tp"])
        rows = view(params.dims, (tp,), DIMS)
        self.ranks = [Dims.of(**{name: row[name].item() for name, _ in DIM_FIELDS}) for row in rows]
        self.dims = d = self.ranks[0]
        streams = [tp * params.workers + 1] * 3 + [tp * params.queues + 1]
        segments = []
        for records, offsets, length in zip(params.records, params.offsets, streams, strict=True):
            ends = view(offsets, (length,), np.int32)
            segments.append(Segment(view(records, (int(ends[-1]), WORDS), np.int32), ends))
        totals = [view(address, (tp, params.counters), np.int32) for address in params.totals]
        self.phases = view(params.phases, (tp, MAX_PHASES + 1, len(PHASE_FIELDS)), np.int32)
        forward = self._forward(*segments)
        sizes = tp, params.workers, params.counters
        self.program = Program(d, forward, "pretended", *sizes, *segments[:3], *totals, segments[3])
        self.table = StepTable(d, view(params.step_words, StepTable(d).words.shape, np.int32))
        counters = d.model.layers + 1, params.counters
        self.counters = [view(address, counters, np.int32) for address in params.counter_values[:tp]]
        copies = tp * len(Buffer)
        self.addresses, self.strides = (
            np.frombuffer(array, np.uint64, copies).reshape(tp, -1) for array in (params.buffers, params.layer_stride)
        )

    def _forward(self, prologue: Segment, body: Segment, epilogue: Segment, queues: Segment) -> Forward:
        """Rebuild the forward pass from the phase numbers in the records, without the phases that compute nothing."""
        lists = [[prologue.records], [body.records, queues.records], [epilogue.records]]
        numbers = [np.unique(phase_number(np.concatenate(records))).tolist() for records in lists]
        found = [[_phase(n, self.phases[0, n]) for n in segment] for segment in numbers]
        return Forward(*(tuple(phase for phase in segment if not phase.control) for segment in found))

    def buffer(self, rank: int, buffer: Buffer, layer: int, pages: int) -> NDArray[Any]:
        spec = BUFFERS[buffer]
        address = int(self.addresses[rank, buffer]) + layer * int(self.strides[rank, buffer])
        return view(address, spec.shape(self.ranks[rank], pages), spec.resolve_dtype(self.dims.model).numpy)


def _phase(number: int, words: NDArray[np.int32]) -> Phase:
    """Rebuild a phase from the words of the C++ struct, which contain no name: the phase is named after its number."""
    kinds = {"Operation": Operation, "Rows": Rows, "Result": Result}
    made: dict[str, Any] = {"name": f"phase {number}", "number": number}
    for field, word in zip(PHASE_FIELDS, words.tolist(), strict=True):
        if field.kind == "Buffer":
            made[field.name] = None if word < 0 else Buffer(word)
        elif field.kind in kinds or field.name == "ahead":
            made[field.name] = kinds.get(field.kind, int)(word)
    return Phase(**made)


class Kernel:
    """A fake kernel. The fake driver calls it for each grid of a launch, in the thread of the grid's stream. The call
    for the last grid runs them all. The others wait for it, or until the host aborts them. `wrong` collects errors."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        # A function that is called at the start of each grid. If it returns False, the grid does nothing.
        self.before: Callable[[Any], bool] | None = None
        self._changed = threading.Condition()
        self._grids: list[Any] = []
        self._ended = 0
        self._callback = _CALLBACK(self.launch)
        no_compiler()
        library().fake_set_kernel(self._callback)

    def launch(self, pointer: Any, blocks: int, cooperative: int) -> None:
        params = pointer.contents
        try:
            assert blocks == params.ranks * params.workers
            if self.before is not None and not self.before(params):
                return
            with self._changed:
                self._grids.append(params)
                ended, tp = self._ended, int(view(params.dims, (1,), DIMS)[0]["tp"])
                if sum(grid.ranks for grid in self._grids) == tp:
                    self.run(sorted(self._grids, key=lambda grid: grid.first_rank))
                    self._grids, self._ended = [], ended + 1
                    self._changed.notify_all()
                while self._ended == ended:
                    if ctypes.c_int32.from_address(params.abort).value:
                        self._grids.remove(params)
                        return
                    self._changed.wait(0.001)
        except BaseException as e:
            self.wrong.append(repr(e))
            self._grids, self._ended = [], self._ended + 1

    def run(self, grids: Sequence[Any]) -> None:
        """Run all grids of a launch, given by their parameters."""
        raise NotImplementedError

    def check(self) -> None:
        assert self.wrong == []


class HostKernel(Kernel):
    """A fake kernel that runs the CUDA interpreter's own code on the CPU."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["HOST"])
        super().__init__()

    def run(self, grids: Sequence[Any]) -> None:
        for params in grids if grids[0].synchronise else ():
            a = Arguments(params)
            for rank in range(params.first_rank, params.first_rank + params.ranks):
                np.testing.assert_array_equal(a.counters[rank], a.program.totals()[:, rank] * (params.launch - 1))
        said = ctypes.create_string_buffer(1024)
        self._library.mk_host_run((ctypes.c_void_p * len(grids))(*map(ctypes.addressof, grids)), len(grids), said, 1024)
        if said.value:
            self.wrong.append(said.value.decode())


def poll(address: int, seconds: float = 10.0) -> bool:
    """Wait up to `seconds` for an int32 in device memory to become nonzero, and return whether it did."""
    word = ctypes.c_int32.from_address(address)
    end = time.perf_counter() + seconds
    while word.value == 0 and time.perf_counter() < end:
        time.sleep(0.001)
    return word.value != 0
