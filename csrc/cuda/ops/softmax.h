// Softmax over KV blocks: each block gives a fresh (m, l, o), m = max score, l = sum e^(score - m), o = sum
// e^(score - m) value, and blocks merge in ascending order, by the same operations wherever it happens.
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

// m and l of some blocks, and what a further one does to them and to o.
struct Softmax {
  float m = minus_infinity(), l = 0.0f;
  float keep = 0.0f, add = 0.0f;

  // Before the block's o is merged, element by element.
  MK_FN void merge(float block_m, float block_l) {
    const float top = fmaxf(m, block_m);
    keep = exp_fast(m - top);
    add = exp_fast(block_m - top);
    m = top;
    l = fmaf(block_l, add, l * keep);
  }
  MK_FN float merged(float o, float block_o) const { return fmaf(block_o, add, o * keep); }
};

}  // namespace mk
