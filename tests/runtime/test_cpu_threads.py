"""The CPU interpreter with more threads than cores, under a race detector."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from race_detector import need_race_detector

ROOT = Path(__file__).parents[2]
# One SIMD width is enough, and takes a third of the time to build.
FLAGS = ["-std=c++20", "-O0", "-g1", "-fsanitize=thread", "-Wno-tsan", "-fPIC", "-shared", "-pthread"]
FLAGS += ["-DMK_SIMD=portable", "-DMK_LANES=4", "-Davx2_kernels=portable_kernels", "-Davx512_kernels=portable_kernels"]
FLAGS += ["-Davx512bf16_kernels=portable_kernels"]

_LAUNCHES = """
import ctypes, sys
sys.path[:0] = {tests!r}
from megakernel.runtime.cpu import native
native.load = lambda: ctypes.CDLL({library!r})
from test_cpu_interpreter import *
backend = CpuBackend(RandomCheckpoint(DIMS), DIMS, PAGES, dtype=Dtype.F32, threads=6)
fill(backend)
table, expected = mixed_table(), None
for workers in (1, 2, 5, 7):
    program = forward_program(workers)
    for traced in (False, True, False):
        logits = backend.launch(program, table, trace=traced).logits[[0, 1, 3]]
        expected = logits.copy() if expected is None else expected
        np.testing.assert_array_equal(logits, expected)
backend.close()
"""


def test_threads_that_take_over_streams_race_nowhere(tmp_path: Path) -> None:
    """Six threads share up to seven streams, so most launches hand some of them over. All bits are equal."""
    need_race_detector(tmp_path)
    library = tmp_path / "native.so"
    sources = sorted(map(str, (ROOT / "csrc" / "cpu").glob("*.cpp")))
    subprocess.run(["g++", *FLAGS, *sources, "-o", str(library)], check=True)
    detector = subprocess.run(["g++", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True).stdout
    tests = [str(Path(__file__).parent), str(ROOT / "tests" / "support")]
    script = _LAUNCHES.format(tests=tests, library=str(library))
    environment = {**os.environ, "LD_PRELOAD": detector.strip(), "MEGAKERNEL_SIMD": "portable"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert (done.stderr, done.returncode) == ("", 0)
