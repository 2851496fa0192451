#include "packing.h"

#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <new>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace mk {
namespace {

// What a panel has of a matrix: `count` columns, which are the source's rows from `row`.
struct Columns {
  int64_t row, count;

  Columns(const Matrix& s, int64_t panel) {
    const int64_t first = panel / s.matrices * kPanel;
    row = panel % s.matrices * s.rows + first;
    count = std::min<int64_t>(kPanel, s.rows - first);
  }
};

template <class T, int kPair>
void pack_panel(const Matrix& s, const void* source, int64_t panel, void* packed) {
  const Columns columns(s, panel);
  const T* rows = static_cast<const T*>(source) + columns.row * s.k;
  for (int64_t k = 0; k < s.k; k += kPair) {
    T* line = static_cast<T*>(packed) + k * kPanel;
    const int64_t pair = std::min<int64_t>(kPair, s.k - k);
    for (int64_t c = 0; c < columns.count; ++c) {
      for (int64_t j = 0; j < pair; ++j) line[c * kPair + j] = rows[c * s.k + k + j];
    }
  }
}

// A block as rows have it.
struct RowBlock {
  uint16_t scale;
  int8_t weights[kQ8Steps];
};
static_assert(sizeof(RowBlock) == sizeof(uint16_t) + kQ8Steps);

int64_t q8_blocks(int64_t k) { return (k + kQ8Steps - 1) / kQ8Steps; }

void pack_q8_panel(const Matrix& s, const void* source, int64_t panel, void* packed) {
  const Columns columns(s, panel);
  const int64_t blocks = q8_blocks(s.k);
  const RowBlock* rows = static_cast<const RowBlock*>(source) + columns.row * blocks;
  Q8Block* out = static_cast<Q8Block*>(packed);
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t c = 0; c < columns.count; ++c) {
      const RowBlock& block = rows[c * blocks + b];
      out[b].scales[c] = block.scale;
      for (int k = 0; k < kQ8Steps; ++k) out[b].weights[k][c] = block.weights[k];
    }
  }
}

void pack_panel(const Matrix& s, const void* source, int64_t panel, void* packed) {
  switch (s.storage) {
    case Dtype::F32:
      return pack_panel<uint32_t, 1>(s, source, panel, packed);
    case Dtype::BF16:
      return pack_panel<uint16_t, 2>(s, source, panel, packed);
    case Dtype::Q8_0:
      return pack_q8_panel(s, source, panel, packed);
    case Dtype::I32:
      return;
  }
}

}  // namespace

int64_t Matrix::panel_bytes() const {
  const int64_t elements = (k + k % 2) * kPanel;
  switch (storage) {
    case Dtype::F32:
      return elements * 4;
    case Dtype::BF16:
      return elements * 2;
    case Dtype::Q8_0:
      return q8_blocks(k) * static_cast<int64_t>(sizeof(Q8Block));
    case Dtype::I32:  // no weights have this type
      break;
  }
  return 0;
}

void pack(const Matrix& matrix, const void* source, void* packed, int threads) {
  auto work = [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
      pack_panel(matrix, source, p, static_cast<char*>(packed) + p * matrix.panel_bytes());
  };
  std::vector<std::thread> pool;
  const int64_t panels = matrix.panels(), n = std::max<int64_t>(1, std::min<int64_t>(threads, panels / 8));
  for (int64_t t = 1; t < n; ++t) pool.emplace_back(work, panels * t / n, panels * (t + 1) / n);
  work(0, panels / n);
  for (std::thread& t : pool) t.join();
}

WeightSpan weight_span(const Phase& phase, const Tile& tile) {
  const Matrix columns{phase.matrices, kPanel, phase.inner, phase.storage};
  return {tile.col / kPanel * columns.bytes(), panel_count(tile.col, tile.cols) * columns.bytes()};
}

void* allocate(int64_t bytes) {
  constexpr int64_t kHuge = int64_t{2} << 20;
  const int64_t align = bytes < kHuge ? 4096 : kHuge;
  const int64_t size = (std::max<int64_t>(bytes, 1) + align - 1) / align * align;
  void* p = aligned_alloc(align, size);
  if (p == nullptr) throw std::bad_alloc();
#if defined(__linux__)
  if (align == kHuge) madvise(p, size, MADV_HUGEPAGE);
#endif
  memset(p, 0, size);
  return p;
}

}  // namespace mk
