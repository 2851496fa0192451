"""`megakernel demo`: loads a model, generates text, measures the speed, and writes a timeline of one step."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from . import bench, output
from .generate import answer, as_json, show_token
from .options import MODEL_RUN, open_llm, prompt_ids, verb
from .this_machine import measured_ceilings

_FLAGS = """
--prompt | text | Name the capital of France. | the question to answer
-o --output | FILE.html | (timeline.html) | where to write the timeline
"""
# These numbers give stable medians, and take two seconds on two cores.
_PROMPT_TOKENS, _TOKENS, _RUNS = 256, 32, 3


@verb("demo", _FLAGS, MODEL_RUN)
def run(args: argparse.Namespace) -> int:
    from megakernel.roofline import Ceilings
    from megakernel.serving import SamplingParams
    from megakernel.serving.bench.ceilings import share_of

    from ..timeline import render, resolve, summarise, write_html

    path = args.output or Path("timeline.html")
    with open_llm(args, max_num_seqs=1) as llm:
        ids = llm.chat_ids([{"role": "user", "content": args.prompt}])
        params = SamplingParams(temperature=0.0, max_tokens=128)
        if not args.json:
            output.stdout.print(f"> {args.prompt}", style="dim")
        result = answer(llm, ids, params, None if args.json else show_token)
        if not args.json:
            sys.stdout.write("\n\n")
        ceilings = measured_ceilings(llm)
        measured = prompt_ids(llm, min(_PROMPT_TOKENS, llm.engine.dims.bucket.max_context // 2))
        figures = bench.latency(llm, measured, _TOKENS, _RUNS, ceilings)
        ceilings = Ceilings(**figures["ceilings"])  # the memory rate was measured during the same seconds
        with output.busy("tracing a step"):
            _, decode = llm.trace_steps(measured, decode_steps=5)
        # The median step is shown, because other programs may have disturbed some of the steps.
        step = sorted(decode, key=lambda step: step.output.seconds)[len(decode) // 2]
        trace = step.output.trace
        machine = share_of(ceilings, llm.machine, llm.engine.dims.split.tp)
        if trace is not None:
            resolved = resolve(step.program, trace, machine)
            summary = summarise(resolved)
            write_html(path, (resolved, summary))
    page = path.resolve()
    if args.json:
        overlap = asdict(summary) if trace is not None else {}
        output.emit(as_json(result) | figures | overlap | {"timeline": str(page) if trace is not None else None})
        return 0
    bench.show_latency(figures)
    if trace is not None:
        output.stdout.print()
        render(summary, output.stdout)
        output.stdout.print(f"\ntimeline of this step: {page.as_uri()}", style="bold", soft_wrap=True)
    return 0
