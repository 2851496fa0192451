"""Measures the rates of this machine for the verbs that compare with them, or reads earlier measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import machine as machines
from ..machine import Hardware, Machine
from ..program import Program
from ..roofline import Ceilings
from . import output

if TYPE_CHECKING:
    from megakernel.serving import LLM


def measured_ceilings(llm: LLM) -> Ceilings:
    """Return this machine's ceilings: for GPUs the datasheet's rates, otherwise rates measured with `llm.threads`."""
    from megakernel.serving.bench.ceilings import device_ceilings

    if llm.engine.backend.name == "cuda":
        return device_ceilings(llm.machine, llm.engine.dims.split.tp)
    found = host_ceilings(llm.threads)
    return found.of_integers if llm.activations == "q8" else found


def host_ceilings(threads: int, *, anew: bool = False) -> Ceilings:
    """Return the rates that this machine reaches with `threads` threads. They are measured now if `anew` is true or if
    there is no earlier measurement."""
    from megakernel.serving.bench import ceilings

    with output.busy("measuring this machine's ceilings"):
        found = ceilings.host_ceilings(threads, anew=anew)
    if found.warning:
        output.stderr.print(f"megakernel: warning: {found.warning}")
    return found


def host_machine(program: Program) -> Machine:
    """Describe the part of this host that a rank of the program has: its workers and its share of the host's rates."""
    from megakernel.serving.bench.ceilings import share_of

    ceilings = host_ceilings(min(program.workers * program.ranks, machines.cpu_count()))
    if program.dims.model.q8_activations:
        ceilings = ceilings.of_integers
    return share_of(ceilings, machines.host(program.workers), program.ranks)


def hardware_of(name: str) -> Hardware:
    """Return the description of the machine `name`. The machine `host` is described with its measured ceilings."""
    if name != machines.HOST:
        return machines.hardware(name)
    measured = host_ceilings(machines.cpu_count())
    return machines.host_hardware(measured.flops, measured.integer_ops, measured.read_bytes_per_s)
