"""`megakernel bench throughput`: the time to finish many prompts offline, through the engine alone."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from statistics import median
from typing import Any

from . import output
from .bench import measured_ceilings, speculated
from .options import AddVerb, add_count, add_model_run, add_setting, add_speculate, open_llm
from .workload import add_workload, workload


def register(add: AddVerb) -> None:
    parser = add(
        "bench throughput",
        "time to finish many prompts, offline",
        "megakernel bench throughput --num-prompts 64 --dataset random --random-input-len 128",
    )
    add_model_run(parser)
    add_speculate(parser)
    add_workload(parser, prompts=64)
    for name in ("max num seqs", "max num batched tokens"):
        add_setting(parser, name)
    add_count(parser, "--runs", 1, "runs, after a short one")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..serving.throughput import measure

    with open_llm(args, max_seqs=args.max_num_seqs, step_tokens=args.max_num_batched_tokens) as llm:
        load = workload(args, llm.config.vocab, llm.encode)
        ceilings = measured_ceilings(llm)
        with output.progress("generating") as advance:
            runs = measure(llm, load, args.runs, ceilings, advance)
        middle = sorted(runs, key=lambda one: float(one["tokens_per_s"]))[len(runs) // 2]
        figures: dict[str, Any] = middle | {
            "tokens_per_s": median(one["tokens_per_s"] for one in runs),
            "runs": runs,
            "vs": {},
            "ceilings": asdict(ceilings),
            "settings": llm.about
            | {
                "workload": load.name,
                "num_prompts": len(load.jobs),
                "max_num_seqs": args.max_num_seqs,
                "max_num_batched_tokens": args.max_num_batched_tokens,
                "speculate": args.speculate,
                "seed": args.seed,
            },
        }
    (output.emit if args.json else show)(figures)
    return 0


def show(figures: dict[str, Any]) -> None:
    tokens = f"{figures['input_tokens']:,} in, {figures['output_tokens']:,} out"
    others = f", {figures['total_tokens_per_s']:.1f} in and out, {figures['requests_per_s']:.2f} requests/s"
    needed = f" of the time is what the steps need: {output.rates(figures)}"
    output.rows(
        ("workload", f"{figures['settings']['num_prompts']} prompts: {figures['settings']['workload']}"),
        ("tokens", f"{tokens}, in {figures['duration_s']:.1f} s"),
        ("throughput", output.bold(f"{figures['tokens_per_s']:.1f} tokens/s out", others)),
        ("steps", f"{figures['steps']}, {figures['step_s'] * 1e3:.1f} ms each, {figures['sequences']:.1f} sequences"),
        ("roofline", output.bold(f"{figures['roofline_fraction']:.0%}", needed)),
        *speculated(figures),
    )
    if figures["error"]:
        output.stderr.print(f"megakernel: warning: {figures['error']}")
