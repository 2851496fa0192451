"""Compares whole programs, which the code of the CUDA interpreter runs on the host, with transformers in float64.
test_families.py does so for the other backends."""

import numpy as np
import pytest
import torch
from gpu_programs import SHAPES, h100
from launch_image import LaunchImage
from runner import Piece, Runner
from tiny_llama import error, hf_logits, make_llama, rounded

from megakernel.isa import Buffer, Dtype
from megakernel.runtime import create

TOKENS = np.random.default_rng(2).integers(0, 101, 21).tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_cuda_interpreter_computes_the_dense_model(shape: str) -> None:
    model, checkpoint = make_llama(9, **SHAPES[shape])
    checkpoint = rounded(model, checkpoint)
    dense = hf_logits(model.double(), TOKENS)
    in_bf16 = hf_logits(model.to(torch.bfloat16), TOKENS)
    for tp in (1, 2):
        runner = Runner(checkpoint, "reference", Dtype.BF16, machine=h100(2), tp=tp)
        program = runner.program(len(TOKENS), len(TOKENS))
        memory = create("reference", checkpoint, program.dims, sum(map(len, runner.pages)))
        image = LaunchImage(memory, program, runner.table(program, [Piece(0, 0, TOKENS)]))
        assert image.run() == ""
        own = program.dims.own_logit_rows
        found = [image.buffer(Buffer.LOGITS, rank=row // own)[row] for row in range(len(TOKENS))]
        assert error(np.stack(found), dense) <= 1.5 * error(in_bf16, dense), tp
