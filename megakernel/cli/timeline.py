"""`megakernel timeline`: shows where the time of a step went, as a page and tables, and compares two steps."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import MegakernelError
from ..machine import MACHINES, Machine
from ..program import Program, load_program
from ..trace import Trace
from ..units import seconds
from . import output
from .options import MODEL_RUN, open_llm, prompt_ids, verb
from .this_machine import host_machine, measured_ceilings

if TYPE_CHECKING:
    from ..timeline.compare import Comparison
    from ..timeline.resolve import Resolved
    from ..timeline.summary import Summary

_STEPS = """
--compare | PATH... | - | compare with another trace: TRACE of the same program, or PROGRAM TRACE
--phase | prefill/decode | decode | which step to trace: prefill or decode
--prompt-tokens | count | 128 | tokens before the step
--launches | count | 5 | decode steps to record, of which the median is shown
"""
# The flags of the files that `write_files` writes.
FILES = """
-o --output | FILE.html | - | write an HTML page that works offline
--perfetto | FILE.pftrace | - | write a trace for ui.perfetto.dev
--save | STEM | - | save the step as STEM.program and STEM.trace
"""


def _add_traces(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", type=Path, nargs="?", metavar="PROGRAM", help="a program file")
    parser.add_argument("trace", type=Path, nargs="?", metavar="TRACE", help="a trace that was recorded from PROGRAM")


def write_files(
    args: argparse.Namespace, *shown: tuple[Resolved, Summary], comparison: Comparison | None = None
) -> None:
    """Write the files that the flags name. The HTML page has all traces in `shown`, other files only the first."""
    from ..timeline import write_html, write_perfetto

    step = shown[0][0]
    if args.save:
        step.program.save(args.save.with_name(args.save.name + ".program"))
        step.trace.save(args.save.with_name(args.save.name + ".trace"))
    if args.output:
        write_html(args.output, *shown, comparison=comparison)
    if args.perfetto:
        write_perfetto(args.perfetto, step)
    for path in filter(None, (args.output, args.perfetto)):
        output.stderr.print(f"wrote {path}")


@verb("timeline", _add_traces, _STEPS + FILES + MODEL_RUN)
def run(args: argparse.Namespace) -> int:
    from ..timeline import compare, machine_name, render, render_comparison, resolve, summarise

    machine = None
    if args.program is None:
        program, traces, machine = _traced(args)
    elif args.trace is None:
        raise MegakernelError(
            f"a timeline of {args.program} also needs a trace file: give PROGRAM TRACE, or use --model"
        )
    else:
        program, traces = load_program(args.program), [Trace.load(args.trace)]
        if machine_name(program, traces[0]) not in MACHINES:
            machine = host_machine(program)
    launches = sorted((resolve(program, trace, machine) for trace in traces), key=lambda launch: launch.step_s)
    step, times = launches[len(launches) // 2], [launch.step_s for launch in launches]
    summary = summarise(step)
    shown, comparison = [(step, summary)], None
    if args.compare:
        *own, second = args.compare
        if len(own) > 1:
            raise MegakernelError(f"--compare takes TRACE, or PROGRAM TRACE, not {len(args.compare)} files")
        other = load_program(own[0]) if own else program
        trace = Trace.load(second)
        alike = machine_name(other, trace) == machine_name(program, traces[0])
        compared = resolve(other, trace, machine if alike else None)
        comparison = compare(step, compared)
        if args.output:
            shown.append((compared, summarise(compared)))
    write_files(args, *shown, comparison=comparison)
    if args.json:
        recorded = {"recorded": times} if args.program is None else {}
        output.emit(asdict(summary) | recorded | ({"comparison": asdict(comparison)} if comparison else {}))
    else:
        render(summary, output.stdout)
        if len(traces) > 1:
            output.stdout.print(f"\nthe median of {len(times)} launches of {seconds(times[0])} to {seconds(times[-1])}")
        if comparison:
            output.stdout.print()
            render_comparison(comparison, output.stdout)
    return 0


def _traced(args: argparse.Namespace) -> tuple[Program, list[Trace], Machine]:
    """Run the model with tracing. Return the program, its traces, and one rank's share of the machine. For prefill, the
    trace is that of the prompt's last step. For decode, there are traces of several steps that ran the same program."""
    from megakernel.serving.bench.ceilings import share_of

    with open_llm(args, max_num_seqs=1) as llm:
        context, needed = llm.engine.dims.bucket.max_context, args.prompt_tokens + 1 + args.launches
        if args.phase == "decode" and needed > context:
            raise MegakernelError(
                f"a prompt of {args.prompt_tokens} tokens and {args.launches} decode steps need a context of {needed},"
                f" not {context}: raise --max-model-len, or lower --prompt-tokens or --launches"
            )
        machine = share_of(measured_ceilings(llm), llm.machine, llm.engine.dims.split.tp)
        with output.busy(f"tracing a {args.phase} step"):
            prefill, decode = llm.trace_steps(prompt_ids(llm, args.prompt_tokens), decode_steps=args.launches)
        steps = prefill[-1:] if args.phase == "prefill" else decode
        program = steps[-1].program
        traces = [step.output.trace for step in steps if step.output.trace and step.program.hash == program.hash]
        if not traces:
            raise MegakernelError(f"the backend {llm.engine.backend.name} recorded no trace: choose another --backend")
        return program, traces, machine
