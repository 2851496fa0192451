"""`megakernel compile`, `disasm`, `verify`: write a program to a file, print its instructions, and prove it correct."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from .. import machine as machines
from ..machine import Machine
from ..model import ModelConfig
from ..program import Program, load_program
from ..units import bytes_text
from . import output
from .options import LOWERING, STORED, add_flags, lowering, paper_model, verb

# Programs compute logits for at most this many rows: by default, an engine runs this many sequences at once.
_SEQUENCES = 64
# The flags that say what a program is compiled for, and how.
MACHINE = f"""
machine tensor_parallel_size dtype {STORED}
--workers | count | (the machine's) | workers per rank
{LOWERING}"""
_BUCKET = f"""
--tokens | count | 1 | token rows of a step
max_model_len
{MACHINE}"""


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add flags for a verb that needs a program: a program file, or a model for which a program is compiled."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("file", type=Path, nargs="?", metavar="FILE", help="a program file")
    add_flags(source, "model", unset=True)


def compile_for(args: argparse.Namespace, **sizes: Any) -> tuple[Program, ModelConfig, Machine]:
    """Compile a program for the model and the machine that the flags in MACHINE name. Return the program, the
    model and the machine. `sizes` are further fields of the Spec, such as the maximum number of token rows.
    Without `sizes`, the sizes come from flags."""
    from megakernel.scheduler import Spec
    from megakernel.scheduler.tune import Fastest

    machine = machines.load(args.machine, args.workers)
    config, how = paper_model(args, machine, args.max_model_len or 0)
    most = min(args.tokens or 1, _SEQUENCES)
    sizes = sizes or {"tokens": args.tokens, "logit_rows": most, "max_seqs": most}
    sizes["max_context"] = args.max_model_len or config.max_context
    spec = Spec(config, machine, tp=args.tensor_parallel_size, options=lowering(args), **how, **sizes)
    return Fastest(spec)(tokens=spec.tokens, logit_rows=spec.logit_rows), config, machine


def load(args: argparse.Namespace) -> Program:
    """Load the program file that the command line names, or compile a program for `--model`."""
    return load_program(args.file) if args.file else compile_for(args)[0]


@verb("compile", "model", "-o --output | FILE | - | where to write the program", _BUCKET)
def run_compile(args: argparse.Namespace) -> int:
    from megakernel.scheduler import describe
    from megakernel.serving.engine.memory import weight_bytes

    begin = perf_counter()
    with output.busy("compiling"):
        program, config, machine = compile_for(args)
    seconds = perf_counter() - begin
    needed = max(
        weight_bytes(program.forward, program.dims.ranks[r].split, tied=config.tied) for r in range(program.ranks)
    )
    if needed > machine.memory_bytes:
        output.stderr.print(
            f"megakernel: warning: the weights of a rank take {bytes_text(needed)}, but {machine.name} has"
            f" {bytes_text(machine.memory_bytes)}"
        )
    facts = describe(program) | {
        "compile_s": seconds,
        "machine": machine.name,
        "weight_bytes": needed,
        "hash": program.hash,
        "path": str(args.output) if args.output else None,
    }
    if args.output:
        program.save(args.output)
    if args.json:
        output.emit(facts)
    else:
        ranks = f" on each of {program.ranks} ranks" if program.ranks > 1 else ""
        output.rows(
            ("program", f"{args.output or 'not written (-o FILE)'}, {bytes_text(facts['bytes'])}"),
            ("machine", f"{machine.name}, {program.workers} workers{ranks}"),
            ("lowering", output.lowering_text(facts["lowering"])),
            ("bucket", f"{program.dims.bucket.tokens} tokens, {program.dims.bucket.logit_rows} logit rows"),
            ("instructions", f"{program.instructions:,}"),
            ("counters", f"{program.total_counters:,}"),
            ("between ranks", bytes_text(facts["link_bytes"]) + " per launch"),
            ("weights", bytes_text(needed) + (" per rank" if program.ranks > 1 else "")),
            ("compiled in", f"{seconds:.2f} s"),
        )
    return 0


@verb("disasm", add_source, _BUCKET)
def run_disasm(args: argparse.Namespace) -> int:
    from megakernel.scheduler import disassemble

    lines = disassemble(load(args))
    if args.json:
        output.emit({"lines": list(lines)})
    else:
        sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


@verb("verify", add_source, _BUCKET)
def run_verify(args: argparse.Namespace) -> int:
    from megakernel.scheduler.verify import verify

    with output.busy("verifying"):
        program = load(args)
        report = verify(program)
    if args.json:
        found = {"ok": report.ok, "checked": report.checked, "verify_s": report.seconds}
        output.emit(found | {"violations": report.violations, "more": report.more})
    else:
        for violation in report.violations:
            print(violation)
        count = len(report.violations)
        listed = f"{'more than ' if report.more else ''}{count} violation{'s' if count > 1 else ''}"
        verdict = "ok" if report.ok else listed
        output.stdout.print(
            f"{verdict}: {report.checked:,} instructions checked in {report.seconds:.2f} s",
            style="green" if report.ok else "red",
        )
    return 0 if report.ok else 1
