"""The ceilings of what a model runs on: this machine's CPU, measured by the native library's probes, or GPUs."""

from __future__ import annotations

from dataclasses import replace

from ..machine import Machine
from ..roofline import Ceilings, machine_ceilings, measure_ceilings
from ..runtime.cpu.native import probe_fma, probe_read


def host_ceilings(threads: int) -> Ceilings:
    """Read bandwidth and float32 multiply-add rate of `threads` threads, measured now (about two seconds)."""
    return measure_ceilings(threads, probe_read, probe_fma)


def share_of(ceilings: Ceilings, machine: Machine) -> Machine:
    """`machine`, one rank's, with its workers' share of what `ceilings` say of all ranks together."""
    share = machine.workers / ceilings.threads
    return replace(machine, memory_bytes_per_s=share * ceilings.read_bytes_per_s, matrix_flops=share * ceilings.flops)


def device_ceilings(machine: Machine, ranks: int) -> Ceilings:
    """The datasheet's rates of `ranks` devices together, each of them `machine`."""
    one = machine_ceilings(machine)
    return replace(
        one, read_bytes_per_s=ranks * one.read_bytes_per_s, flops=ranks * one.flops, threads=ranks * one.threads
    )
