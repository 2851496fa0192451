"""The costs that the simulator uses: the rates that machines reach in practice, latencies, and sizes of on-chip memory.
The costs of GPUs come from microbenchmarks, machine code and published tables, whose sources are named here and in the
machine files. The costs of CPUs were measured by benchmarks/calibration/calibrate.py. None was fitted to the time of a
model's step. docs/simulator.md compares predictions with measurements."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakernel.errors import MegakernelError
from megakernel.machine import CPU, HOST, Core, Machine, Path
from megakernel.targets.launch import CLAIM_SLOTS, PAGE_BYTES, SLOTS
from megakernel.targets.pages import AHEAD_PAGES, QUERY_TILE, STAGES, STEP_PAGES, WINDOW_PAGES

Floats = NDArray[np.float64]
Rates = tuple[tuple[float, float], ...]  # (rows, rate), rows ascending


@dataclass(frozen=True, kw_only=True)
class TaskCosts:
    """The costs of each kind of work on a machine, in seconds, bytes and FLOPs. A rate is that of a whole device unless
    its comment says otherwise. A field of type `Rates` lists pairs (rows of a tile, a worker's rate for such a tile).
    Rates for other numbers of rows are interpolated linearly in log(rows).
    """

    matmul_flops: Rates  # of one worker
    attention_flops: Rates  # of one worker; "rows" counts the pairs (query row, query head) that share a KV head
    row_quantum: int  # matrix units compute a multiple of this many rows, so other numbers are rounded up
    vector_flops: float  # of a worker
    memory_bytes_per_s: float
    cache_bytes_per_s: float  # from the last-level cache to all workers together
    cache_bytes: float
    worker_bytes_per_s: float  # the maximum rate at which one worker loads or stores
    egress_bytes_per_s: float  # the maximum rate of data sent by a rank to other ranks, and of data received
    switch_bytes_per_s: float  # the maximum rate of the switch, for all ranks together
    latency_s: float = 0.0  # latency of a load
    store_s: float = 0.0  # latency of a store, added to the transfer time
    dispatch_s: float  # time to fetch, decode and set up an instruction
    claim_s: float = 0.0  # additional time to claim an instruction from a queue
    signal_s: float  # from the end of a store until a waiting worker knows of it
    remote_signal_s: float  # like signal_s, if the waiting worker is on another rank
    launch_s: float
    window_bytes: float = 0.0  # bytes in flight to one worker; small accesses to memory wait behind these bytes
    ahead_bytes: float = 0.0  # weights that one worker prefetches into the last-level cache when its ring is full
    page_bytes: float = 0.0  # how many bytes of weights a worker prefetches at a time
    ring_bytes: float  # bytes that a worker can load before its arithmetic needs them
    stage_bytes: float = 0.0  # bytes that must have arrived together before arithmetic on them starts
    ahead_steps: float = 0.0  # how many k steps of loads may be ahead of the arithmetic of matrix units

    # The maximum number of instructions that a worker has begun to set up and not yet stored. With 1, none overlap.
    in_flight: int
    claim_in_flight: int  # like in_flight, but while the worker takes its next instruction from a queue
    roles: bool  # whether loads, arithmetic and stores run in separate warps, and so at the same time
    synchronised: bool = True  # whether instructions wait for one another
    paths: dict[str, Path] | None = None  # times of pieces of machine code; None if the rates include these times
    fixed: bool = True  # whether to count the time before an instruction's first page and after its last one

    def seconds(self, rates: Rates, flops: Floats, rows: Floats) -> Floats:
        """Return the seconds that `flops` FLOPs of tiles with `rows` rows take on one worker at `rates`."""
        rows = np.maximum(rows, 1)
        known, rate = np.array(rates).T
        padded = flops * (np.ceil(rows / self.row_quantum) * self.row_quantum / rows)
        seconds: Floats = padded / np.interp(np.log(rows), np.log(known), rate)
        return seconds

    def unpipelined(self) -> TaskCosts:
        """Return costs with which each worker finishes an instruction before it starts the next one."""
        return replace(self, in_flight=1, claim_in_flight=1)

    def without(self, what: str) -> TaskCosts:
        """Return costs with one kind of work left out. A GPU can run such a step too, for comparison. Without "waits",
        no instruction waits for another. Without "copies", loads take no time either. Without "compute", instructions
        neither wait nor compute."""
        changes, free = _WITHOUT[what]
        paths = self.paths and {**self.paths, **dict.fromkeys(free, Path(0.0, 0.0))}
        return replace(self, **changes, synchronised=False, paths=paths)


_UNLIMITED = 1e30
_RATES = ("memory_bytes_per_s", "cache_bytes_per_s", "worker_bytes_per_s")
_LOADING = ("weight_page", "input_page", "tile_step", "pass_page")
_COMPUTING = ("dot_pair", "dot_pairs", "dot_row", "dot_unit", "k_step", "sample_step")
_FAST = dict.fromkeys(("matmul_flops", "attention_flops"), ((1.0, _UNLIMITED),))
# For each kind of work that can be left out: the changes of TaskCosts, and the pieces of code that take no time.
_WITHOUT: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "waits": ({}, ()),
    "copies": ({"latency_s": 0.0, **dict.fromkeys(_RATES, _UNLIMITED)}, _LOADING),
    "compute": ({**_FAST, "vector_flops": _UNLIMITED, "fixed": False}, _COMPUTING),
}


def _same(machine: Machine) -> dict[str, Any]:
    names = ("cache_bytes_per_s", "cache_bytes", "worker_bytes_per_s", "switch_bytes_per_s")
    return {name: getattr(machine, name) for name in names}


# GPUs: fractions of the datasheet's rates that benchmarks/speed/probe_gpu.py has measured on an H100
# (benchmarks/results/gpu-h100.json). torch.matmul of 8,192 x 8,192 x 8,192 in bf16 did 780 of 990 TFLOP/s. With one
# row, it read 134 MB of weights in 48.3 us (50.4 us minus the launch): 2.78 of 3.35 TB/s. (A stream of plain reads
# reaches 3.15, but every step reads weights as a matmul does.) A tile of attention queries occupies only a quarter of
# an SM's matrix units.
_MATRIX_FRACTION, _ROW_QUANTUM = 780 / 990, 4 * QUERY_TILE
_MEMORY_FRACTION = 2.78 / 3.35
# The bus bandwidth of an all-reduce on eight H100s reaches at most 370 of 450 GB/s ("How to Think About GPUs").
_LINK_FRACTION = 370 / 450
# An asynchronous global load takes about 500 ns ("Look Ma, No Bubbles!", HazyResearch, 2025, on a B200).
_LATENCY_S = 0.5e-6
# A hand-off (a signal between SMs) takes this many accesses to the L2 cache in sequence: one for a fence, half of one
# until the signal arrives, half of a poll that was too early (on average), and one for the poll that succeeds. The
# stores before the fence take one more.
HAND_OFF_TRIPS, _STORE_TRIPS = 3, 1
# An atomic operation on the far die takes 432 ns (MPK's microbenchmarks, B200).
_CLAIM_S = 0.432e-6


def _gpu_costs(machine: Machine) -> TaskCosts:
    if not (machine.cache_bytes and machine.cache_bytes_per_s and machine.worker_bytes_per_s):
        raise MegakernelError(
            f"cannot simulate on {machine.name}: its file, or the `base` that it names, needs l2_bytes,"
            " l2_bytes_per_clock and load_bytes_per_clock in [chip]"
        )
    matrix = machine.matrix_flops / machine.workers * _MATRIX_FRACTION
    trip_s, code_s = (machine.paths["l2_trip"].warm, machine.paths["hand_off"].cold) if machine.paths else (0.0, 0.0)
    return TaskCosts(
        matmul_flops=((1.0, matrix),),
        attention_flops=((1.0, matrix),),
        row_quantum=_ROW_QUANTUM,
        vector_flops=machine.vector_flops / machine.workers,
        memory_bytes_per_s=machine.memory_bytes_per_s * _MEMORY_FRACTION,
        egress_bytes_per_s=machine.link_bytes_per_s * _LINK_FRACTION,
        latency_s=_LATENCY_S,
        store_s=_STORE_TRIPS * trip_s,
        dispatch_s=machine.costs.dispatch_s,
        claim_s=_CLAIM_S,
        signal_s=HAND_OFF_TRIPS * trip_s + code_s,
        remote_signal_s=machine.costs.node_hop_s + code_s,
        launch_s=machine.costs.stream_launch_s,
        window_bytes=float(WINDOW_PAGES * PAGE_BYTES),
        ahead_bytes=float(AHEAD_PAGES * PAGE_BYTES),
        page_bytes=float(PAGE_BYTES),
        ring_bytes=float(machine.tiles.pages * PAGE_BYTES),
        stage_bytes=float(STEP_PAGES * PAGE_BYTES),
        ahead_steps=float(STAGES - 1),
        in_flight=SLOTS,
        claim_in_flight=CLAIM_SLOTS,
        roles=True,
        paths=machine.paths,
        **_same(machine),
    )


# CPUs: _XEON has the rates per core of an Intel Xeon (Cascade Lake, 2.5 GHz) in bfloat16. They were measured with two
# cores in use, as benchmarks/calibration/calibrate.py measures them. The results are in benchmarks/results:
# simulate-host.json, simulate-host-attention.json for attention, and cpu-latency-smollm2-135m.json for multiply-adds. A
# CPU that was not calibrated is assumed to reach the same fractions of its peak rates.
_XEON = Core(
    memory_bytes_per_s=11.6e9,
    matmul_rows=(1, 2, 4, 8, 96),
    matmul_flops_per_s=(52e9, 90e9, 110e9, 125e9, 124e9),
    attention_rows=(4, 16, 64, 128),
    attention_flops_per_s=(33.3e9, 49.6e9, 68.8e9, 68.3e9),
    vector_flops_per_s=11.8e9,
)
_XEON_FLOPS = 166.8e9
_XEON_COSTS = {"dispatch_s": 77e-9, "signal_s": 102e-9, "remote_signal_s": 102e-9, "launch_s": 39.7e-6}


def _cpu_costs(machine: Machine) -> TaskCosts:
    core, scale = machine.core, 1.0
    if core is None:
        core, scale = _XEON, machine.matrix_flops / machine.workers / _XEON_FLOPS
    own = machine.costs
    seconds: dict[str, Any] = {"dispatch_s": own.dispatch_s, "signal_s": own.signal_s}
    seconds |= {"remote_signal_s": own.node_hop_s, "launch_s": own.stream_launch_s}
    return TaskCosts(
        matmul_flops=_scaled(core.matmul_rows, core.matmul_flops_per_s, scale),
        attention_flops=_scaled(core.attention_rows, core.attention_flops_per_s, scale),
        row_quantum=1,
        vector_flops=core.vector_flops_per_s * scale,
        memory_bytes_per_s=machine.memory_bytes_per_s,
        egress_bytes_per_s=machine.link_bytes_per_s,
        ring_bytes=256.0 * 1024,
        in_flight=1,
        claim_in_flight=1,
        roles=False,
        **_same(machine),
        **(_XEON_COSTS if machine.name == HOST else seconds),
    )


def _scaled(rows: tuple[float, ...], rates: tuple[float, ...], scale: float) -> Rates:
    return tuple((row, rate * scale) for row, rate in zip(rows, rates, strict=True))


def costs_of(machine: Machine) -> TaskCosts:
    """Return the costs of a machine. If this computer (`host`) was not calibrated, its costs are assumptions."""
    return _cpu_costs(machine) if machine.tiles.target == CPU else _gpu_costs(machine)
