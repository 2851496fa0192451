"""Tests of quantised weights that are multiplied in integers, with activations that are rounded to integers."""

from typing import Any

import numpy as np
import pytest
from cpu_support import DIMS, PAGES, Array, RandomCheckpoint, make_table
from handmade import record
from stored_checkpoints import ODD, SHARED, GivenHead, Mixed, logits, program_of, quantised

from megakernel import LLM
from megakernel.errors import MegakernelError
from megakernel.isa import Buffer, Dtype, to_f32
from megakernel.isa.dtypes import BLOCKS
from megakernel.isa.integers import Codes, codes, multiply, rounded
from megakernel.runtime.cpu.backend import CpuBackend

# Numbers of rows: one, those of the smallest and largest register blocks, and more than one pass takes.
ROWS = (1, 2, 3, 4, 5, 8, 13, 100)
COLUMNS = 72  # four panels, which are read together, and a half
INNER = 301  # takes two chunks of 256 elements, and ends with a partial block of 32


def blocks(kind: Dtype, rows: int, inner: int = INNER) -> Array:
    """Random blocks of a type. All bits of their integers are random, and their scales are ordinary numbers."""
    rng, block = np.random.default_rng(int(kind)), BLOCKS[kind]
    out = rng.integers(0, 256, (rows * -(-inner // block.weights), block.bytes)).astype(np.uint8)
    for at in block.scales:
        out[:, at : at + 2] = rng.normal(0, 0.1, (len(out), 1)).astype(np.float16).view(np.uint8)
    if kind is Dtype.MXFP4:
        out[:, 0] = rng.integers(120, 128, len(out))
    return out.reshape(rows, -1)


def activations(rows: int, inner: int = INNER) -> Array:
    """Random rows. Some blocks of 32 elements, which share a scale, are zero, tiny or huge; one has a large element."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, inner)).astype(np.float32)
    extremes = [(0, 0), (1, 1e-32), (2, 1e30), (0, 1e-10), (3, 1e3)]
    for row, (unit, scale) in zip(x, extremes * (rows // 5 + 1), strict=False):
        row[32 * unit : 32 * unit + 32] *= np.float32(scale)
    x[0, 40] = 100
    return x


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda t: t.name)
def test_codes_are_the_weights(kind: Dtype) -> None:
    data = blocks(kind, 16)
    got = codes(data, kind)
    weights = got.scale[..., None] * got.values.astype(np.float32)
    weights += 0 if got.offset is None else got.offset[..., None]
    np.testing.assert_array_equal(weights.reshape(16, -1), to_f32(data, kind))


def test_a_row_is_rounded_to_the_nearest_integers() -> None:
    """Two words of four elements may exceed 127 times the scale, by a factor of at most 128."""
    x = np.zeros((5, 64), np.float32)
    x[0, [1, 6, 12, 13, 14]] = [1000.4, -300.6, -127, 3.6, -0.4]
    x[1, [0, 8]] = [1e5, 3]
    x[2, :2] = [1e-31, 3]
    x[3, 0] = 1e-31
    x[4, 33] = np.inf
    got = rounded(x)
    assert got.values[0, 0, [1, 6, 12, 13, 14]].tolist() == [1000, -301, -127, 4, 0]
    np.testing.assert_allclose(got.scale[:, 0], [1, 1e5 / 16256, 3 / 16256, 0, 0], rtol=2e-6)
    assert got.values[1:3, 0, [0, 1, 8]].tolist() == [[16256, 0, 0], [0, 16256, 0]]
    assert not got.scale[:4, 1].any() and not got.values[3:].any() and np.isnan(got.scale[4, 1])


def test_a_product_is_rounded_once() -> None:
    """The product of the scales is rounded to float32. Otherwise, adding the tiny offset would round the sum up."""
    a, b = np.float32(1 + 2**-12), np.float32(1 + 2**-12)  # the product is 1 + 2^-11 + 2^-24
    w = Codes(np.ones((1, 1, 32), np.int64), np.full((1, 1), b), np.full((1, 1), np.float32(2**-40)))
    x = rounded(np.zeros((1, 32), np.float32))._replace(scale=np.full((1, 1), a))
    x.values[0, 0, 0] = 1
    first = np.float32(np.float64(a) * np.float64(b))
    exact = np.float64(first) + np.float64(2**-40) * np.float64(a)
    assert multiply(x, w)[0, 0] == np.float32(exact)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda t: t.name)
def test_bits_are_those_of_the_definition(simd: str, kind: Dtype) -> None:
    """Every SIMD path gives the bits of the definition in megakernel/isa/integers.py, for any number of rows. Only the
    portable path, which has no fused multiply-adds, differs by rounding."""
    head = blocks(kind, COLUMNS)
    dims = DIMS.changed(ffn=32, vocab=COLUMNS, hidden=INNER, layers=1)

    checkpoint = GivenHead(dims, kind, head)
    program = program_of(checkpoint, max(ROWS), q8=True)
    backend = CpuBackend(checkpoint, program.dims, PAGES, threads=1)
    weights = codes(head, kind)
    for rows in ROWS:
        x = activations(rows)
        backend.buffer(Buffer.Y)[:rows] = x
        table = make_table(program.dims, {0: (0, rows)})
        backend.execute(record(program.forward.by_name["lm_head"], 0, rows, 0, COLUMNS), 0, table, program.forward)
        found, expected = backend.buffer(Buffer.LOGITS)[:rows], multiply(rounded(x), weights)
        if simd == "portable":
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
        else:
            np.testing.assert_array_equal(found, expected)
    backend.close()


def test_a_number_that_is_not_finite_stays_one() -> None:
    checkpoint, _ = quantised(ODD)
    program = program_of(checkpoint, 1, q8=True)
    backend = CpuBackend(checkpoint, program.dims, PAGES, threads=1)
    for value in (np.nan, np.inf, -np.inf):
        backend.buffer(Buffer.Y)[0] = 1
        backend.buffer(Buffer.Y)[0, 7] = value
        tile = record(program.forward.by_name["lm_head"], 0, 1, 0, 16)
        backend.execute(tile, 0, make_table(program.dims, {0: (0, 1)}), program.forward)
        assert np.isnan(backend.buffer(Buffer.LOGITS)[0, :16]).all()
    backend.close()


def assert_near(got: Array, expected: Array) -> None:
    """Compare the logits of whole models. The tolerance is larger than for floats, because a difference in the last bit
    of an activation can change the integer to which it is rounded."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=0.04 * np.abs(expected).max())


@pytest.mark.parametrize("rows", [1, 13])
def test_matrices_of_several_types(rows: int, dtype: Dtype) -> None:
    """In a matrix that has some rows in floats, only the quantised rows are multiplied in integers."""
    mixed = Mixed(RandomCheckpoint(ODD.changed(dtype=int(dtype))), (Dtype.Q4_K, Dtype.F16, Dtype.Q6_K))
    assert_near(logits("cpu", mixed, rows, q8=True), logits("reference", mixed, rows, q8=True))


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_round_the_same_units(tp: int) -> None:
    blocks, _ = quantised(SHARED, Dtype.F32, Dtype.Q5_1)
    found = logits("cpu", blocks, 13, tp, q8=True)
    assert_near(found, logits("reference", blocks, 13, tp, q8=True))
    assert_near(found, logits("cpu", blocks, 13, q8=True))


def test_rounding_changes_little() -> None:
    """Rounding activations changes the logits, but by less than the error of 8 bits."""
    blocks, _ = quantised(ODD)
    q8, floats = (logits("cpu", blocks, 2, q8=q8) for q8 in (True, False))
    error = np.abs(q8 - floats).max() / np.abs(floats).max()
    assert 1e-4 < error < 0.01


def test_which_class_is_used() -> None:
    def used(**how: Any) -> Any:
        with LLM(RandomCheckpoint(SHARED), backend="cpu", max_context=64, max_num_seqs=1, **how) as llm:
            return llm.about["activations"], llm.engine.dims.model.q8_activations

    assert used() == ("f32", 0)
    assert used(weights="q8_0") == used(weights="q8_0", activations="q8") == ("q8", 1)
    assert used(weights="q8_0", activations="float") == ("f32", 0)
    with pytest.raises(MegakernelError, match="--activations q8 needs weights that are quantised"):
        used(activations="q8")
    with pytest.raises(MegakernelError, match="activations in 'int8': choose from auto, q8, float"):
        used(activations="int8")
