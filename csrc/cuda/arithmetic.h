// Arithmetic that host and device share. A single bf16 value is passed as 16 bits. Two bf16 values are passed
// as one 32-bit word, with the first value in the low half.
#pragma once
#include "../common/isa.h"
#if !defined(__CUDACC__)
#include <math.h>
#include <string.h>
#endif

#if defined(__CUDACC__)
#define MK_FN __device__ __forceinline__
#define MK_UNROLL _Pragma("unroll")
#define MK_LOOP _Pragma("unroll 1")  // not unrolled
// MK_UNROLL_n unrolls a loop n times, so that several of its loads from memory are in flight.
#define MK_UNROLL_4 _Pragma("unroll 4")
#define MK_UNROLL_2 _Pragma("unroll 2")
#else
#define MK_FN inline
#define MK_UNROLL
#define MK_LOOP
#define MK_UNROLL_2
#define MK_UNROLL_4
#endif

namespace mk {

// Returns the value unchanged, but hides from the compiler how it was computed. So the compiler computes
// values derived from it only where they are used, instead of keeping them in registers.
MK_FN int32_t here(int32_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(value));
#endif
  return value;
}
template <class T>
MK_FN T* here(T* p) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+l"(p));
#endif
  return p;
}

MK_FN int32_t count_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}

MK_FN float bits_to_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
MK_FN uint32_t float_to_bits(float value) { return __builtin_bit_cast(uint32_t, value); }

MK_FN float low_half(uint32_t pair) { return bits_to_float(pair << 16); }
MK_FN float high_half(uint32_t pair) { return bits_to_float(pair & 0xFFFF0000u); }
MK_FN float from_bf16(uint16_t value) { return bits_to_float(uint32_t{value} << 16); }

// Returns the bits of the value rounded to bf16, to nearest, ties to even.
MK_FN uint16_t to_bf16(float value) {
#if defined(__CUDA_ARCH__)
  uint16_t out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
  return out;
#else
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
#endif
}

MK_FN uint32_t pack_bf16(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
#else
  return to_bf16(low) | uint32_t{to_bf16(high)} << 16;
#endif
}

MK_FN float one_over_root(float x) {
#if defined(__CUDA_ARCH__)
  return rsqrtf(x);
#else
  return 1.0f / sqrtf(x);
#endif
}

// Returns gate * sigmoid(x). If x is `gate`, the result is SiLU. If x is gelu_exponent(gate), the result
// is GELU's approximation by tanh, because (1 + tanh(z)) / 2 = sigmoid(2 z).
MK_FN float gated(float gate, float x) {
#if defined(__CUDA_ARCH__)
  return __fdividef(gate, 1.0f + __expf(-x));
#else
  return gate / (1.0f + expf(-x));
#endif
}
// Returns x or, if `cap` is not 0, cap * tanh(x / cap).
MK_FN float capped(float x, float cap) {
  return cap == 0.0f ? x : cap - gated(2.0f * cap, x * (-2.0f / cap));
}
MK_FN float gelu_exponent(float gate) { return 1.595769122f * (gate + 0.044715f * gate * gate * gate); }

}  // namespace mk
