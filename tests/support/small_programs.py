"""Correct programs: some are so small that every interleaving can be tried, others are too large for that."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from megakernel import machine as machines
from megakernel.isa import Dtype
from megakernel.model import load_config
from megakernel.program import Program
from megakernel.scheduler import Options, Spec, compile_program

CONFIG = replace(
    load_config("random:llama-3.2-1b"), vocab=64, hidden=32, ffn=64, layers=1, heads=2, kv_heads=1, head_dim=8
)
LOWERINGS = list(itertools.product(("sharded", "replicated"), ("dealt", "replicated")))
QUEUES = ("none", "attention", "body")


def make(*, workers: int = 1, rows: int = 2, cols: int = 32, **changes: Any) -> Program:
    """Compile a program. `rows` and `cols` are the size of a tile. `changes` are sizes of the batch or of the model, or
    scheduler options."""
    bucket = {"tp": 1, "tokens": 2, "logit_rows": 1, "max_seqs": 2, "max_context": 16}
    bucket |= {name: changes.pop(name) for name in bucket if name in changes}
    shape = {name: changes.pop(name) for name in ("layers", "heads", "kv_heads") if name in changes}
    return compile_program(
        Spec(
            replace(CONFIG, **shape),
            machines.host(workers).with_tiles(rows=rows, cols=cols),
            dtype=Dtype.F32,
            options=Options(**{"o": "sharded", "residual": "dealt", "norm": "own"} | changes),
            **bucket,
        )
    )


def small(step: int = 1) -> Iterator[tuple[str, Program]]:
    """Yield (description, program) for every `step`-th of 71 programs so small that all their states can be visited."""
    return (make_one() for make_one in islice(_small(), 0, None, step))


def large(step: int = 1) -> Iterator[tuple[str, Program]]:
    """Yield (description, program) for every `step`-th of the programs with so many workers, ranks or layers that not
    all their states can be visited."""
    return (make_one() for make_one in islice(_large(), 0, None, step))


def _later(**shape: Any) -> Callable[[], tuple[str, Program]]:
    return lambda: (" ".join(f"{name}={value}" for name, value in shape.items()), make(**shape))


def _small() -> Iterator[Callable[[], tuple[str, Program]]]:
    for workers, tokens, queue in itertools.product((1, 2), (1, 3, 4), QUEUES):
        yield _later(workers=workers, tokens=tokens, queue=queue)
    for layers, heads, kv_heads in ((2, 2, 2), (3, 2, 1), (1, 4, 2)):
        yield _later(workers=2, layers=layers, heads=heads, kv_heads=kv_heads, logit_rows=2)
    for (o, residual), tokens, queue in itertools.product(LOWERINGS, (1, 2, 4), QUEUES):
        yield _later(tp=2, tokens=tokens, rows=1, o=o, residual=residual, queue=queue, cols=64)
    yield _later(tp=2, tokens=4, rows=1, interleave=False, cols=64)
    for tp, queue in itertools.product((1, 2), QUEUES):
        yield _later(tp=tp, tokens=4, rows=1, layers=2, norm="next", queue=queue, cols=64)
    for tp, queue in itertools.product((1, 2), ("none", "body")):
        yield _later(tp=tp, tokens=4, rows=1, layers=2, norm="inside", residual="replicated", queue=queue, cols=64)


def _large() -> Iterator[Callable[[], tuple[str, Program]]]:
    for (o, residual), (tp, heads, kv_heads) in itertools.product(LOWERINGS, ((2, 3, 1), (4, 4, 2), (8, 6, 3))):
        shape = {"tp": tp, "heads": heads, "kv_heads": kv_heads, "o": o, "residual": residual}
        yield _later(workers=2, tokens=9, layers=2, logit_rows=3, **shape)
    for queue in QUEUES:
        yield _later(workers=5, tokens=17, rows=4, layers=3, heads=4, kv_heads=2, logit_rows=3, queue=queue)
        yield _later(tp=2, workers=3, tokens=17, rows=4, layers=2, heads=4, kv_heads=2, logit_rows=3, queue=queue)
        for o, residual in LOWERINGS:
            yield _later(tp=2, workers=3, tokens=17, rows=2, layers=3, norm="next", o=o, residual=residual, queue=queue)
    yield _later(tp=2, workers=3, tokens=17, rows=4, layers=2, norm="inside", residual="replicated", logit_rows=3)
