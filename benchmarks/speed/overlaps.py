"""Measures three kinds of overlap on a CPU with 2 and 4 ranks, and how long a step takes without each of them:

* loads with computation inside a worker, caused by prefetching,
* memory-bound with compute-bound work on different workers, caused by interleaving phases,
* different instructions on different ranks, because a rank waits for parts of other ranks' phases, not whole phases.

    python benchmarks/speed/overlaps.py -o benchmarks/results/overlaps-cpu.json

The script traces a prefill step of eight layers of SmolLM2's shape with random weights, on all cores. The variants
alternate in one process. The table has medians over all rounds except the first.
"""

from __future__ import annotations

import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import options, write
from steps import backend, compiled

from megakernel import machine as machines
from megakernel.model import load_config
from megakernel.runtime import Chunk, SampleRow, build_step
from megakernel.scheduler import Options
from megakernel.timeline import resolve, summarise

PAGES = 128
VARIANTS: dict[str, tuple[Options, bool]] = {
    "all on": (Options(residual="dealt"), True),
    "no prefetch": (Options(residual="dealt"), False),
    "no interleaving": (Options(residual="dealt", interleave=False), True),
    "no overlap of ranks": (Options(residual="dealt", overlap_ranks=False), True),
}
METRICS = ("step_s", "inside_worker", "across_workers", "across_ranks", "phases", "exposed_communication")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--workers", type=int, default=2, help="number of workers (threads) of each rank")
    arguments = parser.parse_args()
    config = replace(load_config("smollm2-135m"), layers=8)
    result = []
    for tp in (2, 4):
        launches = {}
        for name, (lowering, prefetch) in VARIANTS.items():
            machine = machines.host(arguments.workers)
            program = compiled(config, machine, arguments.tokens, context=2048, tp=tp, options=lowering)
            os.environ["MEGAKERNEL_PREFETCH"] = str(int(prefetch))
            cpu = backend("cpu", config, program.dims, pages=PAGES)
            tokens = np.random.default_rng(0).integers(0, config.vocab, arguments.tokens).tolist()
            chunk = Chunk(0, 0, tokens, range(PAGES), [SampleRow(arguments.tokens - 1)])
            launches[name] = (program, cpu, build_step(program.dims, [chunk]))
        runs: dict[str, list[dict[str, float | None]]] = {name: [] for name in VARIANTS}
        for round_ in range(arguments.rounds + 1):
            for name, (program, cpu, table) in launches.items():
                trace = cpu.launch(program, table, trace=True).trace
                assert trace is not None
                summary = summarise(resolve(program, trace))
                values = vars(summary.overlap) | {
                    "step_s": summary.step_s,
                    "exposed_communication": summary.exposed_communication,
                }
                if round_:
                    runs[name].append({metric: values[metric] for metric in METRICS})
        print(f"{tp} ranks of {arguments.workers} workers, {arguments.tokens} tokens")
        for name in VARIANTS:
            row = {m: [r[m] for r in runs[name] if r[m] is not None] for m in METRICS}
            medians = {m: statistics.median(v) if v else None for m, v in row.items()}
            print(f"  {name:<20}", *(f"{m} {v:.3f}" if v is not None else f"{m} -" for m, v in medians.items()))
            result.append({"ranks": tp, "variant": name, "median": medians, "runs": runs[name]})
        for _, cpu, _ in launches.values():
            cpu.close()
    write(arguments.output, {"rows": result})


if __name__ == "__main__":
    main()
