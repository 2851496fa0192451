"""Provides the maximum rates of this machine (memory bandwidth, FLOP/s) to commands that compare a speed with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import machine as machines
from ..machine import Hardware, Machine
from ..program import Program
from ..roofline import Ceilings, machine_ceilings
from . import output

if TYPE_CHECKING:
    from megakernel.serving import LLM


def measured_ceilings(llm: LLM) -> Ceilings:
    """Return this machine's maximum rates. They come from the datasheet for a GPU; on a CPU, they are measured with as
    many threads as `llm` uses."""
    if llm.engine.backend.name == "cuda":
        return machine_ceilings(llm.machine, llm.engine.dims.split.tp)
    found = host_ceilings(llm.threads)
    return found.of_integers if llm.activations == "q8" else found


def host_ceilings(threads: int, *, anew: bool = False) -> Ceilings:
    """Return the maximum rates of `threads` threads here. They are measured now if `anew` is set or none are stored."""
    from megakernel.serving.bench import ceilings

    with output.busy("measuring this machine's ceilings"):
        found = ceilings.host_ceilings(threads, anew=anew)
    if found.warning:
        output.stderr.print(f"megakernel: warning: {found.warning}")
    return found


def host_machine(program: Program) -> Machine:
    """Describe what one rank of `program` has on this machine: its CPU cores, and a fraction of the measured rates."""
    from megakernel.serving.bench.ceilings import share_of

    ceilings = host_ceilings(min(program.workers * program.ranks, machines.cpu_count()))
    if program.dims.model.q8_activations:
        ceilings = ceilings.of_integers
    return share_of(ceilings, machines.host(program.workers), program.ranks)


def hardware_of(name: str) -> Hardware:
    """Return the description of the machine `name`. The name `host` means this machine, with its measured rates."""
    if name != machines.HOST:
        return machines.hardware(name)
    measured = host_ceilings(machines.cpu_count())
    return machines.host_hardware(measured.flops, measured.integer_ops, measured.read_bytes_per_s)
