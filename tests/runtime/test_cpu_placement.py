"""A thread that the system does not run, because another of its pool has its core, is moved to another core."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
import os, time
from test_cpu_threads import CONFIG, PAGES, dims, fill, table
from cpu_support import RandomCheckpoint
from handmade import make_program
from megakernel.isa import Dtype
from megakernel.model.checkpoint import weight_dims
from megakernel.runtime.cpu import CpuBackend

two = set(sorted(os.sched_getaffinity(0))[:2])
os.sched_setaffinity(0, two)
first = min(two)
hogs = []
for core in two:
    if (hog := os.fork()) == 0:
        os.sched_setaffinity(0, {core})
        parent = os.getppid()
        while os.getppid() == parent:
            for _ in range(100000):
                pass
        os._exit(0)
    hogs.append(hog)

sizes = dims(1, Dtype.F32, False)
program = make_program(CONFIG, sizes, 2)
before = {int(task) for task in os.listdir("/proc/self/task")}
checkpoint = RandomCheckpoint(weight_dims(CONFIG, Dtype.F32), biased=False)
backend = CpuBackend(checkpoint, sizes, PAGES, dtype=Dtype.F32, threads=2)
running, starved = sorted({int(task) for task in os.listdir("/proc/self/task")} - before)
fill(backend)
os.sched_setaffinity(running, {first})
os.sched_setscheduler(starved, os.SCHED_IDLE, os.sched_param(0))  # beside hogs on both cores it hardly runs

def until(cores):
    end = time.monotonic() + 120
    while os.sched_getaffinity(starved) != cores:
        backend.launch(program, table(sizes))
        assert time.monotonic() < end, os.sched_getaffinity(starved)

until(two - {first})
for hog in hogs:
    os.kill(hog, 9)
os.sched_setscheduler(starved, os.SCHED_OTHER, os.sched_param(0))
until(two)
print("moved and back")
backend.close()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a thread can only be moved where there are two cores")
def test_a_thread_that_is_not_run_is_moved_and_comes_back() -> None:
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent / "support")])}
    ran = subprocess.run([sys.executable, "-P", "-c", textwrap.dedent(SCRIPT)], env=env, capture_output=True, text=True)
    assert ran.stdout == "moved and back\n", ran.stderr
