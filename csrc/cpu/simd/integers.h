// Multiplies quantised weights with activations that have been rounded to integers.
// megakernel/isa/integers.py defines this arithmetic, under the name `q8`.
//
// Products are summed in groups of 32 along K, or of 16 if the weights have a scale per 16. The activations
// are first rounded to integers, with one scale for every 32: the largest to 15 bits, the others to 8. Within
// a group, the sum of products is an exact integer, so the SIMD width cannot change it. That sum is
// multiplied by the scales of the weights and activations, then added to the float32 result with one fused
// multiply-add. Groups are added in ascending order of K.
#pragma once
#include <array>
#include <utility>

#include "formats.h"

namespace mk::MK_SIMD {

// 32 successive activations of a row (a unit), rounded to integers with one scale. Integer s is byte s
// of `words`. In the two words that `places` lists, 128 times the byte in `high` is added to it.
struct Rounded {
  uint32_t words[kUnit / 4];
  uint32_t high[kWideWords];
  int32_t places[kWideWords];
  float scale;
  float sum;          // scale * (halves[0] + halves[1])
  int32_t halves[2];  // sums of the first 16 integers and of the last 16 integers
};

// The maximum numbers of rows, and of panels of unpacked weights, whose results are accumulated in registers
// together. With two panels, each word of activations is loaded once for both.
#if MK_LANES == 16
constexpr int kIntegerRows = 6, kIntegerPanels = 2;
#else
constexpr int kIntegerRows = MK_LANES / 2, kIntegerPanels = 1;
#endif

// Rows of rounded activations are stored in pieces of kChunk indices along K. Rows in a piece are kRowUnits
// units apart, which is not a power of two, so that rows use different cache sets.
constexpr int kRowUnits = kChunk / kUnit + 1;
static_assert(kRowUnits * sizeof(Rounded) <= kRoundedBytes);

// For vector i of a unit (32 activations), returns which word of four activations each lane belongs to.
MK_INLINE I32 word_numbers(int i) { return (lane_index() + i * kLanes) / 4; }

// Chooses the kWideWords words of a unit (32 activations) that have the largest magnitudes. The scale is
// the smallest with which the other words fit 8 bits; until the sum is known, `sum` holds its inverse.
// If a value is not finite, the scale is NaN. If all magnitudes are below 2^-100, the scale is zero.
MK_INLINE void choose_words(const float* x, Rounded* out) {
  constexpr int kVectors = kUnit / kLanes;
  // The lowest four bits of each magnitude become 15 - (number of the word). The highest magnitude then says
  // which word it belongs to. The magnitudes of words that have been chosen become zero.
  U32 keys[kVectors];
  MK_UNROLL for (int i = 0; i < kVectors; ++i) keys[i] =
      ((U32)load(x + i * kLanes) & 0x7FFFFFF0u) | (U32)(15 - word_numbers(i));
  const auto highest_key = [&] {
    U32 most = keys[0];
    MK_UNROLL for (int i = 1; i < kVectors; ++i) most = keys[i] > most ? keys[i] : most;
    return highest(most);
  };
  uint32_t key = highest_key();
  const float largest = bits_to_float(key | 15);
  MK_UNROLL for (int e = 0; e < kWideWords; ++e) {
    out->places[e] = 15 - (key & 15);
    MK_UNROLL for (int i = 0; i < kVectors; ++i) keys[i] &= (U32)((keys[i] & 15) != (key & 15));
    key = highest_key();
  }
  const float others = bits_to_float(key | 15), least = largest * (1.0f / (1 << kHighShift));
  const float limit = others > least ? others : least;
  const bool finite = largest < __builtin_inff(), some = finite && largest >= 0x1p-100f;
  out->scale = some ? limit / 127.0f : finite ? 0.0f : __builtin_nanf("");
  out->sum = some ? 127.0f / limit : 0.0f;
}

// Rounds a unit to integers. Needs the scale and the wide words that choose_words has chosen.
MK_INLINE void round_unit(const float* x, Rounded* out) {
  constexpr int kVectors = kUnit / kLanes;
  const bool finite = out->scale == out->scale;
  I32 low[kVectors], high[kVectors], sums[2] = {};
  MK_UNROLL for (int i = 0; i < kVectors; ++i) {
    constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it to a float rounds the float to an integer
    const F32 shifted = (finite ? load(x + i * kLanes) : F32{}) * out->sum + kMagic;
    const I32 rounded = (I32)shifted - (I32)splat(kMagic);
    I32 wide{};
    MK_UNROLL for (int e = 0; e < kWideWords; ++e) wide |= word_numbers(i) == out->places[e];
    sums[i * 2 / kVectors] += rounded;
    high[i] = (rounded + 64) >> kHighShift & wide;
    low[i] = rounded - (high[i] << kHighShift);
  }
  store_low_bytes(low, out->words);
  uint32_t high_words[kUnit / 4];
  store_low_bytes(high, high_words);
  MK_UNROLL for (int e = 0; e < kWideWords; ++e) out->high[e] = high_words[out->places[e]];
  out->halves[0] = total(sums[0]);
  out->halves[1] = total(sums[1]);
  out->sum = out->scale * static_cast<float>(out->halves[0] + out->halves[1]);
}

// Rounds `units` units of 32 activations to integers. Two loops are faster than one, because the
// processor then works on more units at a time.
inline void round_row(const float* x, int units, Rounded* out) {
  for (int u = 0; u < units; ++u) choose_words(x + u * kUnit, out + u);
  for (int u = 0; u < units; ++u) round_unit(x + u * kUnit, out + u);
}

// The properties of a quantised type that the integer multiplication depends on. Types that differ only in
// how their scales are stored have equal properties, so they share the same compiled code.
template <int kValueBits, int kGroupCount, bool kHasOffset>
struct Kind {
  static constexpr int kBits = kValueBits, kGroups = kGroupCount;
  static constexpr bool kOffset = kHasOffset;
  static constexpr int kZero = zero_code(kBits, kOffset);
};
template <class P>
using KindOf = Kind<P::kCodeBits, P::kGroups, P::kOffset>;

// Reads a unit of packed weights (32 steps along K of a panel) straight from memory.
template <class P>
class PackedUnit {
 public:
  using K = KindOf<P>;
  static constexpr bool kUnpacked = false;

  MK_INLINE void open(const char* panel, int step) {
    block_ = reinterpret_cast<const P*>(panel) + step / P::kSteps;
    unit_ = step % P::kSteps / kUnit;
    prefetch(block_->values[unit_]);
    if (unit_ == 0) prefetch(block_->scales);
  }
  MK_INLINE U32 words(uint32_t j, int v) const { return codes<P>(block_->values[unit_], j, v * kLanes); }
  MK_INLINE Line line(int group, int v) const { return line_of(block_->scales, unit_, group, v * kLanes); }

 private:
  const P* block_;
  int unit_;
};

// A unit of weights, 32 steps along K of a panel, that has been unpacked to bytes, to be used for many rows.
template <class KindOfWeights>
struct Unpacked {
  using K = KindOfWeights;
  uint32_t codes[kUnit / 4][kPanel];
  float scale[K::kGroups][kPanel], offset[K::kOffset][kPanel];
};

// Reads a unit of weights that `unpack_units` has unpacked, with the interface of PackedUnit.
template <class KindOfWeights>
class UnpackedUnit {
 public:
  using K = KindOfWeights;
  static constexpr bool kUnpacked = true;
  MK_INLINE void open(const char* units, int step) {
    unit_ = reinterpret_cast<const Unpacked<K>*>(units) + step / kUnit;
  }
  MK_INLINE U32 words(uint32_t j, int v) const { return load_words(unit_->codes[j] + v * kLanes); }
  MK_INLINE Line line(int group, int v) const {
    return {load(unit_->scale[group] + v * kLanes), K::kOffset ? load(unit_->offset[0] + v * kLanes) : F32{}};
  }

 private:
  const Unpacked<K>* unit_;
};

template <class P>
void unpack_units(const char* panel, int begin, int steps, void* out) {
  auto* to = static_cast<Unpacked<KindOf<P>>*>(out);
  for (int s = 0; s < steps; s += kUnit, ++to) {
    PackedUnit<P> unit;
    unit.open(panel, begin + s);
    MK_UNROLL for (int v = 0; v < kPanelVectors; ++v) {
      MK_UNROLL_STEPS for (int j = 0; j < kUnit / 4; ++j) {
        const U32 words = unit.words(j, v);
        memcpy(to->codes[j] + v * kLanes, &words, sizeof words);
      }
      MK_UNROLL for (int g = 0; g < P::kGroups; ++g) {
        const Line line = unit.line(g, v);
        store(to->scale[g] + v * kLanes, line.scale);
        if constexpr (P::kOffset) store(to->offset[0] + v * kLanes, line.offset);
      }
    }
  }
}

// Computes C = A W^T in integers, over [begin, begin + steps) along K. `a` has R rows of rounded activations,
// in pieces of kChunk indices that are chunk_stride units apart. W is P panels of weights: panels[0],
// panels[apart], panels[2 * apart] and so on. The other arguments are those of `micro` in gemm.h.
template <int R, int P, class Unit>
void multiply_units(const Rounded* a, int64_t chunk_stride, const Panel* panels, int apart, int begin,
                    int steps, float* c, int64_t ldc, bool resume) {
  using K = typename Unit::K;
  F32 acc[R][P][kPanelVectors];
  const char* data[P];
  MK_UNROLL for (int p = 0; p < P; ++p) data[p] = panels[p * apart].data;
  load_block(acc, c, ldc, apart * kPanel, resume);
  for (int done = 0; done < steps; a += chunk_stride) {
    const int end = lower_of(done + kChunk, steps);
    for (const Rounded* x = a; done < end; done += kUnit, ++x) {
      const auto row = [&](int i) -> const Rounded& { return x[i * kRowUnits]; };
      constexpr int kWords = kUnit / 4 / K::kGroups;
      // Unpacked panels are multiplied together, word by word, so that a word of activations is loaded
      // once for all. Packed panels are multiplied in turn, which keeps fewer values in registers.
      constexpr int kTogether = Unit::kUnpacked ? P : 1;
      MK_UNROLL for (int first = 0; first < P; first += kTogether) {
        Unit units[kTogether];
        MK_UNROLL for (int p = 0; p < kTogether; ++p) units[p].open(data[first + p], begin + done);
        MK_UNROLL for (int g = 0; g < K::kGroups; ++g) {
          ByteSums<K::kBits> sums[R][kTogether][kPanelVectors];
          MK_UNROLL for (int i = 0; i < R; ++i) {
            MK_UNROLL for (int e = 0; e < kWideWords; ++e) {
              const int j = row(i).places[e];
              const uint32_t high = K::kGroups == 1 || j / kWords == g ? row(i).high[e] : 0;
              MK_UNROLL for (int p = 0; p < kTogether; ++p) {
                MK_UNROLL for (int v = 0; v < kPanelVectors; ++v) sums[i][p][v].add_high(
                    e, units[p].words(j, v), high);
              }
            }
            if (kTogether > 1) asm volatile("" ::: "memory");
          }
          MK_UNROLL_STEPS for (int j = 0; j < kWords; ++j) {
            MK_UNROLL for (int p = 0; p < kTogether; ++p) {
              MK_UNROLL for (int v = 0; v < kPanelVectors; ++v) {
                const U32 words = units[p].words(g * kWords + j, v);
                MK_UNROLL for (int i = 0; i < R; ++i) sums[i][p][v].add(j, words,
                                                                        row(i).words[g * kWords + j]);
              }
            }
            // Otherwise GCC loads the words of all panels first, and has to spill them.
            if (kTogether > 1) asm volatile("" ::: "memory");
          }
          MK_UNROLL for (int p = 0; p < kTogether; ++p) {
            MK_UNROLL for (int v = 0; v < kPanelVectors; ++v) {
              const Line line = units[p].line(g, v);
              MK_UNROLL for (int i = 0; i < R; ++i) {
                const int32_t total =
                    K::kGroups == 2 ? row(i).halves[g] : row(i).halves[0] + row(i).halves[1];
                const F32 products = __builtin_convertvector(sums[i][p][v].value(K::kZero, total), F32);
                F32& sum = acc[i][first + p][v];
                sum = sum + products * (line.scale * row(i).scale);
                if constexpr (K::kOffset) sum = sum + line.offset * row(i).sum;
              }
            }
          }
        }
      }
    }
  }
  store_block(acc, c, ldc, apart * kPanel);
}

using MultiplyUnits = void (*)(const Rounded*, int64_t, const Panel*, int, int, int, float*, int64_t, bool);

// The fewest rows of a block, the rows that one multiply_units call computes. More than
// kDirectIntegerRows rows are divided evenly into as few blocks as possible.
constexpr int kLeastRows = kIntegerRows / 2;

// Returns a table whose element n is multiply_units for kLeastRows + n rows and kIntegerPanels panels of
// unpacked weights.
template <class K, int... kMore>
constexpr std::array<MultiplyUnits, sizeof...(kMore)> multiply_units_of(
    std::integer_sequence<int, kMore...>) {
  return {multiply_units<kLeastRows + kMore, kIntegerPanels, UnpackedUnit<K>>...};
}
template <class K>
constexpr auto kMultiplyUnits =
    multiply_units_of<K>(std::make_integer_sequence<int, kIntegerRows - kLeastRows + 1>{});

// For at most kDirectIntegerRows rows, weights are unpacked in registers, for kDirectBlock rows at a
// time. This saves storing and loading them. For more rows, unpacking for each block takes longer.
constexpr int kDirectBlock = MK_LANES == 16 ? 4 : 2, kDirectIntegerRows = MK_LANES == 16 ? 8 : 2;

// Computes c = x W^T for `rows` rows that have been rounded to integers and `count` panels of weights,
// over [begin, begin + steps) along K. With `resume`, adds to c instead. If the weights are not unpacked in
// registers, they are unpacked once into the buffer `unpacked`.
template <class P>
void multiply_rounded(const Rounded* x, int64_t chunk_stride, int rows, const Panel* panels, int count,
                      int begin, int steps, void* unpacked, float* c, int64_t ldc, bool resume) {
  if (rows <= kDirectIntegerRows) {
    const int apart = count / kStreams;
    for (int i = 0; i < apart; ++i) {
      for (int r = 0, n; r < rows; r += n) {
        n = rows - r >= kDirectBlock ? kDirectBlock : lower_of(rows - r, 2);
        const MultiplyUnits streams = n == 1   ? multiply_units<1, kStreams, PackedUnit<P>>
                                      : n == 2 ? multiply_units<2, kStreams, PackedUnit<P>>
                                               : multiply_units<kDirectBlock, kStreams, PackedUnit<P>>;
        streams(x + r * kRowUnits, chunk_stride, panels + i, apart, begin, steps, c + r * ldc + i * kPanel,
                ldc, resume);
      }
    }
    for (int r = 0; r < rows; ++r) {
      for (int i = apart * kStreams; i < count; ++i)
        multiply_units<1, 1, PackedUnit<P>>(x + r * kRowUnits, chunk_stride, panels + i, 0, begin, steps,
                                            c + r * ldc + i * kPanel, ldc, resume);
    }
    return;
  }
  using K = KindOf<P>;
  constexpr int kBytes = kChunk / kUnit * sizeof(Unpacked<K>);  // of one panel's chunk
  static_assert(kIntegerPanels * kBytes <= kWidePanels * kWideStride * sizeof(float));
  for (int p = 0; p < count; p += kIntegerPanels) {
    const int panels_here = lower_of(count - p, kIntegerPanels);
    const int apart = panels_here - 1;  // if one panel is left, it is computed twice, with the same results
    const Rounded* chunk = x;
    for (int done = 0, part; done < steps; done += part, chunk += chunk_stride) {
      part = lower_of(steps - done, kChunk);
      Panel cached[kIntegerPanels];
      for (int q = 0; q < panels_here; ++q) {
        char* const to = static_cast<char*>(unpacked) + q * kBytes;
        unpack_units<P>(panels[p + q].data, begin + done, part, to);
        cached[q] = {to, panels->dtype};
      }
      for (int i = 0, n; i < rows; i += n) {
        n = ceil_div(rows - i, ceil_div(rows - i, kIntegerRows));
        kMultiplyUnits<K>[n - kLeastRows](chunk + i* kRowUnits, chunk_stride, cached, apart, 0, part,
                                          c + i* ldc + p* kPanel, ldc, resume || done > 0);
      }
    }
  }
}

}  // namespace mk::MK_SIMD
