// Reads a packed panel (16 columns of weights, packed.h) as vectors of float32, one index along K after
// another. A quantised weight is the product of its scales and a stored integer. The product has at most 24
// significant bits, so float32 represents it exactly. In types with a minimum (an offset), the minimum is
// then added, and the sum is rounded once.
#pragma once
#include <type_traits>

#include "packed.h"
#include "simd.h"

namespace mk::MK_SIMD {

// Loads earlier results from `c` into the accumulators `acc`: R rows, ldc floats apart. Each row has P
// groups of V vectors, `apart` floats apart. Without `resume`, sets the accumulators to zero instead.
template <int R, int P, int V>
MK_INLINE void load_block(F32 (&acc)[R][P][V], const float* c, int64_t ldc, int apart, bool resume) {
  MK_UNROLL for (int i = 0; i < R; ++i) {
    MK_UNROLL for (int p = 0; p < P; ++p) {
      MK_UNROLL for (int v = 0; v < V; ++v) acc[i][p][v] =
          resume ? load(c + i * ldc + p * apart + v * kLanes) : F32{};
    }
  }
}

template <int R, int P, int V>
MK_INLINE void store_block(const F32 (&acc)[R][P][V], float* c, int64_t ldc, int apart) {
  MK_UNROLL for (int i = 0; i < R; ++i) {
    MK_UNROLL for (int p = 0; p < P; ++p) {
      MK_UNROLL for (int v = 0; v < V; ++v) store(c + i * ldc + p * apart + v * kLanes, acc[i][p][v]);
    }
  }
}

// How many distant panels a matmul of few rows reads at once, and how many bytes ahead to prefetch.
// Prefetching hides DRAM latency at the ends of 4 KiB pages, where the hardware prefetcher stops. Four
// panels saved a Zen 3 with AVX2 a quarter of the time of 4-bit weights. A Zen 5 with AVX-512 reads bf16
// and 8-bit weights 4 to 7 % faster with two. Portable code is too slow to gain from more than one.
constexpr int kStreams = MK_LANES == 4 ? 1 : 32 / MK_LANES, kPrefetchBytes = 8192 / kStreams;

// Whether weights of type W are multiplied by an instruction that processes two successive indices along K
// (steps) at once.
template <class W>
constexpr bool kInPairs = std::is_same_v<W, Bf16Pairs>;

// Whether matmuls with activations of type T can multiply bfloat16 weights in pairs (kInPairs).
template <class T>
constexpr bool kMayPair = MK_LANES == 16 && std::is_same_v<T, Bf16>;

struct Half {};  // float16

// Whether a matmul always multiplies weights of type W straight from memory. Quantised types and float16 are
// different: if there is more than one row, their weights are first converted to float32 in a small buffer,
// so that the conversion is done once for all rows.
template <class W>
constexpr bool kPlain = std::is_same_v<W, float> || std::is_same_v<W, Bf16> || kInPairs<W>;

constexpr int kRuns = 4, kRunSteps = kUnit / kRuns;

// Reads weights of type W from a panel, in order of k. Call `open` with the first of kUnit indices along
// K. For each of their kRuns runs of kRunSteps indices, call `turn_to`, then read the run's weights.
template <class W>
class Reader;

// Prefetches the data that is kPrefetchBytes after `here`.
template <class T>
MK_INLINE void prefetch(const T& here) {
  const char* const begin = reinterpret_cast<const char*>(&here) + kPrefetchBytes;
  MK_UNROLL for (int line = 0; line < int{sizeof here}; line += 64) __builtin_prefetch(begin + line);
}

// Reads weights of a type that needs no dequantisation and has kBytes bytes per weight.
template <class T, int kBytes>
class PlainReader {
 public:
  MK_INLINE void open(const char* panel, int step) { unit_ = panel + int64_t{step} * kPanel * kBytes; }
  MK_INLINE void turn_to(int run) {
    run_ = unit_ + run * kRunBytes;
    prefetch(*reinterpret_cast<const char (*)[kRunBytes]>(run_));
  }

 protected:
  MK_INLINE const T* at(int s, int v) const {
    return reinterpret_cast<const T*>(run_ + (s * kPanel + v * kLanes) * kBytes);
  }

 private:
  static constexpr int kRunBytes = kRunSteps * kPanel * kBytes;
  const char *unit_, *run_;
};

template <>
class Reader<float> : public PlainReader<float, 4> {
 public:
  MK_INLINE F32 weight(int s, int v) const { return load(at(s, v)); }
};

template <>
class Reader<Half> : public PlainReader<uint16_t, 2> {
 public:
  MK_INLINE F32 weight(int s, int v) const { return load_half(at(s, v)); }
};

template <>
class Reader<Bf16> : public PlainReader<uint32_t, 2> {
 public:
  MK_INLINE F32 weight(int s, int v) const {
    const U32 words = load_words(at(s / 2 * 2, 2 * v));
    return (F32)(s % 2 == 0 ? words & 0xFFFF0000u : words << 16);
  }
};

#if MK_LANES == 16
template <>
class Reader<Bf16Pairs> : public PlainReader<uint32_t, 2> {
 public:
  // Returns the bfloat16 weights of steps 2s and 2s + 1 of the current run for vector v of the columns, two
  // weights in each 32-bit lane.
  MK_INLINE F32 weight(int s, int v) const { return (F32)load_words(at(2 * s, 2 * v)); }
};
#endif

// -- quantised types

// The linear map from a stored value to a weight: scale * value + offset. Symmetric types have no offset.
struct Line {
  F32 scale, offset;
};

// Returns the factors and offsets that convert stored integers to weights, for kLanes columns from column
// `at` on. `unit` selects 32 indices along K within a quantisation block. If the type has a scale per 16
// indices, `half` (0 or 1) selects one half of the 32.
MK_INLINE Line line_of(const Scale& s, int /*unit*/, int /*half*/, int at) {
  return {load_half(s.scale + at), F32{}};
}

MK_INLINE Line line_of(const ScaleAndMinimum& s, int /*unit*/, int /*half*/, int at) {
  return {load_half(s.scale + at), load_half(s.minimum + at)};
}

MK_INLINE Line line_of(const SuperScaleAndMinimum& s, int unit, int /*half*/, int at) {
  const int shift = unit % 4 * 8;
  const U32 first = load_words(s.six[0] + at) >> shift, second = load_words(s.six[1] + at) >> shift;
  U32 scale = first & 63, minimum = second & 63;
  if (unit >= 4) {
    const U32 third = load_words(s.six[2] + at) >> shift;
    scale = (third & 15) | (first >> 2 & 48);
    minimum = (third >> 4 & 15) | (second >> 2 & 48);
  }
  return {load_half(s.scale + at) * __builtin_convertvector((I32)scale, F32),
          load_half(s.minimum + at) * -__builtin_convertvector((I32)minimum, F32)};
}

MK_INLINE Line line_of(const SuperScale& s, int unit, int half, int at) {
  return {load_half(s.scale + at) * load(s.eight[2 * unit + half] + at), F32{}};
}

MK_INLINE Line line_of(const Exponent& s, int /*unit*/, int /*half*/, int at) {
  const U32 exponent = load_bytes(s.exponent + at);
  return {(F32)(((exponent - 1) << 23) & (U32)(exponent > 1)), F32{}};  // half of the scale, unless subnormal
}

// Returns the stored integers of steps 4j to 4j + 3 of a unit (32 steps along K) for kLanes columns from `at`
// on: in each 32-bit lane, four bytes of one column.
template <int kBits>
MK_INLINE U32 code_words(const Values<kBits>& values, uint32_t j, int at) {
  if constexpr (kBits == 8) {
    return load_words(values.words[j] + at);
  } else {
    const U32 low = load_words(values.low[j / 2] + at) >> (j % 2 * 4) & 0x0F0F0F0Fu;
    if constexpr (kBits == 4) {
      return low;
    } else {
      constexpr int kAbove = kBits - 4, kMask = 0x01010101 * ((1 << kAbove) - 1);
      return low | (load_words(values.high[j % kAbove] + at) >> (j / kAbove * kAbove) & kMask) << 4;
    }
  }
}

// Like code_words, for weights of packed type P: 4-bit floats are also made integers (doubled_floats).
template <class P>
MK_INLINE U32 codes(const Values<P::kValueBits>& values, uint32_t j, int at) {
  const U32 words = code_words(values, j, at);
  return P::kFloats ? doubled_floats(words) : words;
}

template <Dtype kDtype, class S, int kBits, int kCount>
class Reader<PackedBlock<kDtype, S, kBits, kCount>> {
  using P = PackedBlock<kDtype, S, kBits, kCount>;

 public:
  MK_INLINE void open(const char* panel, int step) {
    block_ = reinterpret_cast<const P*>(panel) + step / P::kSteps;
    unit_ = step % P::kSteps / kUnit;
    if (unit_ == 0) prefetch(block_->scales);
    set_lines(0);
  }

  MK_INLINE void turn_to(int run) {
    run_ = run;
    if (P::kGroups == 2 && run == kRuns / 2) set_lines(1);
    using Parts = const char[kRuns][sizeof(Values<kBits>) / kRuns];
    prefetch(reinterpret_cast<Parts&>(block_->values[unit_])[run]);
  }

  MK_INLINE F32 weight(int s, int v) const {
    const Line& line = lines_[v];
    const Values<kBits>& values = block_->values[unit_];
    if constexpr (kBits == 4 && !P::kFloats) {
      const U32 value = load_words(values.low[run_] + v * kLanes) >> (s % 4 * 8 + s / 4 * 4) & 15;
      return __builtin_convertvector((I32)value, F32) * line.scale + line.offset;
    } else {
      const U32 word = codes<P>(values, 2 * run_ + s / 4, v * kLanes);
      const int above = 24 - s % 4 * 8;  // bits of the 32-bit word that are above the byte of step s
      if constexpr (kBits == 8) return __builtin_convertvector((I32)(word << above) >> 24, F32) * line.scale;
      const U32 value = above == 0 ? word >> 24 : word >> (24 - above) & 0xFF;
      return __builtin_convertvector((I32)value, F32) * line.scale + line.offset;
    }
  }

 private:
  MK_INLINE void set_lines(int half) {
    MK_UNROLL for (int v = 0; v < kPanelVectors; ++v) {
      Line& line = lines_[v] = line_of(block_->scales, unit_, half, v * kLanes);
      // Symmetric types store each integer with kZero added, so this offset subtracts kZero again. That
      // causes no rounding, because kZero is a power of two: both scale * kZero and the product of a scale
      // and a value are exact.
      if (P::kZero != 0) line.offset = line.scale * -float{P::kZero};
    }
  }

  const P* block_;
  int unit_, run_;
  Line lines_[kPanelVectors];
};

// Calls f.template operator()<W>(), where Reader<W> reads weights of type `type`.
template <class F>
MK_INLINE void with_format(Dtype type, const F& f) {
  switch (type) {
    case Dtype::F32:
      return f.template operator()<float>();
    case Dtype::BF16:
      return f.template operator()<Bf16>();
    case Dtype::F16:
      return f.template operator()<Half>();
    case Dtype::I32:  // no weights have this type
      return;
    default:
      with_packed(type, false, [&]<class P>() {
        f.template operator()<P>();
        return true;
      });
  }
}

// Converts the weights of a panel (kPanel columns) at indices [begin, begin + steps) along K to float32, and
// stores them in `out` as [steps][kPanel]. `begin` and `steps` are multiples of kUnit.
template <class W>
void widen(const Panel& panel, int begin, int steps, float* out) {
  for (int s = 0; s < steps; s += kUnit) {
    Reader<W> reader;
    reader.open(panel.data, begin + s);
    for (int run = 0; run < kRuns; ++run) {
      reader.turn_to(run);
      MK_UNROLL_STEPS for (int i = 0; i < kRunSteps; ++i, out += kPanel) {
        MK_UNROLL for (int v = 0; v < kPanelVectors; ++v) store(out + v * kLanes, reader.weight(i, v));
      }
    }
  }
}

}  // namespace mk::MK_SIMD
