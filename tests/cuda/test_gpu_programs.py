"""Runs programs that are compiled for a GPU, with a GPU's tile sizes and division of attention, on the CPU and
reference backends."""

from dataclasses import replace

import numpy as np
import pytest
from runner import Piece, Runner
from tiny_llama import make_llama

from megakernel import machine as machines
from megakernel.isa import Buffer, Dtype
from megakernel.runtime import Chunk, SampleRow, build_step, create
from megakernel.scheduler import Options, Spec, compile_program
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


@pytest.mark.parametrize("queue", ["none", "body"])
@pytest.mark.parametrize("residual", ["dealt", "replicated"])
def test_phases_one_after_the_other_compute_the_launch(checkpoint, residual, queue):
    """On two ranks, executing the phases one after the other, each with its instructions in random order, gives the
    same results, bit for bit, as a launch of the whole program."""
    target = replace(H200, workers=5)
    sizes = {"tokens": 70, "logit_rows": 3, "max_seqs": 2, "max_context": 256}
    options = Options(residual=residual, queue=queue, matmul="tensor")
    program = compile_program(Spec(checkpoint.config, target, dtype=Dtype.F32, tp=2, options=options, **sizes))
    results = []
    for phased in (False, True):
        backend = create("reference", checkpoint, program.dims, 4)
        chunks = [
            Chunk(0, 0, list(range(40)), [3, 0]),
            Chunk(1, 0, list(range(25)), [2, 1], [SampleRow(i) for i in (3, 11, 24)]),
        ]
        table = build_step(program.dims, chunks)
        if phased:
            rng = np.random.default_rng(0)
            for segment, layer in [(0, 0), *((1, layer) for layer in range(program.dims.model.layers)), (2, 0)]:
                for phase in program.phases(segment):
                    rank = np.repeat(np.arange(2 * program.workers) // program.workers, np.diff(phase.offsets))
                    for row in rng.permutation(len(phase.records)):
                        backend.execute(phase.records[row], layer, table, program.forward, int(rank[row]))
        else:
            backend.launch(program, table)
        results.append([backend.buffer(Buffer.X, rank=rank).copy() for rank in range(2)])
        results[-1].append(backend.buffer(Buffer.LOGPROBS_OUT).copy())
        backend.close()
    for expected, got in zip(*results, strict=True):
        known = np.isfinite(expected)  # rows that another rank owns are NaN
        assert known.any()
        np.testing.assert_array_equal(got[known], expected[known])
