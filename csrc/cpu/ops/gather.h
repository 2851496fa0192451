#pragma once
#include <math.h>

#include "../simd.h"

namespace mk::MK_SIMD {

// output[r] = weights[token(r)]. The table is packed like a matrix (packing.h), so that one that is also an
// LM head is stored once.
template <class T>
void gather(const Call& call, const Run& op) {
  const Dims& d = *call.dims;
  const int width = call.phase->inner;
  const T* table = call.weights<T>();
  const int32_t* history = call.at<int32_t>(Buffer::HISTORY);
  constexpr int kPair = sizeof(T) == 2 ? 2 : 1;  // packed bfloat16 keeps two k steps of a column together
  const int64_t panel_stride = int64_t{width + width % 2} * kPanel;
  for (int r = op.row; r < op.row + op.rows; ++r) {
    const int32_t position = call.step->positions[r];
    int32_t token = call.step->token_ids[r];
    if (token < 0) token = history[int64_t{-1 - token} * (d.max_context + 1) + position];
    const T* w = table + token / kPanel * panel_stride + token % kPanel * kPair;
    float* x = call.output<float>() + int64_t{r} * width;
    for (int k = 0; k < width; ++k) {
      const T value = w[k / kPair * (kPanel * kPair) + k % kPair];
      if constexpr (sizeof(T) == 2) {
        const uint32_t bits = uint32_t{value.bits} << 16;
        memcpy(x + k, &bits, sizeof bits);
      } else {
        x[k] = value;
      }
    }
  }
}

// output[r] = cos, sin of position(r) * weights.
inline void rope(const Call& call, const Run& op) {
  const Dims& d = *call.dims;
  const float* inv_freq = call.weights<float>();
  for (int r = op.row; r < op.row + op.rows; ++r) {
    float* out = call.output<float>() + int64_t{r} * d.head_dim;
    for (int i = 0; i < d.head_dim / 2; ++i) {
      const double angle = static_cast<float>(call.step->positions[r]) * inv_freq[i];
      out[2 * i] = static_cast<float>(cos(angle));
      out[2 * i + 1] = static_cast<float>(sin(angle));
    }
  }
}

}  // namespace mk::MK_SIMD
