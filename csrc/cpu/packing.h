// Converts rows of weights, as files store them, to packed panels (packed.h).
#pragma once
#include "arena.h"
#include "kernels.h"
#include "packed.h"

namespace mk {

// Consecutive rows of one type, as files store them; quantised types are in GGML's blocks.
struct Part {
  int32_t dtype;
  int64_t rows;
  const void* data;
};

// One or several matrices, each [rows, k], whose panels alternate when packed. `parts` has the rows of the
// first matrix, then those of the next. No panel has rows of two parts.
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

// The memory from the first to the last packed weight of a matmul's tile, if the tile's panels are adjacent.
struct WeightSpan {
  const char* begin;
  int64_t bytes;
};
WeightSpan weight_span(const Phase& phase, const Tile& tile, const Panel* table);

}  // namespace mk
