"""Roofline ceilings of this machine's CPU, measured with the native library, and the rates that each rank gets."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megakernel.machine import HOST, Machine
from megakernel.roofline import Ceilings, kept, measure
from megakernel.runtime.cpu.native import probe_fma, probe_read, simd


def host_ceilings(threads: int, *, anew: bool = False) -> Ceilings:
    """Return the highest memory bandwidth and FLOP rate that `threads` threads ever reached on this machine. A
    measurement of about one second runs now if `anew` is set, or if there is no earlier result. It also runs if other
    processes kept the machine busy in every earlier measurement."""
    name = kept.this_machine(simd())
    known = kept.recall(name, threads)
    if known is None or anew or not known.quiet:
        known = measure(threads, probe_read, probe_fma, partial(probe_fma, integers=True)).better(known)
        kept.keep(name, known)
    return known.ceilings


def share_of(ceilings: Ceilings, machine: Machine, ranks: int) -> Machine:
    """Return `machine` with the rates that each rank has if `ranks` ranks share its CPU equally. `ceilings` are the
    measured rates of the whole host. A GPU keeps its datasheet's rates."""
    if machine.name != HOST:
        return machine
    cache = ceilings.cache_bytes_per_s
    cache = machine.cache_bytes_per_s if cache is None else cache / ranks
    return replace(
        machine,
        memory_bytes_per_s=ceilings.read_bytes_per_s / ranks,
        matrix_flops=ceilings.flops / ranks,
        vector_flops=(ceilings.vector_flops or ceilings.flops) / ranks,
        cache_bytes_per_s=cache,
        worker_bytes_per_s=cache / machine.workers,
    )
