// Converts rows of weights from the layout of model files to packed panels (packed.h).
#pragma once
#include "arena.h"
#include "simd/kernels.h"
#include "simd/packed.h"

namespace mk {

// Consecutive rows of weights of one type, in the layout of model files. Quantised types are in GGML's
// blocks.
struct Part {
  int32_t dtype;
  int64_t rows;
  const void* data;
};

// The weights of a matmul before packing. Each of `stacked` experts (1 without experts) has `matrices`
// matrices of shape [rows, k], such as gate and up. `parts` has the rows of expert 0's first matrix,
// then of its second, and so on, then those of expert 1. Packing makes panels of kPanel rows of one
// part. Panels are in order of experts; an expert's panels alternate between its matrices.
struct Matrix {
  int64_t stacked, matrices, rows, k, part_count;
  const Part* parts;

  int64_t panels() const { return matrices * ((rows + kPanel - 1) / kPanel); }  // of one expert
};

// The packed panels of a matrix. `table` lists the panels' types and addresses; it is what kernels receive as
// their weights.
struct Packed {
  void* table;  // Panel[panels]
  void* data;
  int64_t bytes;  // of data
};

// Packs a matrix on up to `threads` threads. Reuses the memory of `old`, the matrix that it replaces, if
// both have the same size. Otherwise allocates from `arena`, which may throw std::bad_alloc.
Packed pack(const Matrix& matrix, const Packed& old, Arena& arena, int threads);

// The memory from the first to the last packed weight of a matmul's tile. The tile's panels must be adjacent.
struct WeightSpan {
  const char* begin;
  int64_t bytes;
};
WeightSpan weight_span(const Phase& phase, const Tile& tile, const Panel* table);

}  // namespace mk
