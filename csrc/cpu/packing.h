// The layout of weight matrices that the kernels read.
//
// [N, K] becomes panels of kPanel columns (rows of the matrix), N filled up with zeros and K to an even
// number. float32: [N / 16][K][16]. bfloat16: [N / 16][K / 2][16][2]; the two k steps of a column share a
// 32-bit word. Q8_0: [N / 16][K / 32] blocks of 16 scales and [32][16] bytes, K filled up to whole blocks.
// Several matrices alternate by panels: panel 0 of each, then panel 1 of each, ...
#pragma once
#include <stdint.h>

#include "kernels.h"

namespace mk {

// One or several matrices side by side, each [rows, k], whose elements have one type.
struct Matrix {
  int64_t matrices, rows, k;
  Dtype storage;

  int64_t panel_bytes() const;
  int64_t panels() const { return matrices * ((rows + kPanel - 1) / kPanel); }
  int64_t bytes() const { return panels() * panel_bytes(); }  // packed
};

// From row-major [matrices, rows, k], where rows of Q8_0 are blocks of a scale and 32 bytes, to the packed
// layout, in zeroed memory, on `threads` threads.
void pack(const Matrix& matrix, const void* source, void* packed, int threads);

// Where in its packed weights a matmul's tile has its own.
struct WeightSpan {
  int64_t begin, bytes;
};
WeightSpan weight_span(const Phase& phase, const Tile& tile);

// Page-aligned zeroed memory, in huge pages where the system grants them. Throws std::bad_alloc. Release with
// free().
void* allocate(int64_t bytes);

}  // namespace mk
