"""This machine's costs for the simulator, from micro-benchmarks: no step of a model is timed.

    python benchmarks/calibration/simulate_host.py -o benchmarks/results/simulate-host.json

Memory and cache by reads of a large and a small region; arithmetic by single instructions on weights that lie in the
second-level cache; set-up and signals by launches without arithmetic. Best of several, since anything else on the
machine only slows one. The figures go into scheduler/simulate/costs.py.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import options, write
from steps import backend, best, compiled, null_step

from megakernel import machine as machines
from megakernel.isa import Dtype, attention_cost
from megakernel.isa import record as rec
from megakernel.isa.record import Records
from megakernel.model import load_config
from megakernel.program import Program, Segment
from megakernel.roofline.ceilings import last_level_cache
from megakernel.runtime import Chunk, build_step
from megakernel.runtime.cpu.native import probe_read
from megakernel.scheduler import Options

# A shape of no model that predictions are made for.
CONFIG = replace(
    load_config("random:llama-3.2-1b"), layers=2, hidden=1024, ffn=1024, heads=16, kv_heads=4, head_dim=64, vocab=1024
)
ROWS = (1, 2, 4, 8, 12, 24, 48, 96)
ATTENTION_ROWS = (1, 4, 16, 32)
CONTEXT = 1024
IN_CACHE = 8 << 20
REPEATS, ROUNDS = 40, 5
TOTALS = ("totals_first", "totals_middle", "totals_last")


def arithmetic(dtype: Dtype) -> dict[str, dict[int, float]]:
    """FLOP/s of one core by rows of a matmul tile, and by (row, head) pairs of an attention item.

    Each from launches that run one instruction once and many times over: the difference has neither launch nor call.
    """
    config = replace(CONFIG, layers=1)
    program = compiled(config, machines.host(1), 96, context=CONTEXT, dtype=dtype, options=Options(norm="own"))
    dims = program.dims
    cpu = backend("cpu", config, dims, dtype=dtype, threads=1)

    def seconds_each(phase: str, operands: tuple[int, ...], start: int, rows: int) -> float:
        one = rec.encode(program.forward.by_name[phase].number, operands)
        table = build_step(dims, [Chunk(0, start, [0] * rows, range(dims.pages_per_seq))])
        once, many = (repeated(program, one, n) for n in (1, 1 + REPEATS))
        times = [best(lambda p=p: cpu.launch(p, table)) for p in (once, many)]  # type: ignore[misc]
        return (times[1] - times[0]) / REPEATS

    matmul, attention = {}, {}
    for rows in ROWS:
        seconds = seconds_each("o_proj", (0, rows, 0, 256), 0, rows)
        matmul[rows] = 2.0 * rows * 256 * dims.o_cols / seconds
    for rows in ATTENTION_ROWS:
        pairs = sum(CONTEXT - rows + 1 + i for i in range(rows))
        seconds = seconds_each("attention", (0, 1, dims.rank_kv_heads), CONTEXT - rows, rows)
        attention[rows * dims.group_size] = attention_cost(dims, dims.kv_heads, pairs)[0] / seconds
    vector = {96: 4.0 * 96 * dims.hidden / seconds_each("attn_norm", (0, 96), 0, 96)}
    cpu.close()
    return {"matmul_flops": matmul, "attention_flops": attention, "vector_flops": vector}


def fastest(rounds: list[dict[str, dict[int, float]]]) -> dict[str, dict[int, float]]:
    return {name: {rows: max(one[name][rows] for one in rounds) for rows in rates} for name, rates in rounds[0].items()}


def median(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def repeated(program: Program, one: Records, times: int) -> Program:
    """`program` with nothing in it but one record, again and again, on its only worker."""
    nothing = Segment(np.zeros((0, rec.WORDS), np.int32), np.zeros(2, np.int32))
    body = Segment(np.tile(one, (times, 1)), np.array([0, times], np.int32))
    unsignalled = {name: np.zeros_like(getattr(program, name)) for name in TOTALS}
    return replace(program, prologue=nothing, body=body, epilogue=nothing, **unsignalled)


def synchronisation() -> dict[str, float]:
    """Launch and dispatch from one worker's launches of few and many layers. A signal from two workers': a layer with
    one row is a chain of eight phases, each of which waits for both."""
    (few_s, few), (many_s, many) = null_step(CONFIG, 1, 2), null_step(CONFIG, 1, 62)
    dispatch = (many_s - few_s) / (many - few)
    (few2_s, few2), (many2_s, many2) = null_step(CONFIG, 2, 2), null_step(CONFIG, 2, 62)
    hops = 7 * 60
    signal = max(0.0, (many2_s - few2_s - (many2 - few2) * dispatch) / hops)
    return {"dispatch_s": dispatch, "launch_s": max(0.0, few_s - few * dispatch), "signal_s": signal}


def main() -> None:
    arguments = options(__doc__).parse_args()
    large = min(8 * last_level_cache(), 2 << 30)
    threads = machines.cpu_count()
    reads = {n: [probe_read(n, large, 0.5) for _ in range(5)] for n in (1, threads)}
    figures = {
        "memory_bytes_per_s": {n: max(rates) for n, rates in reads.items()},
        "memory_runs": reads,
        "cache_bytes_per_s": {n: max(probe_read(n, IN_CACHE * n, 0.3) for _ in range(3)) for n in (1, threads)},
        "cache_bytes": last_level_cache(),
        **{
            dtype.name.lower(): fastest([arithmetic(dtype) for _ in range(ROUNDS)]) for dtype in (Dtype.BF16, Dtype.F32)
        },
        "synchronisation": median([synchronisation() for _ in range(ROUNDS)]),
    }
    for name, value in figures.items():
        print(name, value)
    write(arguments.output, figures)


if __name__ == "__main__":
    main()
