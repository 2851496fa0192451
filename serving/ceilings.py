"""Roofline ceilings: of this machine's CPU, measured once by the native library's probes, or of GPUs' datasheets."""

from __future__ import annotations

from dataclasses import replace

from ..machine import HOST, Machine
from ..roofline import Ceilings, kept, machine_ceilings, measure
from ..runtime.cpu.native import probe_fma, probe_read, simd


def host_ceilings(threads: int, *, anew: bool = False) -> Ceilings:
    """The best memory bandwidth and FLOP rate that `threads` threads ever reached on this machine.

    The probes run now, for about three seconds, if there is no earlier result, if other processes kept the machine busy
    in every earlier run, or if `anew` is set.
    """
    name = kept.this_machine(simd())
    known = kept.recall(name, threads)
    if known is None or anew or not known.quiet:
        known = measure(threads, probe_read, probe_fma).better(known)
        kept.keep(name, known)
    return known.ceilings


def share_of(ceilings: Ceilings, machine: Machine, ranks: int) -> Machine:
    """`machine` with the rates of one of `ranks` equal parts of a host that has `ceilings`.

    A GPU keeps its datasheet's rates.
    """
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
    """The datasheet rates of `ranks` devices of type `machine`, added up."""
    one = machine_ceilings(machine)
    return replace(
        one,
        read_bytes_per_s=ranks * one.read_bytes_per_s,
        flops=ranks * one.flops,
        threads=ranks * one.threads,
        cache_bytes_per_s=ranks * one.cache_bytes_per_s if one.cache_bytes_per_s else None,
    )
