"""Predicts steps of GPUs that are not available here, and prints them beside published results.

    python benchmarks/calibration/predictions.py -o benchmarks/results/predictions.json

It covers Llama-3.2-1B with one sequence on five machines (benchmarks/machines has those whose caches hold no code), and
Llama-3.1-70B with 8,192 sequences on eight H100s: as it is, and with parts of the work left out. Nothing is measured:
all times come from the simulator and its constants.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import options, write
from steps import compiled

from megakernel import machine as machines
from megakernel.model import load_config
from megakernel.runtime import even_step
from megakernel.scheduler import Options
from megakernel.scheduler.simulate import simulate
from megakernel.scheduler.simulate.costs import costs_of

CONTEXT = 128
MACHINES = Path(__file__).parents[1] / "machines"
# Seconds per token of HazyResearch's megakernel. Those of H100 and H200 were measured by
# github.com/msaroufim/megakernels-vs-cuda-graphs, and that of B200 by HazyResearch (blog 2025-05-27).
PUBLISHED_1B = {
    "h100": 972.78e-6,
    "h200": 759.83e-6,
    "b200": 680e-6,
    "h100-code-fetched.toml": 972.78e-6,
    "h200-code-fetched.toml": 759.83e-6,
}
PUBLISHED_70B = 31516  # tokens/s of HazyResearch's megakernel (blog 2025-09-28)
ON = Options(o="replicated", queue="body")


def table_1b() -> list[dict[str, Any]]:
    rows = []
    for name, published in PUBLISHED_1B.items():
        machine = machines.load(str(MACHINES / name) if "." in name else name)
        program = compiled(load_config("random:llama-3.2-1b"), machine, 1, context=CONTEXT, options=Options())
        step_s = simulate(program, machine, even_step(program.dims, 1, CONTEXT)).step_s
        rows.append({"machine": name, "published_s": published, "predicted_s": step_s})
        print(f"1B batch 1, {name}: {step_s * 1e6:.1f} us, published {published * 1e6:.0f} us", flush=True)
    return rows


def table_70b(batch: int) -> list[dict[str, Any]]:
    machine, rows = machines.load("h100"), []
    config, costs = load_config("random:llama-3.1-70b"), costs_of(machine)
    program = compiled(config, machine, batch, context=CONTEXT, seqs=batch, tp=8, options=ON)
    table = even_step(program.dims, batch, CONTEXT)
    variants = {"whole": costs} | {f"without {what}": costs.without(what) for what in ("waits", "copies", "compute")}
    variants["loads and arithmetic take constant times"] = replace(costs, ahead_steps=1e9)
    for name, changed in variants.items():
        step_s = simulate(program, machine, table, costs=changed).step_s
        rows.append({"variant": name, "predicted_s": step_s, "tokens_per_s": batch / step_s})
        print(f"70B tp 8, batch {batch}, {name}: {step_s * 1e3:.1f} ms, {batch / step_s:,.0f} tokens/s", flush=True)
    return rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--batch", type=int, default=8192, help="number of sequences of 70B (default: 8192)")
    arguments = parser.parse_args()
    seventy = {"published_tokens_per_s": PUBLISHED_70B, "predicted": table_70b(arguments.batch)}
    write(arguments.output, {"1b": table_1b(), "70b": seventy})


if __name__ == "__main__":
    main()
