// Softmax over KV blocks. Each block of 128 tokens is computed separately. It yields the maximum score
// m, the sum l of e^(score - m), and the sum o of e^(score - m) * value. The blocks are merged in
// ascending order, always with the operations of Softmax and Rescale.
#pragma once
#include "call.h"

namespace mk {

MK_FN float exp_fast(float x) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x * 1.44269504f));
  return out;
#else
  return expf(x);
#endif
}

MK_FN float tanh_fast(float x) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("tanh.approx.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#else
  return tanhf(x);
#endif
}

// The factors that merge one more KV block: `keep` scales the earlier sum, `add` scales the new block's sum.
// They apply to l and to each element of o.
struct Rescale {
  float keep, add;

  MK_FN float merged(float o, float block_o) const { return fmaf(block_o, add, o * keep); }
};

// The maximum score m and the sum l of the KV blocks merged so far. `merge` adds one block and returns the
// factors for o.
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
