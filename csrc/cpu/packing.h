// Converts rows of weights, as files store them, to packed panels (packed.h).
#pragma once
#include "arena.h"
#include "kernels.h"
#include "packed.h"

namespace mk {

// Neighbouring rows of one type, in the layout of files; GGML's blocks for quantised types.
struct Part {
  int32_t dtype;
  int64_t rows;
  const void* data;
};

// One or several matrices side by side, each [rows, k], one after another in `parts`, which end between
// panels.
struct Matrix {
  int64_t matrices, rows, k, part_count;
  const Part* parts;

  int64_t panels() const { return matrices * ((rows + kPanel - 1) / kPanel); }
};

// Packed panels, and the table of them that is bound as the matrix.
struct Packed {
  void* table;  // Panel[panels]
  void* data;
  int64_t bytes;  // of data
};

// Packs into memory of `arena`, on `threads` threads. Throws std::bad_alloc.
Packed pack(const Matrix& matrix, Arena& arena, int threads);

// The addresses of the packed weights of a matmul's tile, as far as the tile's panels are adjacent.
struct WeightSpan {
  const char* begin;
  int64_t bytes;
};
WeightSpan weight_span(const Phase& phase, const Tile& tile, const Panel* table);

}  // namespace mk
