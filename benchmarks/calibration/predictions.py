"""Predicts steps of GPUs that are not available here, and prints them beside published results.

    python benchmarks/calibration/predictions.py -o benchmarks/results/predictions.json

It covers Llama-3.1-70B on eight H100s, compiled in different ways; Llama-3.2-1B with one sequence on three GPUs; and an
H200 with parts of the design switched off. Nothing is measured: all times come from the simulator and its constants.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import options, write
from steps import compiled

from megakernel import machine as machines
from megakernel.isa import Dims, StepTable
from megakernel.machine import Machine
from megakernel.model import load_config
from megakernel.runtime import Chunk, SampleRow, build_step, even_step
from megakernel.scheduler import Options
from megakernel.scheduler.simulate import simulate
from megakernel.scheduler.simulate.costs import TaskCosts, costs_of
from megakernel.timeline import resolve, summarise

CONTEXT = 128
# Tokens/s on eight H100s with HazyResearch's megakernel (September 2025). Two other sources quote the fraction that is
# lost without each optimisation.
PUBLISHED_70B = {
    "all on": {"tokens_per_s": 31516},
    "no pipelining": {"tokens_per_s": 29607, "loss": 0.061},
    "no queue": {"tokens_per_s": 27033, "loss": 0.142},
    "no interleaving": {"tokens_per_s": 29492, "loss": 0.064},
    "sharded O": {},
    "own norm": {},
}
# Microseconds per token, by GPU, of HazyResearch's megakernel. The figures for H100 and H200 were measured by
# msaroufim/megakernels-vs-cuda-graphs, and the figure for B200 by HazyResearch.
PUBLISHED_1B = {"h100": 972.78, "h200": 759.83, "b200": 680.0}


@dataclass(frozen=True)
class Variant:
    options: Options
    pipelined: bool = True

    def costs(self, machine: Machine) -> TaskCosts:
        costs = costs_of(machine)
        return costs if self.pipelined else costs.unpipelined()


ON = Options(o="replicated", queue="body")
VARIANTS_70B = {
    "all on": Variant(ON),
    "no pipelining": Variant(ON, pipelined=False),
    "no queue": Variant(replace(ON, queue="none")),
    "no interleaving": Variant(replace(ON, interleave=False)),
    "sharded O": Variant(replace(ON, o="sharded")),
    "own norm": Variant(replace(ON, norm="own")),
}
# On a single GPU, only attention uses queues. The workers of all other instructions are fixed at compile time.
ALONE = Options(queue="attention")
VARIANTS_H200 = {
    "all on": Variant(ALONE),
    "no pipelining": Variant(ALONE, pipelined=False),
    "no drain": Variant(replace(ALONE, queue="none")),
    "no interleaving": Variant(replace(ALONE, interleave=False)),
}


def mixed_step(dims: Dims) -> StepTable:
    """Return the inputs of a step with two prompts of 512 tokens, and 64 sequences that add their 1,024th token."""
    prompts = [Chunk(i, 0, [0] * 512, range(dims.bucket.pages_per_seq), [SampleRow(511)]) for i in range(2)]
    rows = [Chunk(2 + i, 1023, [0], range(dims.bucket.pages_per_seq), [SampleRow(0)]) for i in range(64)]
    return build_step(dims, [*prompts, *rows])


def predict(
    model: str,
    machine_name: str,
    tokens: int,
    variant: Variant,
    *,
    tp: int = 1,
    context: int = CONTEXT,
    mixed: bool = False,
) -> dict[str, Any]:
    machine = machines.load(machine_name)
    seqs = 66 if mixed else tokens
    begin = perf_counter()
    longest = max(context, 1024 if mixed else 1)
    program = compiled(load_config(model), machine, tokens, context=longest, seqs=seqs, tp=tp, options=variant.options)
    table = mixed_step(program.dims) if mixed else even_step(program.dims, tokens, context)
    middle = perf_counter()
    costs = variant.costs(machine)
    done = simulate(program, machine, table, costs=costs, trace=True)
    if done.trace is None:
        raise AssertionError("simulate returned no trace")
    summary = summarise(resolve(program, done.trace, machine))
    facts = {name: value for name, value in vars(done).items() if name != "trace"}
    moved = {
        "memory": (done.memory_bytes, costs.memory_bytes_per_s),
        "cache": (done.cache_bytes, costs.cache_bytes_per_s),
    }
    return facts | {
        "of_peak": {r.name: r.fraction for r in summary.resources},
        "moved_of_reached_rate": {n: b / (rate * done.step_s * tp) for n, (b, rate) in moved.items()},
        "overlap": asdict(summary.overlap),
        "wait": summary.wait,
        "exposed_communication": summary.exposed_communication,
        "instructions": program.instructions,
        "compile_s": middle - begin,
        "simulate_s": perf_counter() - middle,
    }


def table_70b(batches: list[int]) -> list[dict[str, Any]]:
    rows = []
    for batch in batches:
        full = 0.0
        for name, variant in VARIANTS_70B.items():
            found = predict("random:llama-3.1-70b", "h100", batch, variant, tp=8)
            full = full or found["tokens_per_s"]
            loss = 1 - found["tokens_per_s"] / full
            published = PUBLISHED_70B[name] if batch == 8192 else {}
            rows.append({"batch": batch, "variant": name, "loss": loss, "published": published} | found)
            peak, moved = found["of_peak"], found["moved_of_reached_rate"]
            print(
                f"70B tp 8, batch {batch:>5}, {name:<16} {found['step_s'] * 1e3:8.2f} ms"
                f" {found['tokens_per_s']:8,.0f} tokens/s ({-loss:+.1%})  matrix {peak['matrix']:.3f}"
                f" memory {moved['memory']:.2f} cache {moved['cache']:.2f}"
                f" link {peak['link out']:.2f}  exposed {found['exposed_communication']:.3f}  published {published}"
                f"  [{found['simulate_s']:.1f} s]",
                flush=True,
            )
    return rows


def table_1b() -> list[dict[str, Any]]:
    rows = []
    for machine, published in PUBLISHED_1B.items():
        found = predict("random:llama-3.2-1b", machine, 1, Variant(Options()))
        error = found["step_s"] * 1e6 / published - 1
        rows.append({"machine": machine, "published_us": published, "error": error} | found)
        print(
            f"1B batch 1, {machine}: {found['step_s'] * 1e6:.1f} us, published {published} us ({error:+.1%})",
            flush=True,
        )
    return rows


def table_h200() -> list[dict[str, Any]]:
    rows = []
    for model, label, tokens, mixed in (
        ("random:llama-3.2-1b", "1B, batch 1", 1, False),
        ("random:llama-3.1-8b", "8B, batch 1", 1, False),
        ("random:llama-3.1-8b", "8B, mixed batch", 1088, True),
    ):
        full = 0.0
        for name, variant in VARIANTS_H200.items():
            found = predict(model, "h200", tokens, variant, mixed=mixed)
            full = full or found["step_s"]
            rows.append({"case": label, "variant": name, "slower": found["step_s"] / full - 1} | found)
            print(
                f"H200 {label}, {name:<16} {found['step_s'] * 1e6:9.1f} us ({found['step_s'] / full - 1:+.1%})",
                flush=True,
            )
    return rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=[1024, 2048, 4096, 8192])
    arguments = parser.parse_args()
    found = {"1b": table_1b(), "h200": table_h200(), "70b": table_70b(arguments.batches)}
    write(arguments.output, found)


if __name__ == "__main__":
    main()
