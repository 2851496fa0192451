// SIMD vectors of MK_LANES floats, written with the compiler's vector extension so that one source serves
// every processor. This file is compiled once per instruction set. The namespace MK_SIMD differs each time,
// so that the linker does not merge the resulting functions.
#pragma once
#include <string.h>

#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "kernels.h"

#if defined(__clang__)
#define MK_UNROLL _Pragma("unroll")
#else
#define MK_UNROLL _Pragma("GCC unroll 16")
#endif
// For loops over steps along K. Portable code for x86 keeps these loops, because then it compiles in three
// quarters of the time.
#if MK_LANES == 4 && defined(__SSE2__)
#define MK_UNROLL_STEPS
#else
#define MK_UNROLL_STEPS MK_UNROLL
#endif

namespace mk::MK_SIMD {

constexpr int kLanes = MK_LANES;
constexpr int kPanelVectors = kPanel / kLanes;

typedef float F32 __attribute__((vector_size(4 * MK_LANES)));
typedef int32_t I32 __attribute__((vector_size(4 * MK_LANES)));
typedef uint32_t U32 __attribute__((vector_size(4 * MK_LANES)));
typedef uint16_t U16 __attribute__((vector_size(2 * MK_LANES)));
typedef int8_t I8 __attribute__((vector_size(MK_LANES)));

// Returns a vector with x in every lane. With AVX-512, x may be any four bytes, such as a pair of bfloat16
// values: the bytes are broadcast unchanged.
MK_INLINE F32 splat(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#else
  return x - F32{};
#endif
}

MK_INLINE F32 load(const float* p) {
  F32 v;
  memcpy(&v, p, sizeof v);
  return v;
}

// Widens 16-bit lanes to 32 bits. Intrinsics are used because GCC compiles __builtin_convertvector to several
// instructions here instead of the single one that AVX has. The AVX-512 intrinsic is the masked form, because
// GCC warns about the unmasked one's header.
MK_INLINE U32 widen(U16 v) {
#if defined(__AVX512F__)
  return (U32)_mm512_maskz_cvtepu16_epi32(0xFFFF, (__m256i)v);
#elif defined(__AVX2__)
  return (U32)_mm256_cvtepu16_epi32((__m128i)v);
#else
  return __builtin_convertvector(v, U32);
#endif
}

MK_INLINE F32 load(const Bf16* p) {
  U16 v;
  memcpy(&v, p, sizeof v);
  return (F32)(widen(v) << 16);
}

MK_INLINE F32 load(const int8_t* p) {
  I8 v;
  memcpy(&v, p, sizeof v);
#if defined(__AVX512F__)
  return _mm512_maskz_cvtepi32_ps(0xFFFF, _mm512_maskz_cvtepi8_epi32(0xFFFF, (__m128i)v));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(__m128i{(long long)v, 0}));
#else
  return __builtin_convertvector(__builtin_convertvector(v, I32), F32);
#endif
}

MK_INLINE U32 load_bytes(const uint8_t* p) {
  typedef uint8_t U8 __attribute__((vector_size(MK_LANES)));
  U8 v;
  memcpy(&v, p, sizeof v);
#if defined(__AVX512F__)
  return (U32)_mm512_maskz_cvtepu8_epi32(0xFFFF, (__m128i)v);
#elif defined(__AVX2__)
  return (U32)_mm256_cvtepu8_epi32(__m128i{(long long)v, 0});
#else
  return __builtin_convertvector(v, U32);
#endif
}

MK_INLINE void store(float* p, F32 v) { memcpy(p, &v, sizeof v); }

// Rounds to bfloat16, to nearest, ties to even. Every NaN becomes the same quiet NaN.
MK_INLINE U32 bf16_bits(F32 v) {
  const U32 bits = (U32)v;
  const U32 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const U32 nan = (U32)(v != v);
  return (rounded & ~nan) | (nan & 0x7FC0);
}

// Stores every two neighbouring lanes, whose values must already be rounded to bfloat16, as one 32-bit word,
// with the first lane in the upper half.
MK_INLINE void store_pairs(uint32_t* p, F32 v) {
  typedef uint64_t U64 __attribute__((vector_size(4 * MK_LANES)));
  typedef uint32_t Half __attribute__((vector_size(2 * MK_LANES)));
  const U64 both = (U64)v;
  const Half words = __builtin_convertvector((both & 0xFFFF0000u) | both >> 48, Half);
  memcpy(p, &words, sizeof words);
}

MK_INLINE void store(Bf16* p, F32 v) {
  const U16 half = __builtin_convertvector(bf16_bits(v), U16);
  memcpy(p, &half, sizeof half);
}

// Returns the value that v has after being stored and loaded as the type of the last parameter.
MK_INLINE F32 rounded(F32 v, float) { return v; }

MK_INLINE F32 rounded(F32 v, Bf16) { return (F32)(bf16_bits(v) << 16); }

// Holds n of kLanes elements, followed by zeros. The function `part` loads them. It does not read memory
// after the n elements, because another thread may be storing to it.
template <class T>
struct Part {
  T lanes[kLanes];
};

template <class T>
MK_INLINE Part<T> part(const T* p, int n) {
  Part<T> to{};
#if defined(__AVX512F__)
  const uint32_t mask = (1u << n) - 1;
  if constexpr (sizeof(T) == 4) {
    const __m512i v = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(mask), p);
    memcpy(&to, &v, sizeof v);
  } else if constexpr (sizeof(T) == 2) {
    const __m256i v = _mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask), p);
    memcpy(&to, &v, sizeof v);
  } else {
    const __m128i v = _mm_maskz_loadu_epi8(static_cast<__mmask16>(mask), p);
    memcpy(&to, &v, sizeof v);
  }
#else
  T* end = to.lanes;
  MK_UNROLL for (int width = kLanes / 2; width; width /= 2) {
    if (n & width) {
      memcpy(end, p, width * sizeof(T));
      end += width;
      p += width;
    }
  }
#endif
  return to;
}

// For the last, incomplete vector of a row: loads or stores only the first n lanes. A load sets the other
// lanes to zero, and a store leaves their memory unchanged. All other code treats this vector like a full
// one, so a value's bits do not depend on where a tile ends.
template <class T>
MK_INLINE F32 load(const T* p, int n) {
  return n >= kLanes ? load(p) : load(part(p, n).lanes);
}

template <class T>
MK_INLINE void store(T* p, F32 v, int n) {
  if (n >= kLanes) return store(p, v);
  T part[kLanes];
  store(part, v);
  for (int i = 0; i < n; ++i) p[i] = part[i];
}

MK_INLINE F32 select(I32 mask, F32 yes, F32 no) { return mask ? yes : no; }

// Loads a vector of words that starts `skip` bytes after p.
MK_INLINE U32 load_words(const uint32_t* p, int skip = 0) {
  U32 v;
  memcpy(&v, reinterpret_cast<const char*>(p) + skip, sizeof v);
  return v;
}

// Loads float16 values and converts them to float32, which is exact.
MK_INLINE F32 load_half(const uint16_t* p) {
  U16 v;
  memcpy(&v, p, sizeof v);
#if defined(__AVX512F__)
  return (F32)_mm512_maskz_cvtph_ps(0xFFFF, (__m256i)v);
#elif defined(__AVX2__)
  return (F32)_mm256_cvtph_ps((__m128i)v);
#endif
  const U32 half = widen(v), exponent = half & 0x7C00, mantissa = half & 0x03FF;
  // float16 exponents have a bias of 15 and float32 exponents a bias of 127, so 112 is added.
  const U32 rebias = U32{} + (112u << 23);
  const U32 wide = ((exponent | mantissa) << 13) + rebias + (rebias & (U32)(exponent == 0x7C00));
  const F32 small = __builtin_convertvector((I32)mantissa, F32) * 0x1p-24f;
  return (F32)((U32)select(exponent == 0, small, (F32)wide) | (half & 0x8000) << 16);
}

MK_INLINE F32 load_half(const uint16_t* p, int n) {
  return n >= kLanes ? load_half(p) : load_half(part(p, n).lanes);
}

// Rounds a non-negative number to float16, to nearest, ties to even, and returns its bits.
inline uint16_t half_of(float x) {
  if (!(x < 65520.0f)) return x != x ? 0x7E00 : 0x7C00;
  uint32_t bits;
  if (x < 0x1p-14f) {
    // Adding 0.5 rounds x to a multiple of 2^-24, the spacing of subnormal float16 numbers, because float32
    // numbers from 0.5 to 1 have the same spacing.
    x += 0.5f;
    memcpy(&bits, &x, sizeof bits);
    return static_cast<uint16_t>(bits - 0x3F000000);
  }
  memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + 0xFFF + ((bits >> 13) & 1) - (112u << 23)) >> 13);
}

MK_INLINE I32 lane_index() {
  I32 v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

// Reduces all lanes to one: combines the lower half of the lanes with the upper half, lane by lane, and
// repeats this until one lane is left.
template <class V, class F>
MK_INLINE auto folded(V v, const F& join) {
  using Lane = std::decay_t<decltype(v[0])>;
  if constexpr (sizeof(V) == 8) {
    return join(v[0], v[1]);
  } else {
    typedef Lane Half __attribute__((vector_size(sizeof(V) / 2)));
    Half halves[2];
    memcpy(halves, &v, sizeof v);
    return folded(join(halves[0], halves[1]), join);
  }
}

MK_INLINE float sum(F32 v) {
  return folded(v, [](auto a, auto b) { return a + b; });
}

MK_INLINE float max(F32 v) {
  return folded(v, [](auto a, auto b) { return b > a ? b : a; });
}

// -- integers

inline float bits_to_float(uint32_t bits) {
  float v;
  memcpy(&v, &bits, sizeof v);
  return v;
}

MK_INLINE uint32_t highest(U32 v) {
  return folded(v, [](auto a, auto b) { return a > b ? a : b; });
}

MK_INLINE int32_t total(I32 v) {
  return folded(v, [](auto a, auto b) { return a + b; });
}

// Stores 32 integers from -128 to 127 as bytes.
MK_INLINE void store_low_bytes(const I32 (&v)[32 / kLanes], uint32_t (&out)[8]) {
#if defined(__AVX2__) && MK_LANES == 8
  const __m256i low = _mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]),
                high = _mm256_packs_epi32((__m256i)v[2], (__m256i)v[3]);
  // These instructions pack each half of a register by itself, so the words have to be put in order.
  const __m256i bytes =
      _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  memcpy(out, &bytes, sizeof bytes);
#else
  MK_UNROLL for (int i = 0; i < 32 / kLanes; ++i) {
    const I8 bytes = __builtin_convertvector(v[i], I8);
    memcpy(reinterpret_cast<char*>(out) + i * kLanes, &bytes, sizeof bytes);
  }
#endif
}

// Each byte of v has a 4-bit float: a sign, two bits of exponent, one of mantissa. Returns, in its
// place, twice the float's value plus 16, a positive integer.
MK_INLINE U32 doubled_floats(U32 v) {
#if defined(__AVX2__)
  const __m128i table = _mm_setr_epi8(16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4);
#endif
#if defined(__AVX512F__)
  return (U32)_mm512_maskz_shuffle_epi8(~0ull, _mm512_maskz_broadcast_i32x4(0xFFFF, table), (__m512i)v);
#elif defined(__AVX2__)
  return (U32)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)v);
#else
  constexpr uint32_t kOnes = 0x01010101;
  const U32 low = v & 7 * kOnes,
            more = low & (v >> 2 & kOnes) * 3;  // 0, or the low two bits of codes from 4 on
  const U32 size = low + more + (more & more >> 1 & kOnes) * 2;
  return 16 * kOnes + size - (size * 2 & (v >> 3 & kOnes) * 255);
#endif
}

// How many of a unit's 8 words (of 4 successive activations) have 15 bits per activation instead of 8.
// They are the words with the largest values, which cause most of the error of rounding.
constexpr int kWideWords = 2;
constexpr int kHighShift = 7;

// Integer dot products of weights and activations, one in each lane. Each 32-bit word has four bytes, for
// four successive elements. Weights have kBits bits; they are unsigned, except that 8-bit weights are signed.
// Activations are signed and at least -127. Those that do not fit a byte are divided into two: x = 128 * high
// + low.
template <int kBits>
class ByteSums {
  // With AVX2, the multiply instruction adds two products in each 16-bit lane. A lane can hold the sum
  // of kFit such results without overflow.
  static constexpr int kFit = kBits == 8 ? 1 : 32767 / (2 * ((1 << kBits) - 1) * 127);

 public:
  // Adds the products of the four weights in each lane with the four activations in `word`. j numbers the
  // calls for one object: 0, 1, 2 and so on.
  MK_INLINE void add(int j, U32 weights, uint32_t word) { add(j, weights, word, kFit, 1); }
  // Like `add`, but for the high bytes of the kWideWords words with 15 bits per activation. All calls of
  // add_high come before the first `add`, because the last one shifts the sum.
  MK_INLINE void add_high(int j, U32 weights, uint32_t word) {
    add(j, weights, word, kFit < kWideWords ? kFit : kWideWords, 1 << kHighShift);
#if !defined(__AVX2__) || MK_LANES != 8
    if (j == kWideWords - 1) wide_ <<= kHighShift;
#endif
  }
  // Returns the result in each lane: the sum of (weight - zero) * activation over all earlier calls of add().
  // The number of calls must be a multiple of kFit (see add), because with AVX2 the sums of an incomplete
  // group of kFit calls are not in `wide_` yet. `total` is the sum of the activations.
  MK_INLINE I32 value(int zero, int32_t total) const {
#if defined(__AVX512VNNI__)
    if (kBits == 8) zero += 128;
#endif
    return zero == 0 ? wide_ : wide_ - zero * total;
  }

 private:
  MK_INLINE void add(int j, U32 weights, uint32_t word, [[maybe_unused]] int fit,
                     [[maybe_unused]] int16_t factor_of_all) {
    const U32 x = U32{} + word;
#if defined(__AVX512VNNI__)
    // The instruction takes unsigned bytes of weights, so 128 is added to signed ones.
    const U32 unsigned_bytes = kBits == 8 ? weights ^ 0x80808080u : weights;
    wide_ = (I32)_mm512_dpbusd_epi32((__m512i)wide_, (__m512i)unsigned_bytes, (__m512i)x);
    (void)j;
#elif defined(__AVX2__)
    __m256i magnitude = (__m256i)weights, factor = (__m256i)x;
    if constexpr (kBits == 8) {
      factor = _mm256_sign_epi8(factor, magnitude);
      magnitude = _mm256_abs_epi8(magnitude);
    }
    const I16 products = (I16)_mm256_maddubs_epi16(magnitude, factor);
    narrow_ = j % fit == 0 ? products : narrow_ + products;
    // Without the empty assembly, GCC computes all products first, and has to spill them.
    if (j % fit == fit - 1) {
      wide_ += (I32)_mm256_madd_epi16((__m256i)narrow_, _mm256_set1_epi16(factor_of_all));
      asm("" : "+x"(wide_));
    } else {
      asm("" : "+x"(narrow_));
    }
#elif defined(__SSE2__)
    // Without AVX2, the only fast multiplication is of 16-bit integers, so the bytes are widened first: those
    // at odd places, then those at even places.
    typedef int16_t I16 __attribute__((vector_size(4 * MK_LANES)));
    const I16 w = (I16)weights, a = (I16)x;
    wide_ += (I32)_mm_madd_epi16((__m128i)(w >> 8), (__m128i)(a >> 8));
    wide_ += (I32)_mm_madd_epi16((__m128i)(w << 8 >> 8), (__m128i)(a << 8 >> 8));
    (void)j;
#else
    MK_UNROLL for (int b = 0; b < 4; ++b) {
      const I32 w = kBits == 8 ? (I32)(weights << (24 - 8 * b)) >> 24 : (I32)(weights >> (8 * b) & 0xFF);
      wide_ += w * ((I32)(x << (24 - 8 * b)) >> 24);
    }
    (void)j;
#endif
  }

#if defined(__AVX2__) && MK_LANES == 8
  typedef int16_t I16 __attribute__((vector_size(32)));
  I16 narrow_{};
#endif
  I32 wide_{};
};

// Computes e^x. Splits x into n ln 2 + r with an integer n and |r| <= ln 2 / 2 (Cody-Waite reduction).
// Computes e^r with a Taylor polynomial of degree 7 (truncation error 5e-9), then adds n to its
// exponent. The result is 0 for x below -87.3 (no subnormal numbers), 2.2e38 for x above 88.3, and NaN
// for NaN.
MK_INLINE F32 exp(F32 x) {
  constexpr float kMagic =
      12582912.0f;  // 1.5 * 2^23: adding it to x rounds x to an integer, in the low mantissa bits of the sum
  const F32 high = splat(88.3f), low = splat(-87.3f);
  const I32 tiny = x < low;
  x = select(x > high, high, x);
  x = select(tiny, low, x);
  const F32 shifted = x * 1.44269504f + kMagic;
  const F32 n = shifted - kMagic;
  F32 r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  F32 p = splat(1.98412698e-4f);
  p = p * r + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const I32 scale = ((I32)shifted - (I32)splat(kMagic)) << 23;
  const F32 result = (F32)((I32)p + scale);
  return select(x != x, x, select(tiny, F32{}, result));
}

// Returns x or, if `cap` is not 0, cap * tanh(x / cap). Minus infinity, which hides a token, stays.
MK_INLINE F32 capped(F32 x, float cap) {
  if (cap == 0.0f) return x;
  const F32 limited = cap - 2.0f * cap / (exp(x * (2.0f / cap)) + 1.0f);
  return select(x == splat(-INFINITY), x, limited);
}

}  // namespace mk::MK_SIMD
