"""Declares what the compiler needs to know about a device: its workers, rates, and suitable tile shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import MegakernelError
from .files import HOST, names, read
from .hardware import Core, Hardware, Issue, Rates

CPU = "cpu"  # the value of `target` for machines whose workers are CPU cores


@dataclass(frozen=True)
class Machine:
    """One rank's device. Rates are per device, in units per second; `workers` share them equally."""

    name: str
    workers: int
    matrix_flops: float  # bf16 with float32 accumulation, FLOP/s
    vector_flops: float  # float32 outside the matrix unit, FLOP/s
    memory_bytes_per_s: float
    memory_bytes: float
    cache_bytes: float  # the size of the last-level cache
    cache_bytes_per_s: float  # the rate from the last-level cache to all workers together
    worker_bytes_per_s: float  # the maximum rate at which one worker loads or stores
    link_bytes_per_s: float  # the rate at which the device sends to its peers
    switch_bytes_per_s: float  # the rate of the node's switch, for all devices together
    tile_rows: int  # token rows of a matmul tile and of a row block
    tile_cols: int  # output columns of a matmul tile
    col_unit: int  # column tiles start and end on multiples of this number of columns
    kv_page: int  # KV tokens per page of the cache
    ring_pages: int  # pages of shared memory in the ring that a worker streams operands through; 0 for a CPU core
    target: str  # the target that programs are compiled for: CPU or hopper
    launch_s: float
    signal_s: float  # time from a signal until a waiting worker starts
    remote_signal_s: float  # the time from a signal until a waiting worker on another device of the node starts
    dispatch_s: float  # time to fetch, decode and set up one instruction
    issue: Issue | None = None  # issue times in seconds; None if they are unknown or part of the rates above
    core: Core | None = None  # measured rates of a CPU core; None if there are none


def _machine(hardware: Hardware) -> Machine:
    """Return the device of a machine. `hardware` must have tiles and costs."""
    if hardware.tiles is None or hardware.costs is None:
        raise MegakernelError(f"{hardware.name} serves for comparison only: choose another --machine to compile for")
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
        core=hardware.core,
    )


MACHINES: dict[str, Machine] = {h.name: _machine(h) for h in map(read, names()) if h.tiles}


def host(workers: int | None = None) -> Machine:
    """This machine's CPU with one worker per core, at nominal rates, which only guide the placement of work."""
    return _machine(read(HOST, workers))


def host_hardware(flops_per_s: float, integer_ops_per_s: float | None, read_bytes_per_s: float) -> Hardware:
    """This machine's CPU as one device with measured rates. bf16 and float32 get the same rate."""
    nominal = read(HOST)
    return replace(
        nominal,
        chip=replace(nominal.chip, hbm_bytes_per_s=read_bytes_per_s),
        rates=Rates(bf16=flops_per_s, fp32=flops_per_s, int8=integer_ops_per_s),
    )


def hardware(name: str) -> Hardware:
    """Everything that is known of a machine: `host`, a known name, a node such as h100x8, or a TOML file."""
    return read(name)


def load(name: str, workers: int | None = None) -> Machine:
    """One device of a machine that `hardware` knows, with this many workers (for a CPU: cores)."""
    machine = MACHINES.get(name) or _machine(read(name, workers))
    if not workers or workers == machine.workers:
        return machine
    if machine.target != CPU:
        return replace(machine, workers=workers)
    share = workers / machine.workers
    alone = machine.core.memory_bytes_per_s if machine.core else machine.memory_bytes_per_s
    return replace(
        machine,
        workers=workers,
        matrix_flops=machine.matrix_flops * share,
        vector_flops=machine.vector_flops * share,
        memory_bytes_per_s=min(machine.memory_bytes_per_s, workers * alone),
        cache_bytes_per_s=machine.cache_bytes_per_s * share,
    )
