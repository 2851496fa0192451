"""Tests the attention code that one warp runs on tensor cores. On the host, loops replace the matrix instructions."""

import ctypes
from typing import Any

import numpy as np
import pytest
from built_once import ROOT, library
from numpy.typing import NDArray
from tiles import copied_tile

from megakernel.isa import KV_BLOCK, Dtype, from_f32, to_f32
from megakernel.runtime.cuda.pages import BOX_ROWS, QUERY_TILE

INFINITY, NAN = 0x7F80, 0x7FC0
Bits = NDArray[np.uint16]


@pytest.fixture(scope="module")
def tile() -> ctypes.CDLL:
    return library(ROOT / "tests" / "support" / "attention_harness.cpp", "-O1", "-pthread")


class Block:
    """Random queries, keys and values of one KV block. The memory after the head's keys is filled with `beyond`."""

    def __init__(self, head_dim: int, beyond: int) -> None:
        rng = np.random.default_rng(head_dim)

        def random(*shape: int) -> Bits:
            drawn: Any = from_f32(rng.standard_normal(shape, dtype=np.float32), Dtype.BF16)
            return drawn.astype(np.uint16)

        self.queries, self.positions = random(QUERY_TILE, head_dim), np.arange(112, 128, dtype=np.int32)
        self.keys = np.full((-(-head_dim // BOX_ROWS) * BOX_ROWS, KV_BLOCK), beyond, np.uint16)
        self.keys[:head_dim] = random(head_dim, KV_BLOCK)
        # Zeros follow a head's values, not `beyond`: to the copy engine (TMA), these values are a matrix of their own,
        # and it returns zeros beyond the end of a row.
        self.values = np.zeros((KV_BLOCK, 128), np.uint16)
        self.values[:, :head_dim] = random(KV_BLOCK, head_dim)

    def attend(self, tile: ctypes.CDLL) -> Bits:
        out = np.empty_like(self.queries)
        halves = [
            copied_tile(np.ascontiguousarray(part)) for m in (self.keys, self.values) for part in np.split(m, 2, 1)
        ]
        keys, values = np.concatenate(halves[:2]), np.concatenate(halves[2:])
        arrays = [self.queries, self.positions, keys, values, out]
        queries, positions, keys_at, values_at, to = (ctypes.c_void_p(a.ctypes.data) for a in arrays)
        head_dim = self.queries.shape[1]
        tile.attend(queries, positions, keys_at, keys.nbytes // 2, values_at, head_dim, to)
        return out

    def expected(self) -> NDArray[np.float64]:
        head_dim = self.queries.shape[1]
        q, k, v = (
            to_f32(a).astype(np.float64) for a in (self.queries, self.keys[:head_dim], self.values[:, :head_dim])
        )
        scores = np.where(np.arange(KV_BLOCK) <= self.positions[:, None], q @ k / np.sqrt(head_dim), -np.inf)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        whole: NDArray[np.float64] = weights @ v / weights.sum(1, keepdims=True)
        return whole


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [8, 16, 56, 64, 72, 80, 88, 104, 120, 128])
def test_what_lies_beyond_a_head_changes_no_bit(tile: ctypes.CDLL, head_dim: int) -> None:
    block = Block(head_dim, beyond=0)
    found = block.attend(tile)
    np.testing.assert_allclose(to_f32(found), block.expected(), atol=2**-6)
    for beyond in (INFINITY, NAN):
        np.testing.assert_array_equal(Block(head_dim, beyond).attend(tile), found)
