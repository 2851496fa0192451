// RMS norm of a row: x / sqrt(mean(x^2) + eps) * weight, rounded once to the compute type.
#pragma once
#include <math.h>

#include "simd.h"

namespace mk::MK_SIMD {

// Returns 1 / sqrt(mean(x^2) + eps). Not inlined, so that all callers run the same machine instructions and
// get the same bits for a row.
__attribute__((noinline)) inline float rms_scale(const float* x, int n, float eps) {
  F32 squares{};
  for (int i = 0; i < n; i += kLanes) {
    const F32 v = load(x + i, n - i);
    squares += v * v;
  }
  return 1.0f / sqrtf(sum(squares) / static_cast<float>(n) + eps);
}

// Returns the first n normalised elements of a row, not yet rounded to the compute type. `scale` is the row's
// rms_scale.
MK_INLINE F32 normalised(const float* x, const float* weight, float scale, int n) {
  return load(x, n) * scale * load(weight, n);
}

template <class T>
inline void rms_norm(const float* x, const float* weight, int n, float eps, T* out) {
  const float scale = rms_scale(x, n, eps);
  for (int i = 0; i < n; i += kLanes) store(out + i, normalised(x + i, weight + i, scale, n - i), n - i);
}

}  // namespace mk::MK_SIMD
