"""What the simulator takes things to cost: rates that are reached rather than promised, latencies, and room on chip.

Fractions and latencies are published measurements of others, named below; the host's are measured by
`benchmarks/simulate_host.py`. None was fitted to a step time: predictions are compared with measurements in
docs/simulator.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..machine import Machine

Rates = tuple[tuple[float, float], ...]  # (rows, rate), rows ascending


@dataclass(frozen=True)
class Costs:
    """Rates are of one rank's device unless they are a worker's. Seconds, bytes, FLOPs.

    Rates by rows are those of a worker for tiles of that many rows, in between on a line over log(rows).
    """

    matmul_flops: Rates  # of a worker
    attention_flops: Rates  # of a worker; rows are (query row, head) pairs that share K and V
    row_quantum: int  # a matrix unit computes whole multiples of so many rows
    vector_flops: float  # of a worker
    memory_bytes_per_s: float
    cache_bytes_per_s: float  # last shared cache to workers
    cache_bytes: float
    worker_bytes_per_s: float  # most that one worker loads, or stores
    egress_bytes_per_s: float  # of a rank, and as much into it
    switch_bytes_per_s: float  # of all ranks
    latency_s: float  # of a load
    store_s: float  # of a store, beside its bytes
    dispatch_s: float  # fetch, decode and set-up of an instruction
    claim_s: float  # more for one that comes from a queue
    signal_s: float  # from the end of a store to a waiting worker's knowing
    remote_signal_s: float  # the same between ranks
    launch_s: float
    ring_bytes: float  # loads that a worker holds ahead of its arithmetic
    stage_bytes: float  # loads that are computed on together
    in_flight: int  # instructions of a worker between set-up and end of store; 1: one after the other
    roles: bool  # whether a worker has a loader and a storer of its own

    def matmul_s(self, flops: NDArray[np.float64], rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of matrix work on one worker."""
        return self._padded(flops, rows) / _at(self.matmul_flops, rows)

    def attention_s(self, flops: NDArray[np.float64], rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same for attention items; `rows` counts (query row, head) pairs of one KV head."""
        return self._padded(flops, rows) / _at(self.attention_flops, rows)

    def _padded(self, flops: NDArray[np.float64], rows: NDArray[np.float64]) -> NDArray[np.float64]:
        rows = np.maximum(rows, 1)
        padded: NDArray[np.float64] = flops * (np.ceil(rows / self.row_quantum) * self.row_quantum / rows)
        return padded

    def unpipelined(self) -> Costs:
        """Without work of two instructions at once on a worker."""
        return replace(self, in_flight=1)


def _at(rates: Rates, rows: NDArray[np.float64]) -> NDArray[np.float64]:
    known, rate = np.array(rates).T
    between: NDArray[np.float64] = np.interp(np.log(np.maximum(rows, 1)), np.log(known), rate)
    return between


# -- GPUs
# Matrix unit: a large matmul takes 1 / 0.75 of what the datasheet's rate says (*How to Scale Your Model*, 2025, "How to
# Think About GPUs": about 20 us for a bound of 15.3). Its smallest tile has 64 rows (wgmma).
_MATRIX_FRACTION, _ROW_QUANTUM = 0.75, 64
# 3,089 GB/s copied on an H100 of 3,350 (AutoMegaKernel, arXiv 2606.09682).
_MEMORY_FRACTION = 0.92
# All-reduce bus bandwidth on eight H100s: 370 of 450 GB/s at most (the same chapter).
_LINK_FRACTION = 370 / 450
# L2 to SMs: 5.5 TB/s read on an H100 of 114 SMs at 1.755 GHz (Chips and Cheese, 2023, "Nvidia's H100: Funny L2, and
# Tons of Bandwidth"): bytes per SM and clock. Most that one SM takes per clock: 64 bytes (NVIDIA's A100 white paper).
_L2_BYTES_PER_CLOCK, _SM_BYTES_PER_CLOCK = 5.5e12 / (114 * 1.755e9), 64.0
# An asynchronous global load or store: about 500 ns ("Look Ma, No Bubbles!", HazyResearch, 2025, on a B200).
_LATENCY_S = _STORE_S = 0.5e-6
# An atomic on the far die: 432 ns (MPK's microbenchmarks, B200).
_CLAIM_S = 0.432e-6
# NVLink hop with skew: 2.3 to 2.6 us (a public Kimi-K3 design note for GB200).
_REMOTE_SIGNAL_S = 2.45e-6
# Stream launch of an H100 (HazyResearch).
_LAUNCH_S = 2.1e-6
# The Hopper interpreter: six pages of 32 KiB, stages of a 128 x 64 and a 64 x 256 tile, two instructions in flight.
_RING_BYTES, _STAGE_BYTES, _IN_FLIGHT = 6 * 32768.0, 49152.0, 2


@dataclass(frozen=True)
class _Gpu:
    """What `Machine` lacks: boost clock, L2 size, and a node's switch (per-port rate x ports, one direction)."""

    clock_hz: float
    l2_bytes: float
    switch_bytes_per_s: float


# Clocks, caches and switches: *How to Scale Your Model*; the B200's clock follows from its 80 TFLOP/s of float32.
_GPUS = {
    "v100": _Gpu(1.38e9, 6e6, 2.4e12),
    "a100": _Gpu(1.41e9, 40e6, 4.8e12),
    "h100": _Gpu(1.98e9, 50e6, 6.4e12),
    "h200": _Gpu(1.98e9, 50e6, 6.4e12),
    "b200": _Gpu(2.1e9, 126e6, 14.4e12),
    "gb200": _Gpu(2.1e9, 126e6, 130e12),
}


def _gpu_costs(machine: Machine, gpu: _Gpu) -> Costs:
    matrix = machine.matrix_flops / machine.workers * _MATRIX_FRACTION
    return Costs(
        matmul_flops=((1.0, matrix),),
        attention_flops=((1.0, matrix),),
        row_quantum=_ROW_QUANTUM,
        vector_flops=machine.vector_flops / machine.workers,
        memory_bytes_per_s=machine.memory_bytes_per_s * _MEMORY_FRACTION,
        cache_bytes_per_s=_L2_BYTES_PER_CLOCK * gpu.clock_hz * machine.workers,
        cache_bytes=gpu.l2_bytes,
        worker_bytes_per_s=_SM_BYTES_PER_CLOCK * gpu.clock_hz,
        egress_bytes_per_s=machine.link_bytes_per_s * _LINK_FRACTION,
        switch_bytes_per_s=gpu.switch_bytes_per_s,
        latency_s=_LATENCY_S,
        store_s=_STORE_S,
        dispatch_s=machine.dispatch_s,
        claim_s=_CLAIM_S,
        signal_s=machine.signal_s,
        remote_signal_s=_REMOTE_SIGNAL_S,
        launch_s=_LAUNCH_S,
        ring_bytes=_RING_BYTES,
        stage_bytes=_STAGE_BYTES,
        in_flight=_IN_FLIGHT,
        roles=True,
    )


# -- the host
# Two cores of an Intel Xeon (Cascade Lake, 2.5 GHz) in bfloat16: benchmarks/results/simulate-host.json. For another
# host, run benchmarks/simulate_host.py there.
def _host_costs(machine: Machine) -> Costs:
    return Costs(
        matmul_flops=((1.0, 52e9), (2.0, 90e9), (4.0, 110e9), (8.0, 125e9), (96.0, 124e9)),
        attention_flops=((4.0, 19.5e9), (16.0, 46.7e9), (64.0, 69.3e9), (128.0, 69.9e9)),
        row_quantum=1,
        vector_flops=11.8e9,
        memory_bytes_per_s=min(23.1e9, 11.6e9 * machine.workers),
        cache_bytes_per_s=24.9e9 * machine.workers,
        cache_bytes=37.5e6,
        worker_bytes_per_s=24.9e9,
        egress_bytes_per_s=machine.link_bytes_per_s,
        switch_bytes_per_s=machine.link_bytes_per_s,
        latency_s=0.0,
        store_s=0.0,
        dispatch_s=77e-9,
        claim_s=0.0,
        signal_s=102e-9,
        remote_signal_s=102e-9,
        launch_s=39.7e-6,
        ring_bytes=256.0 * 1024,
        stage_bytes=0.0,
        in_flight=1,
        roles=False,
    )


def costs_of(machine: Machine) -> Costs:
    """The table's costs for a machine: by its name, `h100x8` like `h100`; a GPU of another name is like an H100."""
    if machine.name == "host":
        return _host_costs(machine)
    known = (gpu for name, gpu in _GPUS.items() if machine.name.startswith(name))
    return _gpu_costs(machine, next(known, _GPUS["h100"]))
