"""Measures this machine's rates and costs with micro-benchmarks, and writes a machine file for the simulator.

    python benchmarks/calibration/calibrate.py -o FILE.toml

This takes about a minute. `megakernel simulate --machine FILE.toml` then predicts steps on this machine's CPU. No step
of a model is timed. The arithmetic rates come from single instructions that run again and again on weights in the CPU
caches. The costs of set-up and signals come from launches without arithmetic. The fastest of several runs counts,
because other work on the machine can only slow a run down.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import numpy as np
from msgspec import structs
from record import options
from steps import backend, compiled

from megakernel import machine as machines
from megakernel.errors import MegakernelError, whole_file
from megakernel.isa import Buffer, Operation, Phase, attention_cost
from megakernel.isa import record as rec
from megakernel.isa.record import Records
from megakernel.machine import Core, busy
from megakernel.model import ModelConfig, load_config
from megakernel.program import Program, Segment
from megakernel.program.program import TOTALS
from megakernel.roofline import QUIET, Ceilings
from megakernel.roofline.ceilings import last_level_cache
from megakernel.runtime import Chunk, build_step
from megakernel.scheduler import Options
from megakernel.serving.bench.ceilings import host_ceilings

_ROWS = (1, 2, 4, 8, 12, 24, 48, 96)
_ATTENTION_ROWS = (1, 4, 16, 32)
_COLUMNS = 256  # columns of a matmul tile
_CONTEXT = 1024
_REPEATS, _ROUNDS = 40, 3
_BEST_S, _LEAST_RUNS = 0.3, 5
_LEAST_S = 1e-9  # seconds that stand for a cost too small to measure
_FEW, _MANY = 2, 62  # layers of two models whose times are compared; the models are equal otherwise


@dataclass(frozen=True)
class Calibration:
    """The rates of one core, and the seconds that a launch, an instruction's set-up and a signal take."""

    ceilings: Ceilings
    core: Core
    launch_s: float
    dispatch_s: float  # an instruction's set-up
    signal_s: float  # a signal between workers
    others: float | None  # fraction of the machine's CPU time that other processes took; None: unknown

    @property
    def quiet(self) -> bool:
        return self.others is None or self.others <= QUIET


def calibrate(ceilings: Ceilings, alone: Ceilings) -> Calibration:
    """Run the micro-benchmarks for about a minute, and return the measured rates and times. `ceilings` are the measured
    maximum rates of all cores together, and `alone` the maximum rates of one core while others idle. No instruction's
    rate may exceed the multiply-add rate that a core has while all cores compute.
    """
    begin = busy.now()
    rounds, idle = [], []
    for number in range(_ROUNDS):
        rounds.append(_arithmetic())
        idle.append(_idle(ceilings.threads))
        print(f"round {number + 1} of {_ROUNDS}", file=sys.stderr)
    most = min(alone.flops, ceilings.flops / ceilings.threads)
    matmul, attention, vector = (_fastest([one[i] for one in rounds], most) for i in range(3))
    dispatch, launch, signal = _synchronisation(idle)
    core = Core(alone.read_bytes_per_s, *_columns(matmul), *_columns(attention), *vector.values())
    return Calibration(ceilings, core, launch, dispatch, signal, busy.others(begin, busy.now()))


def write_machine(path: Path, found: Calibration) -> None:
    """Write a machine file with the measured costs, based on the built-in machine `host`. A failure leaves no partial
    file.
    """
    host = machines.hardware(machines.HOST)
    ghz = host.clock_hz
    cache = (found.ceilings.cache_bytes_per_s or 0.0) / found.ceilings.threads / ghz
    known = "an unknown part" if found.others is None else f"{found.others:.0%}"
    sections: dict[str, dict[str, Any]] = {
        "chip": {
            "generation": machines.processor().replace('"', "'").replace("\\", "/"),
            "sms": found.ceilings.threads,
            "boost_clock_hz": ghz,
            "hbm_bytes": host.chip.hbm_bytes,
            "hbm_bytes_per_s": found.ceilings.read_bytes_per_s,
            "l2_bytes": float(last_level_cache()),
            "l2_bytes_per_clock": cache,
            "load_bytes_per_clock": cache,
        },
        "flops_per_s": dict.fromkeys(("bf16", "fp32"), found.ceilings.flops),
        "costs": {
            "stream_launch_s": found.launch_s,
            "signal_s": found.signal_s,
            "dispatch_s": found.dispatch_s,
            "node_hop_s": found.signal_s,
        },
        "core": structs.asdict(found.core),
    }
    lines = [
        f"# Measured on {date.today().isoformat()} by benchmarks/calibration/calibrate.py.",
        f"# During the measurement other processes used {known} of the CPU time.",
        "# A core stands for an SM and the last-level cache for L2. The clock counts nanoseconds.",
        'base = "host"',
    ]
    for section, figures in sections.items():
        lines += ["", f"[{section}]", *(f"{name} = {_toml(value)}" for name, value in figures.items())]
    with whole_file(path, f"machine file {path}") as part:
        part.write_text("\n".join(lines) + "\n")


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else f"{value:.5g}" if isinstance(value, float) else str(value)


def _columns(rates: dict[int, float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(map(float, rates)), tuple(rates.values())


def _fastest(rounds: list[dict[int, float]], most: float) -> dict[int, float]:
    """Return, for each size, the highest rate in all `rounds`, but at most `most`. Raises MegakernelError if other
    processes disturbed every measurement of a size."""
    rates = {rows: min(most, max(one[rows] for one in rounds)) for rows in rounds[0]}
    if not all(rates.values()):
        told = "cannot calibrate: other processes disturb every measurement: try again when the machine is idle"
        raise MegakernelError(told)
    return rates


def _config(layers: int) -> ModelConfig:
    """Return a model shape that is used for calibration only. So the measured costs are not fitted to a model whose
    speed the simulator predicts."""
    base = load_config("random:llama-3.2-1b")
    return replace(base, layers=layers, hidden=1024, ffn=1024, heads=16, kv_heads=4, head_dim=64, vocab=1024)


def _arithmetic() -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
    """Measure the FLOP/s of one core. Return three dicts from sizes to rates: for matmul tiles, attention and norms. A
    size is a number of rows or, for attention, of (query row, head) pairs. Each rate compares launches that run an
    instruction once and many times, so that the cost of launch and call cancels."""
    config, most = _config(1), max(_ROWS)
    program = compiled(config, machines.host(1), most, context=_CONTEXT, options=Options(norm="own"))
    dims = program.dims
    body = program.forward.body
    matmul = next(phase for phase in body if phase.weights is Buffer.W_O)
    attention = next(phase for phase in body if phase.operation is Operation.ATTENTION)
    norm = next(phase for phase in body if phase.operation is Operation.NORM)
    cpu = backend("cpu", config, dims, threads=1)

    def seconds_each(phase: Phase, operands: tuple[int, ...], start: int, rows: int) -> float:
        one = rec.encode(phase.number, operands)
        table = build_step(dims, [Chunk(0, start, [0] * rows, range(dims.bucket.pages_per_seq))])

        def run(times: int) -> float:
            several = _repeated(program, one, times)
            return _best(lambda: cpu.launch(several, table))

        return (run(1 + _REPEATS) - run(1)) / _REPEATS

    matmuls, attentions = {}, {}
    for rows in _ROWS:
        seconds = seconds_each(matmul, (0, rows, 0, _COLUMNS), 0, rows)
        matmuls[rows] = _rate(2.0 * rows * _COLUMNS * dims.split.o_cols, seconds)
    for rows in _ATTENTION_ROWS:
        pairs = sum(_CONTEXT - rows + 1 + i for i in range(rows))
        seconds = seconds_each(attention, (0, 1, dims.split.rank_kv_heads), _CONTEXT - rows, rows)
        attentions[rows * dims.model.group_size] = _rate(
            attention_cost(dims.model, dims.model.kv_heads, pairs)[0], seconds
        )
    norms = {most: _rate(4.0 * most * dims.model.hidden, seconds_each(norm, (0, most), 0, most))}
    cpu.close()
    return matmuls, attentions, norms


def _rate(work: float, seconds: float) -> float:
    """Return `work` per second, or 0 if `seconds` is not positive because other processes disturbed a launch."""
    return work / seconds if seconds > 0 else 0.0


def _repeated(program: Program, one: Records, times: int) -> Program:
    """Return `program` with all instructions replaced by `times` copies of the encoded instruction `one`."""
    nothing = Segment(np.zeros((0, rec.WORDS), np.int32), np.zeros(2, np.int32))
    body = Segment(np.tile(one, (times, 1)), np.array([0, times], np.int32))
    unsignalled = {name: np.zeros_like(getattr(program, name)) for name in TOTALS}
    return replace(program, prologue=nothing, body=body, epilogue=nothing, **unsignalled)


def _idle(cores: int) -> list[tuple[float, int, int]]:
    """Time launches without arithmetic (`null_step`) of few and of many layers, on one worker and then on `cores`
    workers."""
    return [null_step(workers, layers) for workers in (1, cores) for layers in (_FEW, _MANY)]


def _synchronisation(rounds: list[list[tuple[float, int, int]]]) -> tuple[float, float, float]:
    """Return three times in seconds: an instruction's set-up, a launch and a signal. They come from the shortest
    launches that `_idle` timed. The first two come from launches on one worker. In a step with one row, each phase
    waits for all workers. So a signal costs a phase's time on all cores minus the time on one."""
    shortest = map(min, zip(*rounds, strict=True))
    (few_s, few, phases), (many_s, many, _), (few_all_s, few_all, _), (many_all_s, many_all, _) = shortest
    dispatch = max(_LEAST_S, (many_s - few_s) / (many - few))
    signal = (many_all_s - few_all_s - (many_all - few_all) * dispatch) / ((_MANY - _FEW) * phases)
    return dispatch, max(_LEAST_S, few_s - few * dispatch), max(_LEAST_S, signal)


def null_step(workers: int, layers: int, *, threads: int | None = None) -> tuple[float, int, int]:
    """Time launches of a one-token step whose instructions do no arithmetic. Returns the seconds of the shortest
    launch, the number of instructions of each worker and the number of phases of a layer. Each worker has a thread,
    unless `threads` says otherwise."""
    program = compiled(_config(layers), machines.host(workers), 1, context=_CONTEXT)
    null = backend("null", _config(layers), program.dims, threads=threads or workers)
    table = build_step(program.dims, [Chunk(0, 0, [0], range(program.dims.bucket.pages_per_seq))])
    seconds = _best(lambda: null.launch(program, table))
    null.close()
    return seconds, program.instructions // workers, len(program.forward.body)


def _best(work: Callable[[], object]) -> float:
    """Run `work` many times, and return the seconds of the shortest run."""
    work()
    times: list[float] = []
    stop = perf_counter() + _BEST_S
    while perf_counter() < stop or len(times) < _LEAST_RUNS:
        begin = perf_counter()
        work()
        times.append(perf_counter() - begin)
    return min(times)


def main() -> None:
    parser = options(__doc__, required=True, what="write the machine file FILE, whose name ends in .toml")
    path: Path = parser.parse_args().output
    if path.suffix != ".toml":
        parser.error(f"cannot write the machine file {path}: its name must end in .toml")
    ceilings, alone = (host_ceilings(threads, anew=True) for threads in (machines.cpu_count(), 1))
    found = calibrate(ceilings, alone)
    write_machine(path, found)
    if not found.quiet:
        print(f"other processes used {found.others:.0%} of the cores: calibrate an idle machine", file=sys.stderr)


if __name__ == "__main__":
    main()
