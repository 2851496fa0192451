"""What a compiler needs of a device: workers, rates and the tile shapes that suit it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import MegakernelError
from .files import names, read
from .hardware import Chip, Hardware, Issue, Link, Node, Rates

HOST = "host"
_LANES = 16  # of a CPU core's vector unit, AVX-512's; nominal


@dataclass(frozen=True)
class Machine:
    """One rank's device. Rates are per device, in units per second; `workers` share them evenly."""

    name: str
    workers: int
    matrix_flops: float  # bf16 with float32 accumulation, FLOP/s
    vector_flops: float  # float32 outside the matrix unit, FLOP/s
    memory_bytes_per_s: float
    memory_bytes: float
    cache_bytes: float  # the last shared one
    cache_bytes_per_s: float  # from it to all workers
    worker_bytes_per_s: float  # most that one worker loads, or stores
    link_bytes_per_s: float  # egress to peers, one direction
    switch_bytes_per_s: float  # of all of a node's devices
    tile_rows: int  # token rows of a matmul tile, and of a row block
    tile_cols: int  # output columns of a matmul tile
    col_unit: int  # column tiles start and end on multiples of this
    kv_page: int  # KV tokens per page of the cache
    ring_pages: int  # pages of shared memory that a worker streams operands through; 0: a CPU core, which has caches
    target: str  # of those that programs are compiled for: cpu or hopper
    launch_s: float
    signal_s: float  # from a signal to a waiting worker's start
    remote_signal_s: float  # the same between devices of a node
    dispatch_s: float  # fetch, decode and set-up of one instruction
    issue: Issue | None = None  # in seconds; None: not known, or no part of the rates


def _machine(hardware: Hardware) -> Machine:
    """The device of a machine that has tiles and costs."""
    if hardware.tiles is None or hardware.costs is None:
        raise MegakernelError(f"{hardware.name} is known for comparison only: programs are not compiled for it")
    return Machine(
        name=hardware.name,
        workers=hardware.chip.sms,
        matrix_flops=hardware.rates.bf16,
        vector_flops=hardware.rates.fp32,
        memory_bytes_per_s=hardware.chip.hbm_bytes_per_s,
        memory_bytes=hardware.chip.hbm_bytes,
        cache_bytes=hardware.chip.l2_bytes,
        cache_bytes_per_s=hardware.l2_bytes_per_s,
        worker_bytes_per_s=hardware.chip.load_bytes_per_clock * hardware.clock_hz,
        link_bytes_per_s=hardware.link.egress_bytes_per_s,
        switch_bytes_per_s=hardware.switch_bytes_per_s,
        tile_rows=hardware.tiles.rows,
        tile_cols=hardware.tiles.cols,
        col_unit=hardware.tiles.col_unit,
        kv_page=hardware.tiles.page,
        ring_pages=hardware.tiles.pages,
        target=hardware.tiles.target,
        launch_s=hardware.costs.stream_launch_s,
        signal_s=hardware.costs.signal_s,
        remote_signal_s=hardware.costs.node_hop_s,
        dispatch_s=hardware.costs.dispatch_s,
        issue=hardware.issue and hardware.issue.at(hardware.clock_hz),
    )


MACHINES: dict[str, Machine] = {h.name: _machine(h) for h in map(read, names()) if h.tiles}


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
        name=HOST,
        workers=n,
        matrix_flops=80e9 * n,
        vector_flops=20e9 * n,
        memory_bytes_per_s=10e9 * n,
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        cache_bytes=36e6,
        cache_bytes_per_s=40e9 * n,
        worker_bytes_per_s=40e9,
        link_bytes_per_s=10e9,
        switch_bytes_per_s=10e9,
        tile_rows=96,
        tile_cols=256,
        col_unit=16,
        kv_page=16,
        ring_pages=0,
        target="cpu",
        launch_s=10e-6,
        signal_s=0.3e-6,
        remote_signal_s=0.3e-6,
        dispatch_s=0.2e-6,
    )


def host_hardware(flops_per_s: float | None = None, read_bytes_per_s: float | None = None) -> Hardware:
    """This machine's CPU as one device: a core is an SM with one vector unit. Rates are nominal where not given."""
    machine = host()
    return Hardware(
        name=machine.name,
        chip=Chip(
            generation=processor(),
            sms=machine.workers,
            subpartitions_per_sm=1,
            fp32_lanes_per_subpartition=_LANES,
            hbm_bytes=machine.memory_bytes,
            hbm_bytes_per_s=read_bytes_per_s or machine.memory_bytes_per_s,
        ),
        # bf16 weights are widened and multiplied in fp32, at its rate.
        rates=Rates(bf16=flops_per_s or machine.matrix_flops, fp32=flops_per_s or machine.matrix_flops),
        link=Link(ports=1, port_bytes_per_s=machine.link_bytes_per_s),
        node=Node(gpus=1, nic_bytes_per_s_per_gpu=machine.link_bytes_per_s),
    )


def hardware(name: str) -> Hardware:
    """Everything that is known of a machine: `host`, a known name, a node such as h100x8, or a TOML file."""
    return host_hardware() if name == HOST else read(name)


def load(name: str, workers: int | None = None) -> Machine:
    """One device of a machine, by the names that `hardware` takes."""
    if name == HOST:
        return host(workers)
    machine = MACHINES.get(name) or _machine(read(name))
    return replace(machine, workers=workers) if workers else machine
