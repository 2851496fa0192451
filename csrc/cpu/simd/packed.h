// Weight matrices in memory, repacked for the kernels.
//
// A matrix [N, K] is divided into panels of kPanel = 16 rows; the last panel is padded with zeros. A panel is
// stored transposed, so a row of the matrix is called a column of the panel, and one index along K is called
// a step. Each panel has its own data type. If a matmul has several matrices, such as gate and up, their
// panels alternate: panel 0 of each, then panel 1 of each, and so on.
//
// float32 and float16 panels are stored as [K][16]. bfloat16 panels are stored as [K / 2][16] 32-bit words. A
// word has two successive steps of a column, the first one in the upper half. A quantised panel is stored
// block by block along K. For each block: first the scales of all 16 columns, then their values, 32 steps at
// a time. K is padded with zeros to a multiple of 32 and of the block length.
#pragma once
#include <stdint.h>

#include <type_traits>

#include "../../common/isa.h"

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

// 16 columns of packed integers, for 32 steps (indices) along K. Kernels unpack them to one byte each:
// 32-bit word [j][c] then has steps 4j to 4j + 3 of column c. In memory, each byte's lowest four bits
// and its other bits are apart. Word [j][c] of `low` has the low bits of unpacked words [2j][c] and
// [2j + 1][c]. If `high` has n rows, its word [j][c] has the other bits of unpacked words [j][c],
// [j + n][c], [j + 2n][c] and so on.
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
// The scales of a Q4_K or Q5_K block, which has eight groups of 32 values. A weight is scale * s * value -
// minimum * m, where s and m are 6-bit integers of the group. `six` has the 12 bytes into which GGML packs
// the s and m of all eight groups.
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

// The scales of MXFP4: a weight is 2^(exponent - 127) times a 4-bit float, which is read as the integer that
// is twice its value.
struct Exponent {
  static constexpr bool kOffset = false;
  static constexpr int kGroups = 1;

  uint8_t exponent[kPanel];
};

// Returns the stored integer that stands for a weight of 0. In symmetric types of fewer than 8 bits, integers
// are unsigned, so it is the middle of their range. In signed 8-bit types it is 0. For types with an offset,
// no integer stands for 0, and the result is 0 as well.
constexpr int zero_code(int bits, bool offset) { return offset || bits == 8 ? 0 : 1 << (bits - 1); }

// For each of a panel's 16 columns, the quantisation block of the same elements along K.
template <Dtype kDtype, class S, int kBits, int kCount>
struct PackedBlock {
  using Scales = S;
  static constexpr Dtype kType = kDtype;
  static constexpr int kValueBits = kBits, kUnits = kCount, kSteps = kCount * kUnit;
  static constexpr bool kOffset = S::kOffset;  // whether weights have a minimum
  static constexpr int kGroups = S::kGroups;   // groups of steps in kUnit steps, each with its own scales
  static constexpr bool kFloats = std::is_same_v<S, Exponent>;  // whether values are 4-bit floats
  static constexpr int kCodeBits = kFloats ? 5 : kBits;         // of values as integers
  static constexpr int kZero = zero_code(kCodeBits, kOffset);

  Scales scales;
  Values<kBits> values[kCount];
};

template <class... kPacked>
struct Types {};
using AllPacked =
    Types<PackedBlock<Dtype::Q8_0, Scale, 8, 1>, PackedBlock<Dtype::Q4_0, Scale, 4, 1>,
          PackedBlock<Dtype::Q4_1, ScaleAndMinimum, 4, 1>, PackedBlock<Dtype::Q5_0, Scale, 5, 1>,
          PackedBlock<Dtype::Q5_1, ScaleAndMinimum, 5, 1>,
          PackedBlock<Dtype::Q4_K, SuperScaleAndMinimum, 4, 8>,
          PackedBlock<Dtype::Q5_K, SuperScaleAndMinimum, 5, 8>, PackedBlock<Dtype::Q6_K, SuperScale, 6, 8>,
          PackedBlock<Dtype::MXFP4, Exponent, 4, 1>>;

// If `type` is quantised, calls f.template operator()<P>(), where P is the packed form of the type, and
// returns the result of the call. Otherwise returns `result`.
template <class F, class R>
R with_packed(Dtype type, R result, const F& f) {
  return [&]<class... P>(Types<P...>) {
    ((type == P::kType && (result = f.template operator()<P>(), true)) || ...);
    return result;
  }(AllPacked{});
}

// Returns the size in bytes of a packed panel: 16 columns of k weights each.
inline int64_t panel_bytes(Dtype type, int64_t k) {
  const int64_t plain = (k + kUnit - 1) / kUnit * kUnit * kPanel * (type == Dtype::F32 ? 4 : 2);
  return with_packed(type, plain, [&]<class P>() {
    return (k + P::kSteps - 1) / P::kSteps * static_cast<int64_t>(sizeof(P));
  });
}

}  // namespace mk
