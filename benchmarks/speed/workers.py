"""Measures the cost of more workers and more threads: `python benchmarks/speed/workers.py [-o FILE]`.

Only `decode` does arithmetic. The other parts time the interpreter alone, and report the fastest of several launches.

instruction  with one worker: seconds of an instruction without arithmetic, and of a launch without layers
barrier      seconds of a phase in which every worker signals one counter and waits until all workers have signalled
             it. There are one to as many workers as cores, each with its own thread
streams      seconds that a thread needs per instruction, with one thread per core and more and more workers. The time
             grows with the number of workers, because a thread also looks at blocked streams (a stream has the
             instructions of one worker)
decode       seconds of a decode step of SmolLM2-135M's shape in bf16, with one, two and four threads per core. Programs
             have one worker per core, as an engine compiles them, or one per thread, so that every thread has work
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "calibration"))

from calibrate import null_step
from record import options, text, write
from steps import backend, compiled

from megakernel import machine as machines
from megakernel.machine import cpu_count
from megakernel.model import load_config
from megakernel.runtime import Chunk, build_step

FEW, MANY = 2, 62
MODEL, CONTEXT = "random:smollm2-135m", 512
ROUNDS, TURN_S = 10, 0.5
MOST_STREAMS = 64


def layer(workers: int, threads: int) -> tuple[float, float, float, int]:
    """Return the seconds per layer, instructions per worker and layer, seconds of a launch without layers, and phases
    (operations) per layer, all for a step of one token.

    A layer is a chain of phases. Each phase waits for all workers to finish the previous one.
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
    """A decode step for given numbers of threads and workers, and the times of its launches, in seconds."""

    threads: int
    workers: int
    launch: Any
    runs_s: list[float] = field(default_factory=list)


def decode() -> list[dict[str, Any]]:
    """Measure a decode step with each number of threads and workers, in turn, so that other load affects all alike."""
    cores, cases, open_ = cpu_count(), [], []
    for threads, workers in [(n * cores, w) for n in (1, 2, 4) for w in sorted({cores, n * cores})]:
        config = load_config(MODEL)
        program = compiled(config, machines.host(workers), 1, context=CONTEXT)
        cpu = backend("cpu", config, program.dims, threads=threads)
        table = build_step(program.dims, [Chunk(0, CONTEXT - 1, [0], range(program.dims.bucket.pages_per_seq))])
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
