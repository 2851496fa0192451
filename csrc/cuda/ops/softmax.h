// Softmax over KV blocks: each block gives a fresh (m, l, o) with m = max score, l = sum e^(score - m), o =
// sum e^(score - m) value. Blocks are merged in ascending order, by the same operations everywhere.
#pragma once
#include "call.h"

namespace mk {

constexpr int kKvBlock = 128;  // tokens of a block, and of a page of the cache
constexpr int kMaxHeadDim = 128;

MK_FN float exp_fast(float x) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x * 1.44269504f));
  return out;
#else
  return expf(x);
#endif
}

// The effect of a further block on o, element by element.
struct Rescale {
  float keep, add;

  MK_FN float merged(float o, float block_o) const { return fmaf(block_o, add, o * keep); }
};

// m and l of some blocks.
struct Softmax {
  float m = minus_infinity(), l = 0.0f;

  MK_FN Rescale merge(float block_m, float block_l) {
    const float top = fmaxf(m, block_m);
    const Rescale scale{exp_fast(m - top), exp_fast(block_m - top)};
    m = top;
    l = scale.merged(l, block_l);
    return scale;
  }
};

}  // namespace mk
