#pragma once
#include <math.h>

#include "../simd/formats.h"

namespace mk::MK_SIMD {

// Reads the first k elements of one column of a weight panel, converted to float32, times `scale`.
inline void read_column(const Panel& panel, int column, int k, float scale, float* out) {
  void (*convert)(const Panel&, int, int, float*) = nullptr;
  with_format(panel.type(), [&]<class W>() { convert = widen<W>; });
  for (int begin = 0; begin < k; begin += kUnit) {
    float wide[kUnit][kPanel];
    convert(panel, begin, kUnit, wide[0]);
    const int steps = lower_of(k - begin, kUnit);
    for (int s = 0; s < steps; ++s) out[begin + s] = wide[s][column] * scale;
  }
}

// Looks up embeddings: output[r] = weights[token of row r] * embed_scale. The table is packed like any weight
// matrix (packed.h), so it is stored only once if the model also uses it as the LM head.
inline void gather(const Call& call, const Run& op) {
  const Dims& d = *call.dims;
  const int width = call.phase->inner;
  const Panel* table = call.weights<Panel>();
  const int32_t* history = call.at<int32_t>(Buffer::HISTORY);
  for (int r = op.row; r < op.row + op.rows; ++r) {
    const int32_t position = call.step->positions[r];
    int32_t token = call.step->token_ids[r];
    if (token < 0) token = history[int64_t{-1 - token} * (d.max_context + 1) + position];
    const Panel& panel = table[token / kPanel];
    float* x = call.output<float>() + int64_t{r} * width;
    read_column(panel, token % kPanel, width, d.embed_scale, x);
  }
}

// Computes the RoPE table. In row r, the angle of each pair of elements is the row's position times the
// pair's inverse frequency. output[r] has every pair's cosine and sine side by side, times the pair's
// factor. The phase's weights are the inverse frequencies, followed by the factors.
inline void rope(const Call& call, const Run& op) {
  const Dims& d = *call.dims;
  const float* inv_freq = call.weights<float>();
  const float* factors = inv_freq + d.head_dim / 2;
  for (int r = op.row; r < op.row + op.rows; ++r) {
    float* out = call.output<float>() + int64_t{r} * d.head_dim;
    for (int i = 0; i < d.head_dim / 2; ++i) {
      const double angle = static_cast<float>(call.step->positions[r]) * inv_freq[i];
      out[2 * i] = factors[i] * static_cast<float>(cos(angle));
      out[2 * i + 1] = factors[i] * static_cast<float>(sin(angle));
    }
  }
}

}  // namespace mk::MK_SIMD
