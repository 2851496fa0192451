"""Predicted and measured steps of this machine, side by side.

    python benchmarks/predictions_host.py -o benchmarks/results/predictions-host.json

SmolLM2-135M's and Llama-3.2-1B's shapes with random weights, prefill and decode, one worker and two. The constants are
those of benchmarks/simulate_host.py, measured on another shape; Llama-3.2-1B is the one held out.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from time import perf_counter

from record import write

from megakernel import machine as machines
from megakernel.isa import Dtype
from megakernel.model import load_config
from megakernel.model.random_checkpoint import RandomCheckpoint
from megakernel.runtime import Chunk, SampleRow, build_step, create
from megakernel.scheduler import compile_program, simulate

PROMPT = 512
MODELS = ("smollm2-135m", "random:llama-3.2-1b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="at least so long, and five launches, for each case"
    )
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models:
        config = load_config(model)
        checkpoint = RandomCheckpoint("random", config, seed=0)
        for workers in sorted({1, machines.cpu_count()}):
            machine = machines.host(workers)
            backend = None
            for phase, tokens, start in (("decode", 1, PROMPT), ("prefill", PROMPT, 0)):
                program = compile_program(
                    config, machine, dtype=Dtype.BF16, tokens=tokens, logit_rows=1, max_seqs=1, max_context=2 * PROMPT
                )
                pages = range(program.dims.pages_per_seq)
                table = build_step(program.dims, [Chunk(0, start, [1] * tokens, pages, [SampleRow(tokens - 1)])])
                predicted = simulate(program, machine, table)
                row = {"model": model, "phase": phase, "workers": workers, "predicted_s": predicted.step_s}
                row |= {"busy": predicted.busy, "wait": predicted.wait}
                line = f"{model} {phase} {workers} workers: predicted {predicted.step_s * 1e3:.2f} ms"
                if not arguments.predict_only:
                    backend = backend or create(
                        "cpu", checkpoint, program.dims, len(pages), dtype=Dtype.BF16, threads=workers
                    )
                    runs: list[float] = []
                    backend.launch(program, table)
                    stop = perf_counter() + arguments.seconds
                    while perf_counter() < stop or len(runs) < 5:
                        begin = perf_counter()
                        backend.launch(program, table)
                        runs.append(perf_counter() - begin)
                    measured = statistics.median(runs)
                    row |= {"measured_s": measured, "error": predicted.step_s / measured - 1, "runs_s": runs}
                    line += f", measured {measured * 1e3:.2f} ms, error {row['error']:+.1%}"
                print(line, flush=True)
                rows.append(row)
            if backend is not None:
                backend.close()
    if arguments.output:
        write(arguments.output, {"rows": rows})


if __name__ == "__main__":
    main()
