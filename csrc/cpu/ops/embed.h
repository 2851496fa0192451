#pragma once
#include <math.h>

#include "../simd.h"

namespace mk::MK_SIMD {

// X[r] = EMBED[token(r)]. EMBED is packed like LM_HEAD (packing.h), so that a tied one is stored once.
template <class T>
void embed(const Call& call, const Embed& op) {
  const Dims& d = *call.dims;
  const T* table = call.at<T>(Buffer::EMBED);
  const int32_t* history = call.at<int32_t>(Buffer::HISTORY);
  constexpr int kPair = sizeof(T) == 2 ? 2 : 1;  // packed bfloat16 keeps two k steps of a column together
  const int64_t panel_stride = int64_t{d.hidden + d.hidden % 2} * kPanel;
  for (int r = op.row; r < op.row + op.rows; ++r) {
    const int32_t position = call.step->positions[r];
    int32_t token = call.step->token_ids[r];
    if (token < 0) token = history[int64_t{-1 - token} * (d.max_context + 1) + position];
    const T* w = table + token / kPanel * panel_stride + token % kPanel * kPair;
    float* x = call.at<float>(Buffer::X) + int64_t{r} * d.hidden;
    for (int k = 0; k < d.hidden; ++k) {
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

// ROPE[r] = cos, sin of position(r) * INV_FREQ.
template <class T>
void rope(const Call& call, const Rope& op) {
  const Dims& d = *call.dims;
  const float* inv_freq = call.at<float>(Buffer::INV_FREQ);
  for (int r = op.row; r < op.row + op.rows; ++r) {
    float* out = call.at<float>(Buffer::ROPE) + int64_t{r} * d.head_dim;
    for (int i = 0; i < d.head_dim / 2; ++i) {
      const double angle = static_cast<float>(call.step->positions[r]) * inv_freq[i];
      out[2 * i] = static_cast<float>(cos(angle));
      out[2 * i + 1] = static_cast<float>(sin(angle));
    }
  }
}

}  // namespace mk::MK_SIMD
