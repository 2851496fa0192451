"""Tests that the data layouts in csrc/cuda/tensor_core.h match those of the hardware. This file models the hardware's
layouts after the tables of the PTX ISA."""

import ctypes
from typing import Any

import numpy as np
import pytest
from built_once import ROOT, library
from numpy.typing import NDArray
from tiles import copied_tile

Array = NDArray[Any]


@pytest.fixture(scope="module")
def layouts() -> ctypes.CDLL:
    built = library(ROOT / "tests" / "support" / "layouts_harness.cpp")
    built.k_major_descriptor.restype = built.descriptor_step.restype = ctypes.c_uint64
    return built


def operand(memory: Array, descriptor: int, rows: int) -> Array:
    """Return the [rows][16] bf16 matrix that wgmma reads at a descriptor. This follows "Matrix descriptor" and
    "Canonical layouts" in the PTX ISA, for a K-major operand with 128-byte swizzle. A row has 128 bytes, eight rows
    form a group, and groups are `stride` bytes apart. The swizzle XORs bits 4-6 of an address with bits 7-9."""
    start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    assert descriptor >> 62 == 1 and descriptor >> 49 & 7 == 0  # 128-byte swizzle, base offset 0
    row, byte = np.arange(rows)[:, None], np.arange(32)
    address = start + row // 8 * stride + row % 8 * 128 + byte
    address ^= (address >> 7 & 7) << 4
    return memory[address].view(np.uint16)


def test_descriptors_address_the_tile_that_was_copied(layouts: ctypes.CDLL) -> None:
    memory = np.zeros(3 * 16384, np.uint8)
    base = 2 * 16384
    tile = np.random.default_rng(0).integers(0, 2**16, (128, 64), np.uint16)
    memory[base : base + 16384] = copied_tile(tile)
    for first_row in (0, 64):
        descriptor = layouts.k_major_descriptor(base + first_row * 128)
        for step in range(4):
            got = operand(memory, descriptor + step * layouts.descriptor_step(), 64)
            np.testing.assert_array_equal(got, tile[first_row : first_row + 64, step * 16 : step * 16 + 16])


def test_two_pages_in_a_row_are_one_operand(layouts: ctypes.CDLL) -> None:
    tile = np.random.default_rng(1).integers(0, 2**16, (256, 64), np.uint16)
    memory = np.concatenate([copied_tile(tile[:128]), copied_tile(tile[128:])])
    np.testing.assert_array_equal(operand(memory, layouts.k_major_descriptor(0), 256), tile[:, :16])


def test_tile_offset(layouts: ctypes.CDLL) -> None:
    tile = np.arange(128 * 64, dtype=np.uint16).reshape(128, 64)
    memory = copied_tile(tile).view(np.uint16)
    found = [[memory[layouts.tile_offset(r, 2 * k) // 2] for k in range(64)] for r in range(128)]
    np.testing.assert_array_equal(found, tile)


def test_output_pages_spread_over_the_banks(layouts: ctypes.CDLL) -> None:
    """When the lanes of a warp store bf16 pairs (4 bytes) of eight rows, each lane uses a different bank."""
    for block in range(8):
        banks = {
            layouts.tile_offset(layouts.fragment_row(lane, 0), (8 * block + layouts.fragment_col(lane)) * 2) // 4 % 32
            for lane in range(32)
        }
        assert len(banks) == 32


def test_fragments(layouts: ctypes.CDLL) -> None:
    """Each lane has the elements of A, B and the accumulators that the PTX ISA defines for mma.m16n8k16 with .bf16.
    wgmma's accumulators have the same layout, for each warp's 16 rows and each block of 8 columns."""
    for lane in range(32):
        group, thread = lane >> 2, lane % 4
        for i in range(8):
            row = group if i < 2 or 4 <= i < 6 else group + 8
            k = thread * 2 + (i & 1) + (0 if i < 4 else 8)
            assert (layouts.a_row(lane, i // 2), layouts.a_k(lane, i // 2) + i % 2) == (row, k)
        for i in range(4):
            k = thread * 2 + (i & 1) + (0 if i < 2 else 8)
            assert (layouts.b_k(lane, i // 2) + i % 2, layouts.b_col(lane)) == (k, group)
        for i in range(4):
            row, col = group if i < 2 else group + 8, thread * 2 + (i & 1)
            assert (layouts.fragment_row(lane, i // 2), layouts.fragment_col(lane) + i % 2) == (row, col)
