#include "packing.h"

#include <string.h>

#include <algorithm>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace mk {
namespace {

// `count` rows of k elements of a weight matrix, which become the columns of one panel. The rows need no
// alignment in memory.
struct Columns {
  Dtype type;
  const char* rows;
  int64_t count, k;
};

constexpr BlockLayout layout(Dtype type) { return kBlockLayouts[static_cast<int32_t>(type)]; }

// Packs weights that are not quantised. kPair successive elements of a column are stored side by side, in
// reverse order. So the first of two bfloat16 elements becomes the upper half of a 32-bit word.
template <class T, int kPair>
void pack_plain(const Columns& columns, char* packed) {
  const int64_t k = columns.k;
  for (int64_t first = 0; first < k; first += kPair) {
    T* line = reinterpret_cast<T*>(packed) + first * kPanel;
    const int64_t pair = std::min<int64_t>(kPair, k - first);
    for (int64_t c = 0; c < columns.count; ++c) {
      const char* steps = columns.rows + (c * k + first) * int64_t{sizeof(T)};
      for (int64_t i = 0; i < pair; ++i)
        memcpy(line + c * kPair + kPair - 1 - i, steps + i * int64_t{sizeof(T)}, sizeof(T));
    }
  }
}

void copy_scales(const char* block, int c, Scale& out) { memcpy(&out.scale[c], block, 2); }

void copy_scales(const char* block, int c, ScaleAndMinimum& out) {
  memcpy(&out.scale[c], block, 2);
  memcpy(&out.minimum[c], block + 2, 2);
}

void copy_scales(const char* block, int c, SuperScaleAndMinimum& out) {
  memcpy(&out.scale[c], block, 2);
  memcpy(&out.minimum[c], block + 2, 2);
  for (int i = 0; i < 3; ++i) memcpy(&out.six[i][c], block + 4 + 4 * i, 4);
}

void copy_scales(const char* block, int c, SuperScale& out) {
  memcpy(&out.scale[c], block + 208, 2);
  for (int i = 0; i < 16; ++i) out.eight[i][c] = block[192 + i];
}

void copy_scales(const char* block, int c, Exponent& out) { memcpy(&out.exponent[c], block, 1); }

// Unpacks one bit field of each value of a quantised GGML block: shifts it left by `shift` and ORs it
// into `values`. The fields have kWidth bits, and begin at byte kOffset of the block. The lowest bits of
// kRun bytes belong to kRun successive values, and their next higher bits to the next kRun values.
template <int kOffset, int kWidth, int kRun, size_t kCount>
void add_fields(const char* block, int shift, uint8_t (&values)[kCount]) {
  if constexpr (kWidth > 0) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(block) + kOffset;
    for (uint8_t* run = values; run < values + kCount; bytes += kRun) {
      for (int bit = 0; bit < 8; bit += kWidth, run += kRun)
        for (int i = 0; i < kRun; ++i) run[i] |= (bytes[i] >> bit & ((1 << kWidth) - 1)) << shift;
    }
  }
}

// Packs 32 successive values of a weight row as column c of `out`, which has 16 such columns.
template <int kBits>
void store_values(const uint8_t* values, int c, Values<kBits>& out) {
  for (int j = 0; j < kUnit / 4; ++j) {
    uint32_t word;
    memcpy(&word, values + 4 * j, sizeof word);
    if constexpr (kBits == 8) {
      out.words[j][c] = word;
    } else {
      out.low[j / 2][c] |= (word & 0x0F0F0F0F) << (j % 2 * 4);
      if constexpr (kBits > 4) {
        constexpr int kAbove = kBits - 4;
        out.high[j % kAbove][c] |= (word >> 4 & 0x0F0F0F0F) << (j / kAbove * kAbove);
      }
    }
  }
}

template <class P>
void pack_blocks(const Columns& columns, char* packed) {
  constexpr BlockLayout kLayout = layout(P::kType);
  const int64_t blocks = (columns.k + P::kSteps - 1) / P::kSteps;
  P* out = reinterpret_cast<P*>(packed);
  for (int c = 0; c < columns.count; ++c) {
    for (int64_t b = 0; b < blocks; ++b) {
      const char* block = columns.rows + (c * blocks + b) * kLayout.bytes;
      uint8_t values[P::kSteps] = {};
      add_fields<kLayout.low.offset, kLayout.low.width, kLayout.low.run>(block, 0, values);
      add_fields<kLayout.high.offset, kLayout.high.width, kLayout.high.run>(block, kLayout.low.width, values);
      copy_scales(block, c, out[b].scales);
      for (int i = 0; i < P::kUnits; ++i)
        store_values<P::kValueBits>(values + i * kUnit, c, out[b].values[i]);
    }
  }
}

void pack_panel(const Columns& columns, char* packed) {
  const bool blocks = with_packed(columns.type, false, [&]<class P>() {
    pack_blocks<P>(columns, packed);
    return true;
  });
  if (blocks) return;
  if (columns.type == Dtype::F32)
    pack_plain<uint32_t, 1>(columns, packed);
  else if (columns.type == Dtype::F16)
    pack_plain<uint16_t, 1>(columns, packed);
  else
    pack_plain<uint16_t, 2>(columns, packed);
}

int64_t row_bytes(Dtype type, int64_t k) {
  return with_packed(type, k * (type == Dtype::F32 ? 4 : 2),
                     [&]<class P>() { return (k + P::kSteps - 1) / P::kSteps * layout(P::kType).bytes; });
}

// Returns the rows that become the columns of panel number `index`.
Columns columns_of(const Matrix& m, int64_t index) {
  const int64_t expert = index / m.panels(), own = index % m.panels(), first = own / m.matrices * kPanel;
  int64_t row = (expert * m.matrices + own % m.matrices) * m.rows + first;
  const Part* part = m.parts;
  for (; row >= part->rows; ++part) row -= part->rows;
  const Dtype type = static_cast<Dtype>(part->dtype);
  return {type, static_cast<const char*>(part->data) + row * row_bytes(type, m.k),
          std::min<int64_t>(kPanel, m.rows - first), m.k};
}

}  // namespace

Packed pack(const Matrix& matrix, const Packed& old, Arena& arena, int threads) {
  const int64_t panels = matrix.stacked * matrix.panels();
  const int64_t n = std::max<int64_t>(1, std::min<int64_t>(threads, panels / 8));
  std::vector<std::thread> pool;
  pool.reserve(n);
  std::vector<Columns> columns;
  std::vector<int64_t> begin{0};
  for (int64_t p = 0; p < panels; ++p) {
    columns.push_back(columns_of(matrix, p));
    begin.push_back(begin.back() + rounded_up(panel_bytes(columns[p].type, matrix.k), Arena::kAlign));
  }
  const bool fits = old.data != nullptr && old.bytes == begin.back();
  const Packed out = fits ? old
                          : Packed{arena.allocate(panels * static_cast<int64_t>(sizeof(Panel))),
                                   arena.allocate(begin.back()), begin.back()};
  if (fits) memset(out.data, 0, out.bytes);
  auto work = [&](int64_t first, int64_t end) {
    for (int64_t p = first; p < end; ++p) {
      char* data = static_cast<char*>(out.data) + begin[p];
      static_cast<Panel*>(out.table)[p] = {data, static_cast<int64_t>(columns[p].type)};
      pack_panel(columns[p], data);
    }
  };
  int64_t t = 1;
  try {
    for (; t < n; ++t) pool.emplace_back(work, panels * t / n, panels * (t + 1) / n);
  } catch (const std::exception&) {  // the system allows no further thread: the calling thread does the rest
  }
  work(0, panels / n);
  work(panels * t / n, panels);
  for (std::thread& thread : pool) thread.join();
  return out;
}

WeightSpan weight_span(const Phase& phase, const Tile& tile, const Panel* table) {
  const Panel* first = table + tile.col / kPanel * phase.matrices;
  const Panel* last = first + panel_count(tile.col, tile.cols) * phase.matrices - 1;
  return {first->data, last->data + panel_bytes(last->type(), phase.inner) - first->data};
}

}  // namespace mk
