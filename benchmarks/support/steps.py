"""Programs and backends of shapes with random weights, as several scripts beside this folder need them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

from megakernel import machine as machines
from megakernel.isa import Dims, Dtype
from megakernel.machine import Machine
from megakernel.model import ModelConfig
from megakernel.model.random_checkpoint import RandomCheckpoint
from megakernel.program import Program
from megakernel.runtime import Chunk, build_step, create
from megakernel.scheduler import compile_program


def compiled(
    config: ModelConfig, machine: Machine, tokens: int, *, context: int, seqs: int = 1, **more: Any
) -> Program:
    """In bf16 unless told otherwise, with a row of logits for each of `seqs` sequences."""
    sizes = {"tokens": tokens, "logit_rows": seqs, "max_seqs": seqs, "max_context": context}
    return compile_program(config, machine, **{"dtype": Dtype.BF16} | sizes | more)


def backend(name: str, config: ModelConfig, dims: Dims, *, pages: int = 0, **more: Any) -> Any:
    """In bf16 unless told otherwise, with room for one sequence, or for `pages`."""
    checkpoint = RandomCheckpoint("random", config, seed=0)
    return create(name, checkpoint, dims, pages or dims.pages_per_seq, **{"dtype": Dtype.BF16} | more)


def best(work: Callable[[], object], seconds: float = 0.3) -> float:
    """Shortest of many runs."""
    work()
    times, stop = [], perf_counter() + seconds
    while perf_counter() < stop or len(times) < 5:
        begin = perf_counter()
        work()
        times.append(perf_counter() - begin)
    return min(times)


def null_step(config: ModelConfig, workers: int, layers: int, *, threads: int | None = None) -> tuple[float, int]:
    """Shortest launch of one token without arithmetic, and instructions of each worker.

    Each worker has a thread, unless `threads` says otherwise.
    """
    config = replace(config, layers=layers)
    program = compiled(config, machines.host(workers), 1, context=1024)
    null = backend("null", config, program.dims, threads=threads or workers)
    table = build_step(program.dims, [Chunk(0, 0, [0], range(program.dims.pages_per_seq))])
    seconds = best(lambda: null.launch(program, table))
    null.close()
    return seconds, program.instructions // workers
