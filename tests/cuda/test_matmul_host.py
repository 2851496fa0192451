"""The matmul bodies of the CUDA interpreter, on the host and one instruction at a time, against the reference."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_support import DIMS, PAGES, RandomCheckpoint, make_table
from native_harness import build
from numpy.typing import NDArray
from program_parts import record

from megakernel.isa import BUFFERS, Buffer, Dims, Dtype, Space, from_f32, to_f32
from megakernel.runtime.cpu.native import CDims
from megakernel.runtime.reference import ReferenceBackend

B = Buffer
SMALL = replace(DIMS, dtype=int(Dtype.BF16), page=DIMS.kv_block)
MODELS = {
    "odd": SMALL,
    "head80": replace(SMALL, hidden=160, ffn=200, heads=3, kv_heads=1, head_dim=80, vocab=301, attention_bias=0),
    # Several pieces of k, chunks of columns, laps of the ring.
    "wide": replace(SMALL, hidden=1096, ffn=2056, heads=9, kv_heads=3, head_dim=128, layers=1, mlp_bias=0),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build("matmul_harness.cpp", Path(tmp_path_factory.mktemp("matmul")), "-O2")


class Pair:
    """The reference and the host bodies on equal buffers: weights, and noise in everything that a step computes."""

    def __init__(self, library: ctypes.CDLL, dims: Dims) -> None:
        self.library, self.dims = library, dims
        self.ranks = [replace(dims, rank=rank) for rank in range(dims.tp)]
        self.reference = ReferenceBackend(RandomCheckpoint(replace(dims, tp=1)), dims, PAGES, dtype=Dtype.BF16)
        rng = np.random.default_rng(0)
        self.arrays: list[dict[Buffer, NDArray[Any]]] = []
        for rank in range(dims.tp):
            copies = {}
            for buffer, spec in BUFFERS.items():
                layers = [self.reference.buffer(buffer, i, rank) for i in range(dims.layers if spec.layered else 1)]
                kind = spec.resolve_dtype(dims)
                if spec.space is not Space.WEIGHT and kind is not Dtype.I32:
                    for layer in layers:
                        layer[:] = from_f32(rng.standard_normal(layer.shape, dtype=np.float32), kind)
                copies[buffer] = np.stack(layers)
            self.arrays.append(copies)

    def run(self, instruction: NDArray[np.int32], layer: int, table: Any, rank: int = 0) -> None:
        """On both; then every buffer of every rank must agree."""
        self.reference.execute(instruction, layer, table, rank)
        flat = [a for copies in self.arrays for a in copies.values()]
        pointers = (ctypes.c_void_p * len(flat))(*(a.ctypes.data for a in flat))
        strides = (ctypes.c_uint64 * len(flat))(*(a[0].nbytes if len(a) > 1 else 0 for a in flat))
        shapes = (ctypes.c_int64 * (2 * len(flat)))(
            *(n for dims in self.ranks for b in BUFFERS for n in _shape(b, dims))
        )
        dims = (CDims * self.dims.tp)(*(CDims.of(d) for d in self.ranks))
        words = np.ascontiguousarray(table.words)
        status = self.library.run_matmul(
            dims, rank, pointers, strides, shapes, words.ctypes.data_as(ctypes.c_void_p), layer,
            instruction.ctypes.data_as(ctypes.c_void_p),
        )  # fmt: skip
        assert status == 0, "pages were not each released, or written, once by every warp"
        for other, copies in enumerate(self.arrays):
            for buffer, spec in BUFFERS.items():
                if spec.space is Space.WEIGHT:
                    continue
                for i, got in enumerate(copies[buffer]):
                    expected = self.reference.buffer(buffer, i, other)
                    bf16 = got.dtype == np.uint16
                    np.testing.assert_allclose(
                        to_f32(got), to_f32(expected), rtol=2**-7 if bf16 else 1e-5, atol=2e-5,
                        err_msg=f"{buffer.name} of rank {other}, layer {i}",
                    )  # fmt: skip


def _shape(buffer: Buffer, dims: Dims) -> tuple[int, int]:
    """Inner length and rows of one matrix of a buffer."""
    shape = BUFFERS[buffer].shape(dims, PAGES)
    if buffer is B.REDUCE:
        return dims.hidden, dims.own_rows
    return shape[-1], shape[-2] if len(shape) > 1 else 1


def _columns(name: str, d: Dims) -> int:
    return {"qkv_rope": d.qkv_cols, "gate_up_silu": d.rank_ffn, "lm_head": d.rank_vocab}.get(name, d.hidden)


def _table(dims: Dims) -> Any:
    """Two sequences, the end padding."""
    return make_table(dims, {0: (37, 5), 2: (120, dims.tokens - 8)})


def _run_all(pair: Pair, name: str, rank: int, row: int, rows: int, unit: int) -> None:
    """All columns of the rank's part, in two instructions."""
    d = pair.ranks[rank]
    table, total, layer = _table(pair.dims), _columns(name, d), d.layers - 1
    first = min(total, (total // 2 + unit - 1) // unit * unit)
    for col, end in ((0, first), (first, total)):
        if end > col:
            pair.run(record(name, row, rows, col, end - col), 0 if name == "lm_head" else layer, table, rank)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["qkv_rope", "o_proj", "gate_up_silu", "down_proj", "lm_head"])
def test_tensor(library: ctypes.CDLL, model: str, name: str) -> None:
    pair = Pair(library, replace(MODELS[model], dots=0))
    row, rows = (0, 5) if name == "lm_head" else (32, 8)
    _run_all(pair, name, 0, row, rows, 64)
    if name != "lm_head":
        _run_all(pair, name, 0, 0, 32, 64)


def test_tensor_rows_of_both_warpgroups(library: ctypes.CDLL) -> None:
    pair = Pair(library, replace(SMALL, dots=0, tokens=100, row_block=128))
    for name in ("qkv_rope", "o_proj", "gate_up_silu"):
        _run_all(pair, name, 0, 0, 100, 64)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["qkv_rope", "o_proj", "gate_up_silu", "down_proj", "lm_head"])
def test_dots(library: ctypes.CDLL, model: str, name: str) -> None:
    pair = Pair(library, replace(MODELS[model], dots=1))
    for row, rows in ((3, 1), (0, 5)):
        _run_all(pair, name, 0, row, rows, 8)


@pytest.mark.parametrize("dots", [0, 1])
@pytest.mark.parametrize("one_hop", [0, 1])
@pytest.mark.parametrize("name", ["qkv_rope", "o_partial", "gate_up_silu", "down_partial", "lm_head"])
def test_ranks(library: ctypes.CDLL, name: str, one_hop: int, dots: int) -> None:
    """Partials go to the owner of the rows, or to every rank; logits to the rank that samples."""
    pair = Pair(library, replace(SMALL, dots=dots, tp=2, one_hop=one_hop, tokens=64))
    for rank in range(2):
        # Tiles of the tensor cores end on boxes, or with the buffer.
        row, rows = (0, 5) if name == "lm_head" else (32, 5 if dots else 32)
        _run_all(pair, name, rank, row, rows, 8 if dots else 64)


def test_bits_of_a_dot_product_depend_on_its_row_alone(library: ctypes.CDLL) -> None:
    """Rows one by one or together, columns in any cut: the same bits."""
    dims = replace(MODELS["wide"], dots=1)
    pairs = [Pair(library, dims) for _ in range(2)]
    table = _table(dims)
    pairs[0].run(record("gate_up_silu", 0, 6, 0, dims.ffn), 0, table)
    for row in range(6):
        for col, end in ((0, 8), (8, 1024), (1024, dims.ffn)):
            pairs[1].run(record("gate_up_silu", row, 1, col, end - col), 0, table)
    np.testing.assert_array_equal(*(p.arrays[0][B.ACT] for p in pairs))
