"""`megakernel bench latency`: tokens per second of one sequence, how near they are to the
roofline, and a comparison with other programs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.text import Text

from . import output, versus
from .host import measured_ceilings
from .options import AddVerb, add_count, add_model_run, add_setting, open_llm, prompt_ids, token_ids

if TYPE_CHECKING:
    from megakernel.serving import LLM
    from megakernel.serving.bench.peers import Contest, Phase

    from ..roofline import Ceilings

_PHASES: tuple[Phase, ...] = ("decode", "prefill")


def register(add: AddVerb) -> None:
    bench = add("bench latency", "measure decode and prefill of one sequence", "megakernel bench latency --tokens 64")
    add_model_run(bench)
    add_setting(bench, "speculate")
    prompt = bench.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt", metavar="TEXT", help="prompt (default: English text, or random ids if the model has no tokenizer)"
    )
    prompt.add_argument("--prompt-ids", type=token_ids, metavar="1,2,3", help="prompt as token ids, such as 1,2,3")
    add_count(prompt, "--prompt-tokens", 256, "length of the default prompt")
    add_count(bench, "--tokens", 64, "decode steps per run")
    add_count(bench, "--runs", 5, "measured runs, after one warm-up run")
    versus.add_versus(bench)
    bench.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found = versus.find_peers(args, batched=False)
    with open_llm(args, max_seqs=1) as llm:
        if args.prompt is not None or args.prompt_ids is not None:
            ids = llm.encode(args.prompt_ids if args.prompt is None else args.prompt)
        else:
            ids = prompt_ids(llm, args.prompt_tokens)
        with versus.opened(found, llm, args, (1, len(ids), args.tokens), _PHASES) as peers:
            figures = latency(llm, ids, args.tokens, args.runs, measured_ceilings(llm), peers)
        asked = {"prompt_tokens": len(ids), "tokens": args.tokens, "speculate": args.speculate}
        figures["settings"] = llm.about | asked
    (output.emit if args.json else show)(figures)
    return 0


def latency(
    llm: LLM, ids: list[int], tokens: int, runs: int, ceilings: Ceilings, peers: Sequence[Contest] = ()
) -> dict[str, Any]:
    """Measure and return the figures of `bench latency`. The result also contains the ceilings and a comparison with
    each peer. After each run of our engine, every peer runs once.
    """
    from megakernel.serving.bench.latency import measure, report

    with output.progress("measuring decode and prefill") as advance:

        def after(done: int) -> None:
            if done > 1:
                for peer in peers:
                    peer.run()
            advance(done, runs + 1)

        measured = measure(llm, ids, tokens, runs, after)
    ours = {"decode": [one.decode.seconds for one in measured], "prefill": [one.prefill.seconds for one in measured]}
    vs = {"vs": {peer.peer.name: peer.figures(ours) for peer in peers}}
    return report(measured, ceilings) | vs | {"ceilings": asdict(ceilings)}


def speculated(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the output row about speculation, which says how many tokens were proposed and how many accepted.

    The list is empty if no token was proposed.
    """
    if not figures["proposed"]:
        return []
    right = f"{figures['accepted']:,} of {figures['proposed']:,} proposed tokens were right"
    return [("proposals", f"{right}, {figures['tokens_per_step']:.2f} tokens a step and sequence")]


def show(figures: dict[str, Any]) -> None:
    prefill, ceilings = figures["prefill"], figures["ceilings"]
    decode = output.bold(f"{figures['tokens_per_s']:.1f} tokens/s", f", {figures['step_s'] * 1e3:.2f} ms a step")
    least, most, runs = figures["step_s_min"] * 1e3, figures["step_s_max"] * 1e3, len(figures["runs"])
    output.rows(
        ("decode", decode.append(f", {least:.2f} to {most:.2f} over {runs} runs", "dim")),
        (
            "  reads",
            Text.assemble(
                f"{figures['read_GBps']:.1f} GB/s, ",
                (f"{figures['read_fraction']:.0%}", "bold"),
                f" of the {ceilings['read_bytes_per_s'] / 1e9:.1f} that this machine can read",
            ),
        ),
        (
            "prefill",
            output.bold(f"{prefill['tokens_per_s']:.0f} tokens/s", f", {prefill['tokens']} tokens in one prompt"),
        ),
        (
            "  arithmetic",
            Text.assemble(
                f"{prefill['gflops']:.0f} GFLOP/s, ",
                (f"{prefill['fma_fraction']:.0%}", "bold"),
                f" of the {ceilings['flops'] / 1e9:.0f} that this machine can do",
            ),
        ),
        ("roofline", f"decode {figures['roofline_fraction']:.0%}, prefill {prefill['roofline_fraction']:.0%}"),
        *speculated(figures),
        *versus.rows(figures["vs"]),
    )
    for error in figures["errors"]:
        output.stderr.print(f"megakernel: warning: {error}")
