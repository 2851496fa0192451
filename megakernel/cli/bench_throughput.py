"""`megakernel bench throughput`: the time to finish many prompts offline, without a server."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from ..errors import MegakernelError
from . import output, versus
from .bench import speculated
from .host import measured_ceilings
from .options import AddVerb, add_count, add_model_run, add_setting, open_llm
from .workload import add_workload, workload

if TYPE_CHECKING:
    from megakernel.serving.bench import Workload

# The defaults if `--vs` asks for a comparison: a batch of prompts of equal length, which other programs can run too,
# and enough runs for a median.
_BATCH = {"dataset": "random", "num_prompts": 32, "random_input_len": 64, "random_output_len": 96}
_RUNS, _COMPARED_RUNS = 1, 5


def register(add: AddVerb) -> None:
    parser = add(
        "bench throughput",
        "measure the time to finish many prompts offline",
        "megakernel bench throughput --num-prompts 64 --dataset random --random-input-len 128",
    )
    add_model_run(parser)
    add_setting(parser, "speculate")
    add_workload(parser, prompts=64)
    for name in ("max num seqs", "max num batched tokens"):
        add_setting(parser, name)
    add_count(parser, "--runs", None, f"runs, after a short warm-up (default: {_RUNS}; {_COMPARED_RUNS} with --vs)")
    versus.add_versus(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from megakernel.serving.bench.throughput import measure

    found = versus.find_peers(args, batched=True)
    if found:
        args.unless = args.unless | _BATCH
    number = args.runs or (_COMPARED_RUNS if found else _RUNS)
    with open_llm(args, max_seqs=args.max_num_seqs, step_tokens=args.max_num_batched_tokens) as llm:
        load = workload(args, llm.config.vocab, llm.encode)
        sizes = _batch(load, args.max_num_seqs) if found else (0, 0, 0)
        with versus.opened(found, llm, args, sizes, ("batch",)) as peers:
            ceilings = measured_ceilings(llm)

            def take_turns() -> None:
                for peer in peers:
                    peer.run()

            with output.progress("generating") as advance:
                runs = measure(llm, load, number, ceilings, advance, take_turns)
        middle = sorted(runs, key=lambda one: float(one["tokens_per_s"]))[len(runs) // 2]
        figures: dict[str, Any] = middle | {
            "tokens_per_s": median(one["tokens_per_s"] for one in runs),
            "runs": runs,
            "vs": {peer.peer.name: peer.figures({"batch": [one["duration_s"] for one in runs]}) for peer in peers},
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


def _batch(load: Workload, most: int) -> tuple[int, int, int]:
    """Return the number of sequences, the number of tokens per prompt, and the number of decode steps.

    Raises MegakernelError if the prompts or the answers differ in length.

    """
    lengths = {(job.prompt_tokens, job.output_tokens) for job in load.jobs}
    if len(lengths) > 1:
        raise MegakernelError(
            "--vs needs prompts and answers of equal lengths, but these differ: use --dataset random with a range "
            "ratio of 0, or compare servers with `bench serve --vs URL`"
        )
    [(prompt, answer)] = lengths
    if answer < 2:
        raise MegakernelError("--vs times the tokens after the first one: set --random-output-len to 2 or more")
    if len(load.jobs) > most:
        raise MegakernelError(f"--vs runs one batch, but {len(load.jobs)} prompts exceed --max-num-seqs {most}")
    return len(load.jobs), prompt, answer - 1


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
        *versus.rows(figures["vs"]),
    )
    if figures["error"]:
        output.stderr.print(f"megakernel: warning: {figures['error']}")
