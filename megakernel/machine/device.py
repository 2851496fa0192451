"""Describes one device as the compiler needs it: its number of workers, its rates and latencies, and suitable tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec import structs

from ..errors import MegakernelError
from .files import HOST, hardware, names
from .hardware import Core, Costs, Hardware, Path, Rates, Tiles

CPU = "cpu"  # the value of `tiles.target` for machines whose workers are CPU cores


@dataclass(frozen=True)
class Machine:
    """One rank's device. Rates are those of the whole device, per second; its workers share them equally."""

    name: str
    workers: int
    matrix_flops: float  # FLOP/s of matmuls in bf16 with float32 sums
    vector_flops: float  # FLOP/s of float32 arithmetic outside the matrix unit
    memory_bytes_per_s: float
    memory_bytes: float
    cache_bytes: float  # the size of the last-level cache
    cache_bytes_per_s: float  # rate at which all workers together load from the last-level cache
    worker_bytes_per_s: float  # maximum rate at which one worker loads or stores
    link_bytes_per_s: float  # rate at which the device sends to other devices of its node
    switch_bytes_per_s: float  # rate of the node's switches, for all devices together
    tiles: Tiles
    costs: Costs
    paths: dict[str, Path] | None = None  # times of parts of the machine code; None: unknown, or included in rates
    core: Core | None = None  # measured rates of a CPU core; None if there are none

    def with_tiles(self, **sizes: int) -> Machine:
        """Return the device with other values for some fields of its `tiles`."""
        return replace(self, tiles=structs.replace(self.tiles, **sizes))

    def with_workers(self, workers: int) -> Machine:
        """Return the device restricted to `workers` workers. Rates per worker stay the same. So a few workers may read
        more slowly than the memory can deliver."""
        if workers == self.workers:
            return self
        share = workers / self.workers
        alone = self.core.memory_bytes_per_s if self.core else self.worker_bytes_per_s or self.memory_bytes_per_s
        return replace(
            self,
            workers=workers,
            matrix_flops=self.matrix_flops * share,
            vector_flops=self.vector_flops * share,
            memory_bytes_per_s=min(self.memory_bytes_per_s, workers * alone),
            cache_bytes_per_s=self.cache_bytes_per_s * share,
        )


def _machine(hardware: Hardware) -> Machine:
    """Return one device of a machine. Raises MegakernelError if the machine is described only for comparisons."""
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
        tiles=hardware.tiles,
        costs=hardware.costs,
        paths=hardware.path_seconds(),
        core=hardware.core,
    )


MACHINES: dict[str, Machine] = {h.name: _machine(h) for h in map(hardware, names()) if h.tiles}


def host(workers: int | None = None) -> Machine:
    """Return this machine's CPU with `workers` cores. Its rates are estimates, enough to distribute work."""
    return _machine(hardware(HOST, workers))


def host_hardware(flops_per_s: float, integer_ops_per_s: float | None, read_bytes_per_s: float) -> Hardware:
    """Return this machine's CPU as one device with measured rates, in FLOP/s, integer operations/s and bytes/s."""
    nominal = hardware(HOST)
    return structs.replace(
        nominal,
        chip=structs.replace(nominal.chip, hbm_bytes_per_s=read_bytes_per_s),
        rates=Rates(bf16=flops_per_s, fp32=flops_per_s, int8=integer_ops_per_s),
    )


def load(name: str, workers: int | None = None) -> Machine:
    """Return one device of the machine `name` (see `hardware`), with `workers` SMs or cores if they are given."""
    machine = MACHINES.get(name) or _machine(hardware(name, workers))
    return machine.with_workers(workers or machine.workers)
