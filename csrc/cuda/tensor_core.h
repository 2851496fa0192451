// The layouts in which tensor cores and the bulk copy engine expect bytes and leave results (PTX
// ISA: wgmma, mma, ldmatrix, tensor swizzling modes). This file is plain arithmetic, so that the
// CPU can test it and the host's stand-ins can use it.
#pragma once
#include "arithmetic.h"

namespace mk {

// A tile of 128-byte rows, aligned to 1024 bytes, in the 128-byte swizzle: the index of a 16-byte chunk in a
// row is XORed with the row's number modulo 8.
constexpr int kTileRowBytes = 128;
MK_FN constexpr uint32_t swizzle(uint32_t byte) { return byte ^ (byte >> 3 & 0x70); }
MK_FN constexpr uint32_t tile_offset(int row, int byte) {
  return swizzle(static_cast<uint32_t>(row * kTileRowBytes + byte));
}

// An element of such a tile, which holds bf16.
MK_FN float tile_element(const unsigned char* tile, int row, int col) {
  return from_bf16(*reinterpret_cast<const uint16_t*>(tile + tile_offset(row, 2 * col)));
}

// wgmma's descriptor of such a tile whose rows run along k. One wgmma reads 32 bytes of each row; adding
// kDescriptorStep to the descriptor selects the next 32 bytes. Bits: 0-13 address, 16-29 leading offset
// (unused in this mode), 32-45 offset of the next 8 rows, all in units of 16 bytes; 62-63 swizzle.
MK_FN constexpr uint64_t k_major_descriptor(uint32_t shared_address) {
  constexpr uint64_t kUnit = 16, kEightRows = 8 * kTileRowBytes, kSwizzle128 = 1;
  return (shared_address & 0x3FFFF) / kUnit | uint64_t{1} << 16 | kEightRows / kUnit << 32 |
         kSwizzle128 << 62;
}
constexpr uint64_t kDescriptorStep = 32 / 16;

// Fragments of mma.m16n8k16: the rows and columns of which a lane holds elements. The accumulators of wgmma
// have the same layout, for a warp's 16 rows and each 8 columns. A lane's accumulators are four floats: two
// columns of a row in 0 .. 7, then the same columns of the row that is 8 below.
MK_FN constexpr int fragment_row(int lane, int half) { return lane / 4 + 8 * half; }
MK_FN constexpr int fragment_col(int lane) { return lane % 4 * 2; }
// A [16 rows][16 k]: a lane has four words, each with two elements along k.
MK_FN constexpr int a_row(int lane, int word) { return lane / 4 + word % 2 * 8; }
MK_FN constexpr int a_k(int lane, int word) { return lane % 4 * 2 + word / 2 * 8; }
// B [16 k][8 columns]: a lane has two words, each with two elements along k.
MK_FN constexpr int b_k(int lane, int word) { return lane % 4 * 2 + word * 8; }
MK_FN constexpr int b_col(int lane) { return lane / 4; }

// ldmatrix.x4 loads four [8][8] matrices of 16-bit elements. A lane gives the address of one row of one
// matrix and receives one 32-bit word of each matrix: two neighbours in a row, or, with .trans, in a column.
MK_FN constexpr int ldmatrix_matrix(int lane) { return lane / 8; }
MK_FN constexpr int ldmatrix_row(int lane) { return lane % 8; }

}  // namespace mk
