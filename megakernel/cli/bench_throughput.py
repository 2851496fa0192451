"""`megakernel bench throughput`: the time to finish many prompts offline, through the engine alone."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.text import Text

from . import output
from .bench import measured_ceilings
from .options import AddVerb, add_model_run, add_setting, open_llm, positive
from .workload import add_workload, workload


def register(add: AddVerb) -> None:
    parser = add(
        "bench throughput",
        "time to finish many prompts, offline",
        "megakernel bench throughput --num-prompts 64 --dataset random --random-input-len 128",
    )
    add_model_run(parser)
    add_workload(parser, prompts=64)
    for name in ("max num seqs", "max num batched tokens"):
        add_setting(parser, name)
    parser.add_argument("--runs", type=positive, default=1, metavar="N", help="runs, after a short one (default: 1)")
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
            "settings": {
                "model": llm.model,
                "backend": llm.engine.backend.name,
                "dtype": llm.dtype.name.lower(),
                "threads": llm.threads,
                "workload": load.name,
                "num_prompts": len(load.jobs),
                "max_num_seqs": args.max_num_seqs,
                "max_num_batched_tokens": args.max_num_batched_tokens,
                "seed": args.seed,
            },
        }
    if args.json:
        output.emit(figures)
    else:
        show(figures)
    return 0


def show(figures: dict[str, Any]) -> None:
    ceilings = figures["ceilings"]
    output.rows(
        ("workload", f"{figures['settings']['num_prompts']} prompts: {figures['settings']['workload']}"),
        (
            "tokens",
            f"{figures['input_tokens']:,} in, {figures['output_tokens']:,} out, in {figures['duration_s']:.1f} s",
        ),
        (
            "throughput",
            Text.assemble(
                (f"{figures['tokens_per_s']:.1f} tokens/s out", "bold"),
                f", {figures['total_tokens_per_s']:.1f} in and out, {figures['requests_per_s']:.2f} requests/s",
            ),
        ),
        ("steps", f"{figures['steps']}, {figures['step_s'] * 1e3:.1f} ms each, {figures['sequences']:.1f} sequences"),
        (
            "roofline",
            Text.assemble(
                (f"{figures['roofline_fraction']:.0%}", "bold"),
                f" of the time is what the steps need: {figures['read_GBps']:.1f} of "
                f"{ceilings['read_bytes_per_s'] / 1e9:.1f} GB/s, {figures['gflops']:.0f} of "
                f"{ceilings['flops'] / 1e9:.0f} GFLOP/s",
            ),
        ),
    )
    if figures["error"]:
        output.stderr.print(f"megakernel: warning: {figures['error']}")
