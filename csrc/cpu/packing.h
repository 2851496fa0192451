// The layout of weight matrices that the kernels read.
//
// [N, K] becomes panels of kPanel columns (rows of the matrix), N filled up with zeros and K to an even
// number. float32: [N / 16][K][16]. bfloat16: [N / 16][K / 2][16][2]; the two k steps of a column share a
// 32-bit word. W_GATE_UP [2, F, K] alternates panels: gate 0, up 0, gate 1, up 1, ...
#pragma once
#include <stdint.h>

#include "kernels.h"

namespace mk {

struct PackedShape {
  int64_t rows;      // N of one matrix
  int64_t k;         // K
  int64_t matrices;  // 2 for gate and up
  int64_t panels;    // of all matrices
  int64_t panel_bytes;
  int64_t bytes() const { return panels * panel_bytes; }
};

// rows = 0 for a buffer that is not packed.
PackedShape packed_shape(const Dims& dims, Buffer buffer);

// From row-major [matrices, rows, k] to the packed layout, on `threads` threads.
void pack(const PackedShape& shape, int32_t itemsize, const void* source, void* packed, int threads);

// The weights a matmul record reads: buffer and byte range; bytes = 0 for other records.
struct WeightSpan {
  Buffer buffer;
  int64_t begin, bytes;
};
WeightSpan weight_span(const Dims& dims, const int32_t* record);

// Page-aligned zeroed memory, in huge pages where the system grants them. Throws std::bad_alloc. Release with
// free().
void* allocate(int64_t bytes);

}  // namespace mk
