"""Runs programs that are compiled for a GPU, with a GPU's tile sizes and division of attention, on the CPU and
reference backends."""

from dataclasses import replace

import numpy as np
import pytest
from runner import Piece, Runner
from tiny_llama import make_llama

from megakernel import machine as machines
from megakernel.isa import Dtype
from megakernel.scheduler.verify import verify

SHAPE = {"vocab": 150, "hidden": 64, "ffn": 128, "heads": 8, "kv_heads": 4, "head_dim": 16, "max_context": 700}


H200 = machines.load("h200")


@pytest.fixture(scope="module")
def checkpoint():
    return make_llama(seed=5, **SHAPE)[1]


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(1).integers(0, SHAPE["vocab"], 641).tolist()


@pytest.fixture(scope="module", params=["cpu", "reference"])
def on_host(request, checkpoint, tokens):
    """Yield the name of a backend, and the logits that it computes with a program compiled for this machine."""
    runner = Runner(checkpoint, request.param, Dtype.BF16, max_context=700)
    yield request.param, runner.logits(tokens, [640])
    runner.close()


@pytest.mark.parametrize("matmul", ["tensor", "dots"])
def test_a_program_for_a_gpu_has_the_bits_of_one_for_this_machine(matmul, checkpoint, tokens, on_host):
    backend, expected = on_host
    machine = replace(H200, workers=11)
    runner = Runner(checkpoint, backend, Dtype.BF16, machine=machine, max_context=700, matmul=matmul)
    program = runner.program(1, 1)
    table = runner.table(program, [Piece(0, 640, tokens[-1:])])
    together = table.item_kv_heads[table.item_split >= 0]
    assert verify(program).ok and len(together) and together.min() > 1, "no split of several KV heads"
    np.testing.assert_array_equal(runner.logits(tokens, [640]), expected)
    runner.close()
