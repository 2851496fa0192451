"""What the simulator takes things to cost: rates that are reached rather than promised, latencies, and room on chip.

Fractions and latencies are published measurements of others, named below; a CPU's are measured by
`megakernel doctor --calibrate`. None was fitted to a step time: predictions are compared with measurements in
docs/simulator.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...errors import MegakernelError
from ...isa.launch import CLAIM_SLOTS, PAGE_BYTES, SLOTS
from ...isa.pages import QUERY_TILE, STEP_PAGES
from ...machine import CPU, HOST, Core, Issue, Machine

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
    claim_in_flight: int  # the same where the next one comes from a queue
    roles: bool  # whether a worker has loaders and a storer of its own
    issue: Issue | None = None  # in seconds; None: rates have it in them

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

    def paired(self) -> Costs:
        """Of a worker that is two SMs. Each has all weights of a tile go through its port, and half of the rows: of the
        three parts that the two ports carry where a tile has as many rows as columns, two are counted as loads.
        """
        return replace(
            self,
            matmul_flops=tuple((rows, 2 * rate) for rows, rate in self.matmul_flops),
            attention_flops=tuple((rows, 2 * rate) for rows, rate in self.attention_flops),
            vector_flops=2 * self.vector_flops,
            worker_bytes_per_s=2 * self.worker_bytes_per_s * 2 / 3,
            stage_bytes=self.stage_bytes * 4 / 3,  # rows twice, and a weight tile once
        )

    def unpipelined(self) -> Costs:
        """Without work of two instructions at once on a worker."""
        return replace(self, in_flight=1, claim_in_flight=1)


def _at(rates: Rates, rows: NDArray[np.float64]) -> NDArray[np.float64]:
    known, rate = np.array(rates).T
    between: NDArray[np.float64] = np.interp(np.log(np.maximum(rows, 1)), np.log(known), rate)
    return between


# -- GPUs
# Matrix unit: a large matmul takes 1 / 0.75 of what the datasheet's rate says (*How to Scale Your Model*, 2025, "How to
# Think About GPUs": about 20 us for a bound of 15.3). A query tile of attention has one of its four quarters.
_MATRIX_FRACTION, _ROW_QUANTUM = 0.75, 4 * QUERY_TILE
# 3,089 GB/s copied on an H100 of 3,350 (AutoMegaKernel, arXiv 2606.09682).
_MEMORY_FRACTION = 0.92
# All-reduce bus bandwidth on eight H100s: 370 of 450 GB/s at most (the same chapter).
_LINK_FRACTION = 370 / 450
# An asynchronous global load or store: about 500 ns ("Look Ma, No Bubbles!", HazyResearch, 2025, on a B200).
_LATENCY_S = _STORE_S = 0.5e-6
# An atomic on the far die: 432 ns (MPK's microbenchmarks, B200).
_CLAIM_S = 0.432e-6


def _gpu_costs(machine: Machine) -> Costs:
    if not (machine.cache_bytes and machine.cache_bytes_per_s and machine.worker_bytes_per_s):
        raise MegakernelError(
            f"cannot simulate on {machine.name}: its file needs chip.l2_bytes, l2_bytes_per_clock and"
            " load_bytes_per_clock, or a base that has them"
        )
    matrix = machine.matrix_flops / machine.workers * _MATRIX_FRACTION
    handoff = machine.issue.handoff if machine.issue else 0.0
    return Costs(
        matmul_flops=((1.0, matrix),),
        attention_flops=((1.0, matrix),),
        row_quantum=_ROW_QUANTUM,
        vector_flops=machine.vector_flops / machine.workers,
        memory_bytes_per_s=machine.memory_bytes_per_s * _MEMORY_FRACTION,
        cache_bytes_per_s=machine.cache_bytes_per_s,
        cache_bytes=machine.cache_bytes,
        worker_bytes_per_s=machine.worker_bytes_per_s,
        egress_bytes_per_s=machine.link_bytes_per_s * _LINK_FRACTION,
        switch_bytes_per_s=machine.switch_bytes_per_s,
        latency_s=_LATENCY_S,
        store_s=_STORE_S,
        dispatch_s=machine.dispatch_s,
        claim_s=_CLAIM_S,
        signal_s=machine.signal_s + handoff,
        remote_signal_s=machine.remote_signal_s + handoff,
        launch_s=machine.launch_s,
        ring_bytes=float(machine.ring_pages * PAGE_BYTES),
        stage_bytes=float(STEP_PAGES * PAGE_BYTES),
        in_flight=SLOTS,
        claim_in_flight=CLAIM_SLOTS,
        roles=True,
        issue=machine.issue,
    )


# -- CPUs
# Two cores of an Intel Xeon (Cascade Lake, 2.5 GHz) in bfloat16, measured as `megakernel doctor --calibrate` does:
# benchmarks/results/simulate-host.json, attention of simulate-host-attention.json; the rate of its multiply-adds is of
# cpu-latency-smollm2-135m.json. A CPU that was not calibrated reaches the same part of its own multiply-adds.
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


def _cpu_costs(machine: Machine) -> Costs:
    core, scale = machine.core, 1.0
    if core is None:
        core, scale = _XEON, machine.matrix_flops / machine.workers / _XEON_FLOPS
    seconds = {name: getattr(machine, name) for name in _XEON_COSTS}
    return Costs(
        matmul_flops=_scaled(core.matmul_rows, core.matmul_flops_per_s, scale),
        attention_flops=_scaled(core.attention_rows, core.attention_flops_per_s, scale),
        row_quantum=1,
        vector_flops=core.vector_flops_per_s * scale,
        memory_bytes_per_s=machine.memory_bytes_per_s,
        cache_bytes_per_s=machine.cache_bytes_per_s,
        cache_bytes=machine.cache_bytes,
        worker_bytes_per_s=machine.worker_bytes_per_s,
        egress_bytes_per_s=machine.link_bytes_per_s,
        switch_bytes_per_s=machine.switch_bytes_per_s,
        latency_s=0.0,
        store_s=0.0,
        claim_s=0.0,
        ring_bytes=256.0 * 1024,
        stage_bytes=0.0,
        in_flight=1,
        claim_in_flight=1,
        roles=False,
        **(_XEON_COSTS if machine.name == HOST else seconds),
    )


def _scaled(rows: tuple[float, ...], rates: tuple[float, ...], scale: float) -> Rates:
    return tuple((row, rate * scale) for row, rate in zip(rows, rates, strict=True))


def costs_of(machine: Machine) -> Costs:
    """The table's costs for a machine. Those of `host` are of the rates that `machine` has, measured or nominal."""
    return _cpu_costs(machine) if machine.target == CPU else _gpu_costs(machine)
