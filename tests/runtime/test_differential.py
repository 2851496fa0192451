"""The CPU computes what the reference computes, instruction by instruction, from the same buffers.

Before each instruction the CPU's buffers are set to the reference's, so a difference is that instruction's own. KV
slots that no sequence has reached hold large noise: an over-read shows.
"""

from __future__ import annotations

import numpy as np
import pytest
from runner import Piece, Runner
from tiny_llama import make_llama

from megakernel.isa import BUFFERS, BY_OPCODE, Buffer, Dtype, Space, from_f32, to_f32
from megakernel.isa.record import opcode
from megakernel.runtime import create

SHAPES = {
    "small": {"heads": 6, "kv_heads": 2, "head_dim": 16},
    "odd": {
        "vocab": 211,
        "ffn": 173,
        "heads": 3,
        "kv_heads": 1,
        "head_dim": 40,
        "attention_bias": True,
        "mlp_bias": True,
    },
}
RELATIVE = {Dtype.F32: 2e-5, Dtype.BF16: 2**-7}
# Private to a split's items; what they amount to is in ATTN.
PRIVATE = (Buffer.PARTIALS, Buffer.SPLITS)
SHARED = [b for b, spec in BUFFERS.items() if spec.space is not Space.WEIGHT and b not in PRIVATE]


def floats(array):
    return to_f32(array) if array.dtype in (np.uint16, np.float32) else array.astype(np.float64)


def layers(buffer, dims):
    return range(dims.layers if BUFFERS[buffer].layered else 1)


def copy(source, target, dims):
    for buffer in SHARED:
        for layer in layers(buffer, dims):
            view = source.buffer(buffer, layer)
            target.buffer(buffer, layer)[tuple(slice(n) for n in view.shape)] = view


def first_difference(reference, cpu, dims, relative):
    """The buffer that differs most beyond rounding, or None."""
    for buffer in SHARED:
        for layer in layers(buffer, dims):
            want = floats(reference.buffer(buffer, layer))
            got = floats(cpu.buffer(buffer, layer))[tuple(slice(n) for n in want.shape)]
            known = np.isfinite(want)
            scale = np.abs(want[known]).max(initial=1e-6)
            if buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
                scale = min(scale, 10.0)  # the noise is larger than any key
            if (np.abs(got[known] - want[known]) > relative * scale).any() or not np.isfinite(got[known]).all():
                return f"{buffer.name} of layer {layer}"
    return None


def compare(name, dtype, pieces, context, workers=2, damage=None):
    """Run one step on both; the first instruction after which they differ, or None."""
    _, checkpoint = make_llama(seed=4, **SHAPES[name])
    runner = Runner(checkpoint, "cpu", dtype, workers=workers, max_context=512)
    rows = sum(len(p.tokens) for p in pieces)
    program = runner.program(rows + 3, rows)
    dims = program.dims
    cpu = runner.backend
    reference = create("reference", checkpoint, dims, cpu.pages, dtype=dtype)
    rng = np.random.default_rng(8)
    for buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
        for layer in range(dims.layers):
            view = reference.buffer(buffer, layer)
            view[:] = from_f32(1e4 * rng.standard_normal(view.shape).astype(np.float32), dtype)
    for slot, length in context.items():
        _fill(reference, dims, runner.pages[slot], length, rng, dtype)
    table = runner.table(program, pieces)
    cpu.launch(program, table)  # sizes the CPU's buffers for this bucket
    for segment, count in (("prologue", 1), ("body", dims.layers), ("epilogue", 1)):
        records = getattr(program, segment).records
        for layer in range(count):
            for row in np.argsort(opcode(records), kind="stable"):
                record = records[row]
                copy(reference, cpu, dims)
                if damage:
                    damage(record, layer, cpu)
                reference.execute(record, layer, table)
                cpu.execute(record, layer, table)
                where = first_difference(reference, cpu, dims, RELATIVE[dtype])
                if where:
                    return f"{segment} row {row} ({BY_OPCODE[int(opcode(record))].name}), layer {layer}: {where}"
    runner.close()
    return None


def _fill(reference, dims, pages, length, rng, dtype):
    """Plausible K and V for the first `length` positions of a sequence."""
    for layer in range(dims.layers):
        for position in range(length):
            page, offset = pages[position // dims.page], position % dims.page
            shape = (dims.kv_heads, dims.head_dim)
            k, v = rng.standard_normal((2, *shape)).astype(np.float32)
            reference.buffer(Buffer.K_CACHE, layer)[page, :, :, offset] = from_f32(k, dtype)
            reference.buffer(Buffer.V_CACHE, layer)[page, :, offset, :] = from_f32(v, dtype)


def pieces_and_context():
    """A decode row deep in its context, another at a block's edge, and two prefills, one of them continued."""
    rng = np.random.default_rng(2)
    pieces = [
        Piece(0, 400, [5]),
        Piece(1, 127, [9]),
        Piece(2, 0, rng.integers(0, 90, 37).tolist()),
        Piece(3, 120, rng.integers(0, 90, 70).tolist()),
    ]
    return pieces, {0: 400, 1: 127, 3: 120}


@pytest.mark.parametrize("dtype", [Dtype.F32, Dtype.BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_agree(name, dtype):
    assert compare(name, dtype, *pieces_and_context()) is None


def test_split_attention_agrees():
    assert compare("small", Dtype.F32, [Piece(0, 500, [3])], {0: 500}, workers=8) is None


def test_names_the_first_that_differs():
    """One wrong activation under one o_proj of layer 1 is found there and nowhere before."""

    def damage(record, layer, cpu):
        if BY_OPCODE[int(opcode(record))].name == "o_proj" and layer == 1:
            cpu.buffer(Buffer.ATTN)[0, 0] += 1.0

    found = compare("small", Dtype.F32, *pieces_and_context(), damage=damage)
    assert found and "(o_proj), layer 1" in found
