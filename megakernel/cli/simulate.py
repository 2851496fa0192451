"""`megakernel simulate`: a step in virtual time on a machine that need not be here."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from ..errors import MegakernelError
from ..settings import SETTINGS
from . import output
from .options import AddVerb, add_count
from .programs import add_machine, add_source, compile_for

if TYPE_CHECKING:
    from ..isa import Dims, StepTable
    from ..machine import Machine
    from ..program import Program

_CONTEXT = 128


def register(add: AddVerb) -> None:
    parser = add(
        "simulate",
        "predict a step's time: run a program in virtual time on a machine",
        "megakernel simulate --model random:llama-3.1-70b --machine h100 --tp 8 --tokens 8192 --queue attention",
    )
    add_source(parser)
    add_machine(parser)
    add_count(parser, "--tokens", None, "decode rows of the step (default: 1, or the file's)")
    add_count(parser, "--context", _CONTEXT, "KV tokens of each", "C")
    parser.add_argument(
        "--no-pipelining", action="store_true", help="a worker begins an instruction when the one before has ended"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.html", help="write the step's timeline")
    parser.add_argument("--save", type=Path, metavar="STEM", help="keep the step as STEM.program and STEM.trace")
    parser.set_defaults(run=run)


def decode_step(dims: Dims, tokens: int, context: int) -> StepTable:
    """A step of `tokens` sequences that add one token each and have `context` KV tokens afterwards.

    As many rows get logits as the program has room for.
    """
    from ..runtime import Chunk, SampleRow, build_step

    pages = range(-(-context // dims.kv_page))
    sampled = [SampleRow(0, prompt_length=context)]
    return build_step(
        dims,
        [Chunk(n, context - 1, [0], pages, sampled if n < dims.logit_rows else []) for n in range(tokens)],
    )


def run(args: argparse.Namespace) -> int:
    from ..scheduler.simulate import simulate
    from ..scheduler.simulate.costs import costs_of
    from ..timeline import write_html
    from ..timeline.overlap import compute_bound

    with output.busy("compiling"):
        program, machine = _program(args)
    tokens = args.tokens or program.dims.tokens
    table = decode_step(program.dims, tokens, args.context)
    costs = costs_of(machine)
    wanted = bool(args.output or args.save)
    begin = perf_counter()
    with output.busy("simulating"):
        done = simulate(
            program,
            machine,
            table,
            costs=costs.unpipelined() if args.no_pipelining else costs,
            trace=wanted,
            compute_bound=compute_bound(program, machine),
        )
    seconds = perf_counter() - begin
    if done.trace and args.save:
        program.save(args.save.with_name(args.save.name + ".program"))
        done.trace.save(args.save.with_name(args.save.name + ".trace"))
    if done.trace and args.output:
        write_html(program, done.trace, args.output)
    if args.json:
        facts = {name: value for name, value in vars(done).items() if name != "trace"}
        output.emit(facts | {"instructions": program.instructions, "machine": machine.name, "simulate_s": seconds})
        return 0
    output.rows(
        (
            "machine",
            f"{machine.name}, {program.workers} workers" + (f", {program.ranks} ranks" if program.ranks > 1 else ""),
        ),
        ("step", f"{tokens} tokens with {args.context} KV tokens each"),
        ("predicted", f"{done.step_s * 1e3:.3f} ms, {done.tokens_per_s:,.0f} tokens/s"),
        ("busy", _fractions(done.busy)),
        ("overlap", _fractions(done.overlap)),
        ("waiting", f"{done.wait:.1%} of the workers' time, {done.exposed_communication:.1%} for other ranks"),
        ("simulated", f"{program.instructions:,} instructions in {seconds:.2f} s"),
    )
    return 0


def _fractions(values: dict[str, float | None]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.1%}" for name, value in values.items() if value is not None)


def _program(args: argparse.Namespace) -> tuple[Program, Machine]:
    from .. import machine as machines
    from ..program import Program

    if args.file:
        if args.weights != SETTINGS["weights"].default:
            raise MegakernelError(
                f"{args.file} is compiled for its weights already: give --weights with --model, or leave it out"
            )
        program = Program.load(args.file)
        return program, machines.load(args.machine, args.workers or program.workers)
    tokens = args.tokens or 1
    compiled = compile_for(args, tokens=tokens, logit_rows=tokens, max_seqs=tokens)
    program, machine = compiled.program, compiled.machine
    return program, replace(machine, workers=program.workers)
