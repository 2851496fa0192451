// The data layouts of tensor cores and of the bulk copy engine (TMA), from the PTX ISA's sections on wgmma,
// mma, ldmatrix and tensor swizzling modes. This file contains only arithmetic, so that
// the host code that emulates the hardware can use it.
#pragma once
#include "arithmetic.h"

namespace mk {

// A shared-memory tile has rows of 128 bytes, is aligned to 1024 bytes and uses the 128-byte swizzle: the
// index of each 16-byte chunk in a row is XORed with the row's number modulo 8.
constexpr int kTileRowBytes = 128;
MK_FN constexpr uint32_t swizzle(uint32_t byte) { return byte ^ (byte >> 3 & 0x70); }
MK_FN constexpr uint32_t tile_offset(int row, int byte) {
  return swizzle(static_cast<uint32_t>(row * kTileRowBytes + byte));
}

MK_FN float tile_element(const unsigned char* tile, int row, int col) {
  return from_bf16(*reinterpret_cast<const uint16_t*>(tile + tile_offset(row, 2 * col)));
}

// Returns wgmma's matrix descriptor of a swizzled tile whose rows run along k. One wgmma reads 32 bytes of
// each row; adding kDescriptorStep to the descriptor selects the next 32 bytes. The descriptor's bits 0-13
// are the address, 16-29 the leading offset (unused in this mode), and 32-45 the offset between groups of 8
// rows, all in units of 16 bytes; bits 62-63 are the swizzle mode.
MK_FN constexpr uint64_t k_major_descriptor(uint32_t shared_address) {
  constexpr uint64_t kUnit = 16, kEightRows = 8 * kTileRowBytes, kSwizzle128 = 1;
  return (shared_address & 0x3FFFF) / kUnit | uint64_t{1} << 16 | kEightRows / kUnit << 32 |
         kSwizzle128 << 62;
}
constexpr int kDescriptorStep = 32 / 16;

// Which elements of an mma.m16n8k16 fragment a lane holds. Of the result C, a lane has two adjacent columns
// of row lane / 4 (half = 0) and the same columns of the row 8 below (half = 1). wgmma accumulators have the
// same layout for the 16 rows of a warp, repeated for every 8 columns.
MK_FN constexpr int fragment_row(int lane, int half) { return lane / 4 + 8 * half; }
MK_FN constexpr int fragment_col(int lane) { return lane % 4 * 2; }
// Of matrix A (16 rows, 16 columns along k), a lane holds four 32-bit words, each with two elements
// adjacent along k. `a_k` returns the k of a word's first element; its row is fragment_row(lane, word %
// 2).
MK_FN constexpr int a_k(int lane, int word) { return lane % 4 * 2 + word / 2 * 8; }

// ldmatrix.x4 loads four 8 x 8 matrices of 16-bit elements. Each lane passes the address of one row of one
// matrix; the two functions return which matrix and which row. Each lane receives one 32-bit word per matrix:
// two elements that are adjacent in a row or, with .trans, in a column.
MK_FN constexpr int ldmatrix_matrix(int lane) { return lane / 8; }
MK_FN constexpr int ldmatrix_row(int lane) { return lane % 8; }

}  // namespace mk
