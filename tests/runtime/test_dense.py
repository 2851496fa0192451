"""Compares every backend with transformers in float64."""

import numpy as np
import pytest
import torch
from gpu_programs import SHAPES, h100
from launch_image import LaunchImage
from numpy.typing import NDArray
from runner import Piece, Runner
from tiny_llama import TinyCheckpoint, error, hf_logits, make_llama, rounded

from megakernel.isa import Buffer, Dtype
from megakernel.runtime import create

TOKENS = np.random.default_rng(2).integers(0, 101, 21).tolist()


def computed(backend: str, checkpoint: TinyCheckpoint, tp: int, dtype: Dtype) -> NDArray[np.float32]:
    if backend != "cuda on the host":
        runner = Runner(checkpoint, backend, dtype, tp=tp)
        logits = runner.logits(TOKENS)
        runner.close()
        return logits
    runner = Runner(checkpoint, "reference", dtype, machine=h100(2), tp=tp)
    program = runner.program(len(TOKENS), len(TOKENS))
    memory = create("reference", checkpoint, program.dims, sum(map(len, runner.pages)), dtype=dtype)
    image = LaunchImage(memory, program, runner.table(program, [Piece(0, 0, TOKENS)]))
    assert image.run() == ""
    own = program.dims.own_logit_rows
    return np.stack([image.buffer(Buffer.LOGITS, rank=row // own)[row] for row in range(len(TOKENS))])


@pytest.mark.parametrize("backend", ["reference", "cpu", "cuda on the host"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_backend_computes_the_dense_model(backend: str, shape: str) -> None:
    model, checkpoint = make_llama(9, **SHAPES[shape])
    checkpoint = rounded(model, checkpoint)
    dense = hf_logits(model.double(), TOKENS)
    if backend != "cuda on the host":
        assert error(computed(backend, checkpoint, 1, Dtype.F32), dense) < 1e-4
        return
    in_bf16 = hf_logits(model.to(torch.bfloat16), TOKENS)
    for tp in (1, 2):
        assert error(computed(backend, checkpoint, tp, Dtype.BF16), dense) <= 1.5 * error(in_bf16, dense), tp
