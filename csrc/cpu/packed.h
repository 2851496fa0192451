// Weight matrices in memory, repacked for the kernels.
//
// A matrix [N, K] becomes panels of kPanel columns, which are rows of the matrix; the last panel is padded
// with zeros. Several matrices alternate by panels: panel 0 of each, then panel 1 of each, and so on. Each
// panel has its own type, so the rows of a matrix may have different types. A step is one index along K.
//
// float32 and float16: [K][16]. bfloat16: [K / 2][16]; two successive steps of a column share a 32-bit word,
// with the first one in the upper half. A quantised panel has the blocks of its 16 columns side by side:
// first the scales, then the values of 32 steps at a time. K is padded with zeros to whole units of 32 steps
// and to whole blocks.
#pragma once
#include <stdint.h>

#include "../common/isa.h"

namespace mk {

constexpr int kPanel = 16;  // columns of a panel
constexpr int kUnit = 32;   // steps along K that are read at a time

struct Panel {
  const char* data;
  int64_t dtype;

  Dtype type() const { return static_cast<Dtype>(dtype); }
};

// The number of panels that contain columns [col, col + cols).
constexpr int panel_count(int col, int cols) { return (col + cols + kPanel - 1) / kPanel - col / kPanel; }

// The values of a unit, [32][16], with 5 or 6 bits. Byte i of `low` has the lowest four bits of values i and
// i + 256. `high` has the other bits: of its n bytes, byte i has those of values i, i + n, i + 2n and so on.
template <int kBits>
struct Values {
  uint8_t low[256];
  uint8_t high[(kBits - 4) * 64];
};
// A 32-bit word has the values of a column at 8 steps, with the first step in the lowest bits.
template <>
struct Values<4> {
  uint32_t words[4][kPanel];
};
template <>
struct Values<8> {
  int8_t bytes[kUnit][kPanel];
};

// float16 scales: a weight is scale * (value - zero).
struct Scale {
  uint16_t scale[kPanel];
};
// A weight is scale * value + minimum.
struct ScaleAndMinimum {
  uint16_t scale[kPanel], minimum[kPanel];
};
// A weight is scale * s * value - minimum * m, in a block of eight groups of 32 steps, each with its own s
// and m. `six` has the 12 bytes in which GGML packs eight 6-bit s and eight 6-bit m.
struct SuperScaleAndMinimum {
  uint16_t scale[kPanel], minimum[kPanel];
  uint32_t six[3][kPanel];
};
// A weight is scale * s * (value - zero), in a block of 16 groups of 16 steps, each with its own s in
// `eight`.
struct SuperScale {
  uint16_t scale[kPanel];
  int8_t eight[16][kPanel];
};

// The blocks of all columns of a panel that begin at the same step.
template <class S, int kBits, int kCount>
struct PackedBlock {
  using Scales = S;
  static constexpr int kValueBits = kBits, kUnits = kCount, kSteps = kCount * kUnit;

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

// Calls f.template operator()<PackedX>() for a quantised type; otherwise returns `none`.
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

// The bytes of a panel whose columns have k elements.
inline int64_t panel_bytes(Dtype type, int64_t k) {
  const int64_t plain = (k + kUnit - 1) / kUnit * kUnit * kPanel * (type == Dtype::F32 ? 4 : 2);
  return with_packed(type, plain, [&]<class P>() {
    return (k + P::kSteps - 1) / P::kSteps * static_cast<int64_t>(sizeof(P));
  });
}

}  // namespace mk
