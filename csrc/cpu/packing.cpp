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

// -- The blocks in which GGML stores the rows of quantised types. `scales` copies a block's scales to column
// c of a panel's scales, and `values` expands its values to one byte each.

template <class P>
struct RowBlock;

void unpack_nibbles(const uint8_t* bytes, uint8_t* values) {
  for (int i = 0; i < 16; ++i) {
    values[i] = bytes[i] & 15;
    values[i + 16] = bytes[i] >> 4;
  }
}

void add_fifth_bits(const uint8_t (&bits)[4], uint8_t* values) {
  uint32_t word;
  memcpy(&word, bits, sizeof word);
  for (int i = 0; i < 32; ++i) values[i] |= (word >> i & 1) << 4;
}

struct OneScale {
  uint16_t scale;

  void scales(Scale& out, int c) const { out.scale[c] = scale; }
};

struct ScaleWithMinimum {
  uint16_t scale, minimum;

  void scales(ScaleAndMinimum& out, int c) const {
    out.scale[c] = scale;
    out.minimum[c] = minimum;
  }
};

template <class Scales>
struct FourBits : Scales {
  uint8_t nibbles[16];

  void values(uint8_t* out) const { unpack_nibbles(nibbles, out); }
};

template <class Scales>
struct FiveBits : Scales {
  uint8_t high[4], nibbles[16];

  void values(uint8_t* out) const {
    unpack_nibbles(nibbles, out);
    add_fifth_bits(high, out);
  }
};

template <>
struct RowBlock<PackedQ8_0> : OneScale {
  int8_t bytes[32];

  void values(uint8_t* out) const { memcpy(out, bytes, sizeof bytes); }
};

template <>
struct RowBlock<PackedQ4_0> : FourBits<OneScale> {};

template <>
struct RowBlock<PackedQ4_1> : FourBits<ScaleWithMinimum> {};

template <>
struct RowBlock<PackedQ5_0> : FiveBits<OneScale> {};

template <>
struct RowBlock<PackedQ5_1> : FiveBits<ScaleWithMinimum> {};

struct SuperBlock {
  uint16_t scale, minimum;
  uint8_t six[12];

  void scales(SuperScaleAndMinimum& out, int c) const {
    out.scale[c] = scale;
    out.minimum[c] = minimum;
    for (int i = 0; i < 3; ++i) memcpy(&out.six[i][c], six + 4 * i, 4);
  }
};

// Expands 256 4-bit values to one byte each. For every 64 values, GGML stores the first 32 in the low halves
// of 32 bytes, and the other 32 in the high halves of the same bytes.
void unpack_runs(const uint8_t* nibbles, uint8_t* values) {
  for (int i = 0; i < 256; ++i) values[i] = nibbles[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
}

template <>
struct RowBlock<PackedQ4_K> : SuperBlock {
  uint8_t nibbles[128];

  void values(uint8_t* out) const { unpack_runs(nibbles, out); }
};

template <>
struct RowBlock<PackedQ5_K> : SuperBlock {
  uint8_t high[32], nibbles[128];

  void values(uint8_t* out) const {
    unpack_runs(nibbles, out);
    for (int i = 0; i < 256; ++i) out[i] |= (high[i % 32] >> (i / 32) & 1) << 4;
  }
};

template <>
struct RowBlock<PackedQ6_K> {
  uint8_t low[128], high[64];
  int8_t eight[16];
  uint8_t scale[2];

  void scales(SuperScale& out, int c) const {
    memcpy(&out.scale[c], scale, 2);
    for (int i = 0; i < 16; ++i) out.eight[i][c] = eight[i];
  }
  void values(uint8_t* out) const {
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 128; ++i) {
        const int nibble = low[half * 64 + i % 64] >> (i / 64 * 4) & 15;
        const int pair = high[half * 32 + i % 32] >> (i / 32 * 2) & 3;
        out[half * 128 + i] = static_cast<uint8_t>(nibble | pair << 4);
      }
    }
  }
};

template <>
struct RowBlock<PackedMXFP4> {
  uint8_t exponent, nibbles[16];

  void scales(Exponent& out, int c) const { out.exponent[c] = exponent; }
  void values(uint8_t* out) const { unpack_nibbles(nibbles, out); }
};

// Stores 32 successive values of one row in column c of a unit (32 steps along K) of a panel.
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
  const int64_t blocks = (columns.k + P::kSteps - 1) / P::kSteps;
  P* out = reinterpret_cast<P*>(packed);
  uint8_t values[P::kSteps];
  for (int c = 0; c < columns.count; ++c) {
    for (int64_t b = 0; b < blocks; ++b) {
      RowBlock<P> block;
      memcpy(static_cast<void*>(&block), columns.rows + (c * blocks + b) * int64_t{sizeof block},
             sizeof block);
      block.scales(out[b].scales, c);
      block.values(values);
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
  return with_packed(type, k * (type == Dtype::F32 ? 4 : 2), [&]<class P>() {
    return (k + P::kSteps - 1) / P::kSteps * static_cast<int64_t>(sizeof(RowBlock<P>));
  });
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
  constexpr int64_t kAlign = 64;
  const int64_t panels = matrix.stacked * matrix.panels();
  const int64_t n = std::max<int64_t>(1, std::min<int64_t>(threads, panels / 8));
  std::vector<std::thread> pool;
  pool.reserve(n);
  std::vector<Columns> columns;
  std::vector<int64_t> begin{0};
  for (int64_t p = 0; p < panels; ++p) {
    columns.push_back(columns_of(matrix, p));
    begin.push_back(begin.back() + (panel_bytes(columns[p].type, matrix.k) + kAlign - 1) / kAlign * kAlign);
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
