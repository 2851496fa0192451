"""`megakernel simulate`: predicts the time of a step on any machine that a machine file describes."""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

from .. import machine as machines
from ..errors import MegakernelError
from ..machine import HOST, Machine
from ..program import Program, load_program
from ..roofline import memory_fit
from ..runtime import even_step
from ..settings import SETTINGS
from ..units import bytes_text
from . import output
from .options import STORED, verb
from .programs import MACHINE, add_source, compile_for
from .this_machine import host_machine
from .timeline import FILES, write_files

_CONTEXT = 128
_FLAGS = f"""
--tokens | count | (1, or the file's) | token rows of the step, spread over as many sequences as possible
--context | count | ({_CONTEXT}) | KV tokens of each sequence after the step
--no-pipelining | switch | off | without overlap: a worker begins an instruction only when its previous one has ended
--without | waits/copies/compute | - | what if: without waits of one instruction for another (waits); or, besides, with
    loads that take no time (copies), or with arithmetic that takes none (compute)
"""


@verb("simulate", add_source, _FLAGS + FILES + MACHINE, machine=None)
def run(args: argparse.Namespace) -> int:
    from megakernel.scheduler.simulate import simulate
    from megakernel.scheduler.simulate.costs import costs_of

    from ..timeline import render, resolve, summarise

    program, machine, tied = _program(args)
    tokens = args.tokens or program.dims.bucket.tokens
    sequences = min(tokens, program.dims.bucket.max_seqs)
    context = args.context or min(max(_CONTEXT, -(-tokens // sequences)), program.dims.bucket.max_context)
    if (rows := -(-tokens // sequences)) > context:
        raise MegakernelError(
            f"a sequence would have up to {rows} of the {tokens} tokens, more than the context of {context}:"
            " raise --context or lower --tokens"
        )
    table = even_step(program.dims, tokens, context)
    fit = _fit(program, machine, tied, sequences, context)
    costs = costs_of(machine)
    begin = perf_counter()
    with output.busy("simulating"):
        costs = costs.unpipelined() if args.no_pipelining else costs
        costs = costs.without(args.without) if args.without else costs
        done = simulate(program, machine, table, costs=costs, trace=True)
    seconds = perf_counter() - begin
    trace = done.trace
    assert trace is not None
    with output.busy("adding up"):
        step = resolve(program, trace, machine)
        summary = summarise(step)
    write_files(args, (step, summary))
    if args.json:
        facts = {name: value for name, value in vars(done).items() if name != "trace"}
        facts |= {"instructions": program.instructions, "machine": machine.name, "simulate_s": seconds}
        output.emit(facts | {"fits": fit["fits"], "memory": fit, "timeline": summary})
        return 0
    each = f"{rows} tokens each, " if rows > 1 else ""
    output.rows(
        (
            "machine",
            f"{machine.name}, {program.workers} workers" + (f", {program.ranks} ranks" if program.ranks > 1 else ""),
        ),
        ("step", f"{tokens} tokens of {sequences} sequences, {each}{context} KV tokens afterwards"),
        ("predicted", f"{done.step_s * 1e3:.3f} ms, the launch included, {done.tokens_per_s:,.0f} tokens/s"),
        (
            "moved",
            f"{bytes_text(done.memory_bytes)} between memory and cache, including repeated loads and"
            f" write-backs; {bytes_text(done.cache_bytes)} from the cache"
            + (f"; {bytes_text(done.link_bytes)} between ranks" if program.ranks > 1 else ""),
        ),
        ("simulated", f"{program.instructions:,} instructions in {seconds:.2f} s"),
    )
    output.stdout.print()
    render(summary, output.stdout)
    return 0


def _program(args: argparse.Namespace) -> tuple[Program, Machine, bool]:
    """Return the program, a machine with the program's number of workers, and whether the model's LM head is its
    embedding table (tied). A program file does not say whether its model is tied, so True is assumed."""
    if args.file:
        for setting in (SETTINGS[name] for name in STORED.split() if getattr(args, name) != SETTINGS[name].value()):
            raise MegakernelError(
                f"{setting.flag} cannot change {args.file}, which is already compiled: leave it out, or give --model "
                "instead of FILE"
            )
        program, tied = load_program(args.file), True
        workers, ranks, name = args.workers or program.workers, program.ranks, args.machine or program.machine
        advice = f"choose a --machine that {args.file} fits"
        if not args.machine and name not in {HOST, *machines.MACHINES}:
            raise MegakernelError(f"{args.file} was compiled for {name}, whose rates are unknown: give --machine")
    else:
        name = args.machine = args.machine or SETTINGS["machine"].value()
        workers, ranks, advice = args.workers or 1, args.tensor_parallel_size, "lower --workers or --tp"
    hardware = machines.hardware(name)
    if workers > hardware.chip.sms:
        raise MegakernelError(f"{name} has {hardware.chip.sms} workers per rank, not {workers}: {advice}")
    if ranks > hardware.node.gpus:
        raise MegakernelError(f"{name} has {hardware.node.gpus} devices in a node, not {ranks}: {advice}")
    if args.file:
        machine = machines.load(name, workers)
    else:
        tokens = args.tokens or 1
        args.max_model_len = args.context or _CONTEXT
        with output.busy("compiling"):
            program, config, machine = compile_for(args, tokens=tokens, logit_rows=tokens, max_seqs=tokens)
        machine, tied = machine.with_workers(program.workers), config.tied
    return program, host_machine(program) if machine.name == HOST else machine, tied


def _fit(program: Program, machine: Machine, tied: bool, sequences: int, context: int) -> dict[str, Any]:
    """Return the memory that the step needs on each rank, and print a warning if a rank has less. `sequences` is the
    number of sequences, each with `context` KV tokens."""
    from megakernel.serving.engine.memory import weight_bytes

    ranks = program.dims.ranks
    weights = max(weight_bytes(program.forward, dims.split, tied=tied) for dims in ranks)
    fit = memory_fit(ranks, weights, machine.memory_bytes, sequences, context)
    if not fit["fits"]:
        output.stderr.print(
            f"megakernel: warning: a rank needs {bytes_text(fit['needed_bytes'])} of memory, including"
            f" {bytes_text(weights)} of weights, but {machine.name} has"
            f" {bytes_text(machine.memory_bytes)}: the step cannot run there"
        )
    return fit
