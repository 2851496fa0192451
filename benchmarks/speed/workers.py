"""Measures the cost of more workers and more threads: `python benchmarks/speed/workers.py [-o FILE]`, one JSON.

Everything except `decode` runs without arithmetic, so that only the interpreter is timed; figures are the best of
several launches.

instruction  seconds of an empty instruction of one worker, and of a launch
barrier      seconds of a phase in which every worker signals one counter and waits until all have. Each worker has its
             own thread, up to the number of cores. The time beyond an instruction's grows with arrivals and waiters
streams      seconds per instruction of a thread when a thread per core serves more and more workers: the cost of
             looking at blocked streams
decode       SmolLM2-135M's shape in bf16: seconds of a step with one to four threads per core. An engine
             compiles no more workers than cores; programs with a worker per thread are the harder case
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import options, text, write
from steps import backend, compiled

from megakernel import machine as machines
from megakernel.machine import cpu_count
from megakernel.model import load_config
from megakernel.runtime import Chunk, build_step
from megakernel.serving.calibration import null_step

FEW, MANY = 2, 62
MODEL, CONTEXT = "random:smollm2-135m", 512
ROUNDS, TURN_S = 10, 0.5
MOST_STREAMS = 64


def layer(workers: int, threads: int) -> tuple[float, float, float, int]:
    """The seconds of a layer, each worker's instructions in it, the seconds of a launch without layers, and the phases
    of a layer.

    A layer of one row is a chain of phases, each of which waits for all workers of the previous one.
    """
    (few_s, few, phases), (many_s, many, _) = (null_step(workers, n, threads=threads) for n in (FEW, MANY))
    layers = MANY - FEW
    return (many_s - few_s) / layers, (many - few) / layers, few_s - FEW * (many_s - few_s) / layers, phases


def instruction() -> dict[str, float]:
    layer_s, instructions, launch_s, _ = layer(1, 1)
    return {"instruction_s": layer_s / instructions, "launch_s": launch_s}


def barriers() -> list[dict[str, float]]:
    layers = {n: layer(n, n) for n in range(1, cpu_count() + 1)}
    return [{"workers": n, "phase_s": seconds / phases} for n, (seconds, _, _, phases) in layers.items()]


def streams() -> list[dict[str, float]]:
    threads, workers, found = cpu_count(), cpu_count(), []
    while workers <= MOST_STREAMS:
        layer_s, instructions, *_ = layer(workers, threads)
        found.append({"workers": workers, "instruction_s": layer_s * threads / (instructions * workers)})
        workers *= 2
    return found


@dataclass
class Case:
    """Launches of a decode step with this many threads."""

    threads: int
    workers: int
    launch: Any
    runs_s: list[float] = field(default_factory=list)


def decode() -> list[dict[str, Any]]:
    """The cases take turns, so that a disturbance affects all of them."""
    cores, cases, open_ = cpu_count(), [], []
    for threads, workers in [(n * cores, w) for n in (1, 2, 4) for w in sorted({cores, n * cores})]:
        config = load_config(MODEL)
        program = compiled(config, machines.host(workers), 1, context=CONTEXT)
        cpu = backend("cpu", config, program.dims, threads=threads)
        table = build_step(program.dims, [Chunk(0, CONTEXT - 1, [0], range(program.dims.pages_per_seq))])
        cases.append(Case(threads, workers, lambda b=cpu, p=program, t=table: b.launch(p, t).seconds))
        open_.append(cpu)
    for _ in range(ROUNDS):
        for case in cases:
            stop = perf_counter() + TURN_S
            while perf_counter() < stop:
                case.runs_s.append(round(case.launch(), 6))
    for cpu in open_:
        cpu.close()
    base = statistics.median(cases[0].runs_s)
    return [
        {
            "threads": case.threads,
            "workers": case.workers,
            "step_s": statistics.median(case.runs_s),
            "of_one_thread_per_core": base / statistics.median(case.runs_s),
            "runs_s": case.runs_s,
        }
        for case in cases
    ]


def main() -> None:
    arguments = options(__doc__).parse_args()
    figures: dict[str, Any] = {"instruction": instruction(), "barrier": barriers(), "streams": streams()}
    print(text(figures))
    figures["decode"] = decode()
    for run in figures["decode"]:
        print({name: value for name, value in run.items() if name != "runs_s"})
    write(arguments.output, figures)


if __name__ == "__main__":
    main()
