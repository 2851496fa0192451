"""`megakernel bench latency` and `bench throughput` measure the speed of one sequence and of many prompts. They also
report how close the speed is to the hardware's limit (the roofline), and can compare it with other programs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ..errors import MegakernelError
from ..roofline import Ceilings
from . import output, versus
from .options import MODEL_RUN, UNLESS, open_llm, prompt_ids, verb, workload, workload_flags
from .this_machine import measured_ceilings

if TYPE_CHECKING:
    from megakernel.serving import LLM
    from megakernel.serving.bench import Workload
    from megakernel.serving.bench.peers import Contest, Timed

_PHASES: tuple[Timed, ...] = ("decode", "prefill")
# The defaults for a comparison (`--vs`). All prompts have the same length, because other programs accept only such
# batches. Five runs give a stable median.
_BATCH = {"dataset": "random", "num_prompts": 32, "random_input_len": 64, "random_output_len": 96}
_RUNS, _COMPARED_RUNS = 1, 5
_LATENCY = """
speculate
--tokens | count | 64 | decode steps per run
--runs | count | 5 | measured runs, after one warm-up run
[at most one of]
--prompt | text | (English text, or random ids if the model has no tokenizer) | prompt
--prompt-ids | 1,2,3 | - | prompt as token ids, such as 1,2,3
--prompt-tokens | count | 256 | length of the default prompt
"""
_THROUGHPUT = f"""
speculate max_num_seqs max_num_batched_tokens
--runs | count | ({_RUNS}; {_COMPARED_RUNS} with --vs) | runs, after a short warm-up
"""


@verb("bench latency", _LATENCY, versus.VERSUS, MODEL_RUN)
def run_latency(args: argparse.Namespace) -> int:
    found = versus.find_peers(args, batched=False)
    with open_llm(args, max_num_seqs=1) as llm:
        if args.prompt is not None or args.prompt_ids is not None:
            ids = llm.encode(args.prompt_ids if args.prompt is None else args.prompt)
        else:
            ids = prompt_ids(llm, args.prompt_tokens)
        with versus.opened(found, llm, args, (1, len(ids), args.tokens), _PHASES) as peers:
            figures = latency(llm, ids, args.tokens, args.runs, measured_ceilings(llm), peers)
        asked = {"prompt_tokens": len(ids), "tokens": args.tokens, "speculate": args.speculate}
        figures["settings"] = llm.about | asked
    (output.emit if args.json else show_latency)(figures)
    return 0


def latency(
    llm: LLM, ids: list[int], tokens: int, runs: int, ceilings: Ceilings, peers: Sequence[Contest] = ()
) -> dict[str, Any]:
    """Run the model `runs` times. Return the speed of prefill and decode, the hardware's maximum rates (`ceilings`),
    and a comparison with each of `peers`, other inference programs. After each of our runs, every peer runs once too,
    so that changes in the machine's speed affect all programs alike."""
    from megakernel.serving.bench.offline import latency_figures, measure_latency

    with output.progress("measuring decode and prefill") as advance:

        def after(done: int) -> None:
            if done > 1:
                for peer in peers:
                    peer.run()
            advance(done, runs + 1)

        measured = measure_latency(llm, ids, tokens, runs, ceilings, after)
    ours = {"decode": [one.decode.wall_s for one in measured], "prefill": [one.prefill.wall_s for one in measured]}
    steady = [one.steady for one in measured]
    return latency_figures(measured) | {"vs": {peer.peer.name: peer.figures(ours, steady) for peer in peers}}


def speculated(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a row (name, text) of the output about speculative decoding: how many tokens were proposed, and how many
    of these were accepted. Return no row if no token was proposed."""
    if not figures["proposed"]:
        return []
    right = f"{figures['accepted']:,} of {figures['proposed']:,} proposed tokens were right"
    return [("proposals", f"{right}, {figures['tokens_per_step']:.2f} tokens a step and sequence")]


def show_latency(figures: dict[str, Any]) -> None:
    prefill, ceilings = figures["prefill"], figures["ceilings"]
    most, done = ceilings["read_bytes_per_s"] / 1e9, f"{prefill['gflops']:.0f} G{ceilings['unit']}"

    def reached(rate: str, fraction: float, limit: str, verb: str) -> Text:
        return Text.assemble(f"{rate}, ", (f"{fraction:.0%}", "bold"), f" of the {limit} that this machine can {verb}")

    decode = output.bold(f"{figures['tokens_per_s']:.1f} tokens/s", f", {figures['step_s'] * 1e3:.2f} ms a step")
    fast, slow, runs = figures["step_s_min"] * 1e3, figures["step_s_max"] * 1e3, len(figures["runs"])
    output.rows(
        ("decode", decode.append(f", {fast:.2f} to {slow:.2f} over {runs} runs", "dim")),
        ("  reads", reached(f"{figures['read_GBps']:.1f} GB/s", figures["read_fraction"], f"{most:.1f}", "read")),
        (
            "prefill",
            output.bold(f"{prefill['tokens_per_s']:.0f} tokens/s", f", {prefill['tokens']} tokens in one prompt"),
        ),
        ("  arithmetic", reached(done, prefill["fma_fraction"], f"{ceilings['flops'] / 1e9:.0f}", "do")),
        ("roofline", f"decode {figures['roofline_fraction']:.0%}, prefill {prefill['roofline_fraction']:.0%}"),
        *speculated(figures),
        *versus.rows(figures["vs"]),
    )
    for error in figures["errors"]:
        output.stderr.print(f"megakernel: warning: {error}")


@verb(
    "bench throughput",
    _THROUGHPUT,
    versus.VERSUS,
    MODEL_RUN + workload_flags(64),
    unless=UNLESS | {"num_prompts": 64},
)
def run_throughput(args: argparse.Namespace) -> int:
    from megakernel.serving.bench.offline import measure_throughput

    found = versus.find_peers(args, batched=True)
    if found:
        args.unless = args.unless | _BATCH
    number = args.runs or (_COMPARED_RUNS if found else _RUNS)
    with open_llm(args) as llm:
        load = workload(args, llm.config.vocab, llm.encode)
        sizes = _batch(load, args.max_num_seqs) if found else (0, 0, 0)
        with versus.opened(found, llm, args, sizes, ("batch",)) as peers:
            ceilings = measured_ceilings(llm)

            def take_turns() -> None:
                for peer in peers:
                    peer.run()

            with output.progress("generating") as advance:
                runs = measure_throughput(llm, load, number, ceilings, advance, take_turns)
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
                "max_num_batched_tokens": llm.args.step_tokens,
                "speculate": args.speculate,
                "seed": args.seed,
            },
        }
    (output.emit if args.json else show_throughput)(figures)
    return 0


def _batch(load: Workload, most: int) -> tuple[int, int, int]:
    """Return three numbers for a comparison: sequences, tokens per prompt, and decode steps. Raises MegakernelError if
    `load` is not suitable, for example because its prompts differ in length."""
    lengths = {(job.prompt_tokens, job.output_tokens) for job in load.jobs}
    if len(lengths) > 1:
        raise MegakernelError(
            "--vs needs prompts of equal lengths and answers of equal lengths: use --dataset random with "
            "--random-range-ratio 0, or compare servers with `bench serve --vs URL`"
        )
    [(prompt, answer)] = lengths
    if answer < 2:
        raise MegakernelError("--vs measures only tokens after the first one: set --random-output-len to 2 or more")
    if len(load.jobs) > most:
        raise MegakernelError(f"--vs runs all prompts at once: set --max-num-seqs to {len(load.jobs)}, not {most}")
    return len(load.jobs), prompt, answer - 1


def show_throughput(figures: dict[str, Any]) -> None:
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
