"""Runs programs that are compiled for a GPU, with a GPU's tile sizes and division of attention, on the CPU backend and
by the CUDA interpreter's code on the host, and tests the shared-memory pages that this code plans for instructions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gpu_programs import SHAPES, h100, make, plan
from launch_image import LaunchImage
from runner import Piece, Runner
from tiny_llama import error, hf_logits, make_llama, rounded

from megakernel import machine as machines
from megakernel.isa import Buffer, Dtype, Operation
from megakernel.isa.record import phase_number
from megakernel.runtime import create
from megakernel.scheduler import Options
from megakernel.scheduler.verify import verify

SHAPE = {"vocab": 150, "hidden": 64, "ffn": 128, "heads": 8, "kv_heads": 4, "head_dim": 16, "max_context": 700}
TOKENS = np.random.default_rng(2).integers(0, 101, 21).tolist()
WEIGHTS, INPUTS = range(2)


def test_a_program_for_a_gpu_has_the_bits_of_one_for_this_machine() -> None:
    _, checkpoint = make_llama(seed=5, **SHAPE)
    tokens, found = np.random.default_rng(1).integers(0, SHAPE["vocab"], 641).tolist(), []
    machine = replace(machines.load("h200"), workers=11)
    for how in ({}, {"machine": machine, "matmul": "tensor"}, {"machine": machine, "matmul": "dots"}):
        runner = Runner(checkpoint, "cpu", Dtype.BF16, max_context=700, **how)
        program = runner.program(1, 1)
        table = runner.table(program, [Piece(0, 640, tokens[-1:])])
        together = table.item_kv_heads[table.item_split >= 0]
        assert verify(program).ok
        assert not how or (len(together) and together.min() > 1), "no split of several KV heads"
        found.append(runner.logits(tokens, [640]))
        runner.close()
    for logits in found[1:]:
        np.testing.assert_array_equal(logits, found[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_cuda_interpreter_computes_the_dense_model(shape: str) -> None:
    model, _ = make_llama(9, **SHAPES[shape])
    checkpoint = rounded(model)
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


def test_one_copy_fills_a_page_where_it_can() -> None:
    """With such sizes, each page of weights, of keys and of values is filled by one copy."""
    _, program, table = make("whole pages", 1, Options(matmul="dots"))
    whole, pages = set(), 0
    for record in program.body.records:
        phase = program.forward.by_number[int(phase_number(record))]
        planned = plan(program.forward, program.dims, table, record)
        assert bool(planned) == (phase.is_matmul or phase.operation is Operation.ATTENTION)
        whole |= {(fill, pieces > 0) for fill, pieces, one in planned if one}
        pages += sum(one == 0 for fill, _, one in planned if fill == WEIGHTS)
    assert whole == {(WEIGHTS, True), (INPUTS, False)} and pages == 0
