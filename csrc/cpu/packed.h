// Weight matrices in memory, repacked for the kernels.
//
// A matrix [N, K] is divided into panels of kPanel = 16 rows. A panel is stored transposed, so each row of
// the matrix is a column of its panel. The last panel is padded with zeros. If a matmul has several matrices,
// their panels alternate: panel 0 of each matrix, then panel 1 of each, and so on. Each panel has its own
// type, so the rows of a matrix may have different types. A step is one index along K.
//
// float32 and float16 panels are stored as [K][16]. bfloat16 panels are stored as [K / 2][16] 32-bit words,
// each of which contains two successive steps (indices along K) of a column, the first one in the upper half.
// In a quantised panel, quantisation blocks of the 16 columns that begin at the same step are stored
// together: first the scales of all these blocks, then their values, 32 steps at a time. K is padded with
// zeros to a multiple of 32 and of the length of a block.
#pragma once
#include <stdint.h>

#include "../common/isa.h"

namespace mk {

constexpr int kPanel = 16;  // columns of a panel
constexpr int kUnit = 32;   // indices along K (steps) whose weights are read together

struct Panel {
  const char* data;
  int64_t dtype;

  Dtype type() const { return static_cast<Dtype>(dtype); }
  bool quantised() const { return dtype >= static_cast<int64_t>(Dtype::Q8_0); }
};

// Returns the number of panels that contain any of the columns [col, col + cols).
constexpr int panel_count(int col, int cols) { return (col + cols + kPanel - 1) / kPanel - col / kPanel; }

// The integers of one unit of a quantised panel: 32 indices along K (steps) of 16 columns. Kernels expand
// them to code words of 32 bits: word [j][c] has one byte for each of the steps 4j to 4j + 3 of column c. In
// memory, word [j][c] of `low` contains the lowest four bits of all bytes of the code words [2j][c] and [2j +
// 1][c]. `high` contains the remaining bits: if it has n rows of words, its word [j][c] contains those of the
// code words [j][c], [j + n][c], [j + 2n][c] and so on.
template <int kBits>
struct Values {
  uint32_t low[4][kPanel];
  uint32_t high[kBits - 4][kPanel];
};
template <>
struct Values<4> {
  uint32_t low[4][kPanel];
};
template <>
struct Values<8> {
  uint32_t words[8][kPanel];  // signed bytes
};

// The scales, in float16, of the 16 columns of a panel in Q8_0, Q4_0 or Q5_0. A weight is
// scale * (value - zero), where zero is a constant of the type, such as 8 for 4-bit values.
struct Scale {
  static constexpr bool kOffset = false;
  static constexpr int kGroups = 1;

  uint16_t scale[kPanel];
};
// The float16 scales and minima of Q4_1 or Q5_1. A weight is scale * value + minimum.
struct ScaleAndMinimum {
  static constexpr bool kOffset = true;
  static constexpr int kGroups = 1;

  uint16_t scale[kPanel], minimum[kPanel];
};
// The scales of Q4_K or Q5_K. A block consists of eight groups of 32 steps. A weight is
// scale * s * value - minimum * m, where each group has its own 6-bit integers s and m. `six` contains the 12
// bytes into which GGML packs the eight s and eight m of a block.
struct SuperScaleAndMinimum {
  static constexpr bool kOffset = true;
  static constexpr int kGroups = 1;

  uint16_t scale[kPanel], minimum[kPanel];
  uint32_t six[3][kPanel];
};
// The scales of Q6_K. A block consists of 16 groups of 16 steps. A weight is scale * s * (value - zero),
// where zero is 32 and each group has its own 8-bit integer s in `eight`.
struct SuperScale {
  static constexpr bool kOffset = false;
  static constexpr int kGroups = 2;

  uint16_t scale[kPanel];
  int8_t eight[16][kPanel];
};

// Returns the stored integer that stands for a weight of 0 in symmetric types. Integers of 8 bits have signs,
// so it is 0 for them. Types whose weights have an offset have no such integer, so the result is also 0.
constexpr int zero_code(int bits, bool offset) { return offset || bits == 8 ? 0 : 1 << (bits - 1); }

// The quantisation blocks of a panel's 16 columns that begin at the same step along K.
template <class S, int kBits, int kCount>
struct PackedBlock {
  using Scales = S;
  static constexpr int kValueBits = kBits, kUnits = kCount, kSteps = kCount * kUnit;
  static constexpr bool kOffset = S::kOffset;  // whether weights have a minimum
  static constexpr int kGroups = S::kGroups;   // groups of steps in a unit, each with its own scales
  static constexpr int kZero = zero_code(kBits, kOffset);

  Scales scales;
  Values<kBits> values[kCount];
};

using PackedQ8_0 = PackedBlock<Scale, 8, 1>;
using PackedQ4_0 = PackedBlock<Scale, 4, 1>;
using PackedQ4_1 = PackedBlock<ScaleAndMinimum, 4, 1>;
using PackedQ5_0 = PackedBlock<Scale, 5, 1>;
using PackedQ5_1 = PackedBlock<ScaleAndMinimum, 5, 1>;
using PackedQ4_K = PackedBlock<SuperScaleAndMinimum, 4, 8>;
using PackedQ5_K = PackedBlock<SuperScaleAndMinimum, 5, 8>;
using PackedQ6_K = PackedBlock<SuperScale, 6, 8>;

// If `type` is quantised, calls f.template operator()<P>(), where P is the packed form of the type
// (PackedQ8_0 for Q8_0), and returns the result of the call. Otherwise returns `none`.
template <class F, class R>
R with_packed(Dtype type, R none, const F& f) {
  switch (type) {
    case Dtype::Q8_0:
      return f.template operator()<PackedQ8_0>();
    case Dtype::Q4_0:
      return f.template operator()<PackedQ4_0>();
    case Dtype::Q4_1:
      return f.template operator()<PackedQ4_1>();
    case Dtype::Q5_0:
      return f.template operator()<PackedQ5_0>();
    case Dtype::Q5_1:
      return f.template operator()<PackedQ5_1>();
    case Dtype::Q4_K:
      return f.template operator()<PackedQ4_K>();
    case Dtype::Q5_K:
      return f.template operator()<PackedQ5_K>();
    case Dtype::Q6_K:
      return f.template operator()<PackedQ6_K>();
    case Dtype::F32:
    case Dtype::BF16:
    case Dtype::F16:
    case Dtype::I32:  // no weights have this type
      break;
  }
  return none;
}

// Returns the size in bytes of a packed panel: 16 columns of k weights each.
inline int64_t panel_bytes(Dtype type, int64_t k) {
  const int64_t plain = (k + kUnit - 1) / kUnit * kUnit * kPanel * (type == Dtype::F32 ? 4 : 2);
  return with_packed(type, plain, [&]<class P>() {
    return (k + P::kSteps - 1) / P::kSteps * static_cast<int64_t>(sizeof(P));
  });
}

}  // namespace mk
