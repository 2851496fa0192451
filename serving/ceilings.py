"""The ceilings of what a model runs on: this machine's CPU, measured once by the native library's probes, or GPUs."""

from __future__ import annotations

from dataclasses import replace

from ..machine import HOST, Machine
from ..roofline import Ceilings, kept, machine_ceilings, measure
from ..runtime.cpu.native import probe_fma, probe_read, simd


def host_ceilings(threads: int, *, anew: bool = False) -> Ceilings:
    """What `threads` threads read and compute at best, of all that was ever measured on this machine.

    Measured now (about three seconds) where that was never done, where others kept the machine busy each time, or
    `anew`.
    """
    name = kept.this_machine(simd())
    known = kept.recall(name, threads)
    if known is None or anew or not known.quiet:
        known = measure(threads, probe_read, probe_fma).better(known)
        kept.keep(name, known)
    return known.ceilings


def share_of(ceilings: Ceilings, machine: Machine, ranks: int) -> Machine:
    """`machine`, one of `ranks`, with its share of what `ceilings` say of all of them; a GPU is what its sheet says."""
    if machine.name != HOST:
        return machine
    flops, cache = ceilings.flops / ranks, ceilings.cache_bytes_per_s
    cache = machine.cache_bytes_per_s if cache is None else cache / ranks
    return replace(
        machine,
        memory_bytes_per_s=ceilings.read_bytes_per_s / ranks,
        matrix_flops=flops,
        vector_flops=flops,
        cache_bytes_per_s=cache,
        worker_bytes_per_s=cache / machine.workers,
    )


def device_ceilings(machine: Machine, ranks: int) -> Ceilings:
    """The datasheet's rates of `ranks` devices together, each of them `machine`."""
    one = machine_ceilings(machine)
    return replace(
        one,
        read_bytes_per_s=ranks * one.read_bytes_per_s,
        flops=ranks * one.flops,
        threads=ranks * one.threads,
        cache_bytes_per_s=ranks * one.cache_bytes_per_s if one.cache_bytes_per_s else None,
    )
