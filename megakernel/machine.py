"""What the hardware is: workers, rates and the tile shapes that suit it.

Datasheet figures: NVIDIA's A100, H100, H200 and B200 datasheets, dense rates; SM counts and clocks from *How to
Scale Your Model*, "How to Think About GPUs" (2025).
"""

from __future__ import annotations

import os
import platform
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path

from .errors import MegakernelError


@dataclass(frozen=True)
class Machine:
    """One rank's device. Rates are per device, in units per second; `workers` share them evenly."""

    name: str
    workers: int
    matrix_flops: float  # bf16 with float32 accumulation, FLOP/s
    vector_flops: float  # float32 outside the matrix unit, FLOP/s
    memory_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float  # egress to peers, one direction
    tile_rows: int  # token rows of a matmul tile, and of a row block
    tile_cols: int  # output columns of a matmul tile
    col_unit: int  # column tiles start and end on multiples of this
    page: int  # KV tokens per page
    pages: int  # pages of shared memory that a worker streams operands through; 0: a CPU core, which has caches
    signal_s: float  # from a signal to a waiting worker's start
    dispatch_s: float  # fetch, decode and set-up of one instruction


def _gpu(name: str, sms: int, matrix: float, vector: float, memory: float, capacity: float, link: float) -> Machine:
    """A GPU with the Hopper interpreter's tiles and pages, `isa.pages`. Synchronisation costs are measured."""
    return Machine(
        name=name,
        workers=sms,
        matrix_flops=matrix,
        vector_flops=vector,
        memory_bytes_per_s=memory,
        memory_bytes=capacity,
        link_bytes_per_s=link,
        tile_rows=128,
        tile_cols=256,
        col_unit=32,
        page=128,
        pages=13,
        signal_s=1.0e-6,
        dispatch_s=0.5e-6,
    )


MACHINES: dict[str, Machine] = {
    m.name: m
    for m in (
        _gpu("v100", 80, 1.25e14, 1.57e13, 9.0e11, 32e9, 150e9),
        _gpu("a100", 108, 3.12e14, 1.95e13, 2.0e12, 80e9, 300e9),
        _gpu("h100", 132, 9.9e14, 6.7e13, 3.35e12, 80e9, 450e9),
        _gpu("h200", 132, 9.9e14, 6.7e13, 4.8e12, 141e9, 450e9),
        _gpu("b200", 148, 2.25e15, 8.0e13, 8.0e12, 192e9, 900e9),
    )
}


def cpu_count() -> int:
    """Cores this process may use: its affinity mask, cut by a cgroup v2 CPU quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def processor() -> str:
    """What this machine's processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def host(workers: int | None = None) -> Machine:
    """This machine's CPU, one worker per core. Rates are nominal, for placement; `doctor` measures the real ones."""
    n = workers or cpu_count()
    return Machine(
        name="host",
        workers=n,
        matrix_flops=80e9 * n,
        vector_flops=20e9 * n,
        memory_bytes_per_s=10e9 * n,
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        link_bytes_per_s=10e9,
        tile_rows=96,
        tile_cols=256,
        col_unit=16,
        page=16,
        pages=0,
        signal_s=0.3e-6,
        dispatch_s=0.2e-6,
    )


def load(name: str, workers: int | None = None) -> Machine:
    """A machine by name (`host`, or a key of MACHINES) or from a TOML file with Machine's fields."""
    if name == "host":
        return host(workers)
    if name in MACHINES:
        machine = MACHINES[name]
    elif name.endswith(".toml"):
        machine = _from_toml(Path(name))
    else:
        raise MegakernelError(f"unknown machine {name!r}: known are host, {', '.join(MACHINES)}, or a .toml file")
    return replace(machine, workers=workers) if workers else machine


def _from_toml(path: Path) -> Machine:
    try:
        table = tomllib.loads(path.read_text())
    except OSError as e:
        raise MegakernelError(f"cannot read machine file {path}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise MegakernelError(f"machine file {path} is not valid TOML: {e}") from e
    types = {f.name: {"str": str, "int": int, "float": float}[str(f.type)] for f in fields(Machine)}
    wrong = sorted(set(types) ^ set(table))
    if wrong:
        raise MegakernelError(f"machine file {path}: missing or unknown keys: {', '.join(wrong)}")
    try:
        values = {key: types[key](value) for key, value in table.items()}
    except (TypeError, ValueError) as e:
        raise MegakernelError(f"machine file {path}: {e}") from e
    bad = [key for key, value in values.items() if key not in ("name", "pages") and value <= 0]
    if bad:
        raise MegakernelError(f"machine file {path}: {bad[0]} must be positive")
    return Machine(**values)
