"""Several threads execute the streams of several ranks. `tests/support/sanitized.py thread` runs this file under a race
detector."""

import numpy as np
import pytest
from cpu_support import Array, RandomCheckpoint, fill
from handmade import make_dims, make_program, make_queue_program
from sizes import least_dims

from megakernel.isa import Dims, Dtype, StepTable
from megakernel.model.config import ModelConfig
from megakernel.program import Program
from megakernel.runtime import Chunk, SampleRow, build_step
from megakernel.runtime.cpu.backend import CpuBackend

CONFIG = ModelConfig(vocab=83, hidden=48, ffn=72, layers=2, heads=12, kv_heads=4, head_dim=24, max_context=200)
PAGES = 40


def dims(tp: int, dtype: Dtype, quantised: bool) -> Dims:
    """Return sizes with row blocks of 4 tokens, so that several row blocks store to each KV page of 16 tokens."""
    sizes = {"row_block": 4, "tokens": 40, "logit_rows": 4, "tp": tp, "dtype": int(dtype)}
    return make_dims(CONFIG, **sizes, quantised_kv=int(quantised))


def table(dims: Dims) -> StepTable:
    """Return a step with a prefill from the middle of a KV page, a prefill from position 0, and a decode row."""
    rng = np.random.default_rng(6)
    first, second = (rng.integers(0, CONFIG.vocab, n).tolist() for n in (21, 11))
    chunks = [
        Chunk(0, 37, first, [3, 14, 9, 4], [SampleRow(20)]),
        Chunk(1, 0, second, [5], [SampleRow(10)]),
        Chunk(2, 70, [1], [7, 8, 10, 11, 12], [SampleRow(0)]),
    ]
    made = build_step(dims, chunks)
    return made


def logits(program: Program, threads: int) -> list[Array]:
    kind = Dtype(program.dims.model.dtype)
    checkpoint = RandomCheckpoint(least_dims(CONFIG, kind), biased=False)
    backend = CpuBackend(checkpoint, program.dims, PAGES, threads=threads)
    if program.dims.split.tp == 1 and not program.dims.model.quantised_kv:
        fill(backend)  # also sets K and V of all tokens that precede the step
    out = [backend.launch(program, table(program.dims), trace=n == 1).logits[:3].copy() for n in range(3)]
    backend.close()
    return out


@pytest.mark.parametrize(
    ("tp", "dtype", "quantised"),
    [(1, Dtype.F32, False), (1, Dtype.BF16, True), (4, Dtype.F32, True), (4, Dtype.BF16, False)],
)
def test_threads_change_no_bits(tp: int, dtype: Dtype, quantised: bool) -> None:
    """Logits are bit-identical with more threads than streams and with more streams than threads. In most launches,
    some streams pass from one thread to another."""
    sizes = dims(tp, dtype, quantised)
    expected = logits(make_program(CONFIG, sizes, 1), 1)[0]
    for make, workers, threads in ((make_program, 3, 2), (make_program, 2, 8), (make_queue_program, 3, 3)):
        for found in logits(make(CONFIG, sizes, workers), threads):
            np.testing.assert_array_equal(found, expected)
