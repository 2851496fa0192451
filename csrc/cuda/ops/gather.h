#pragma once
#include "call.h"
#include "memory.h"

namespace mk {

// Copies the embedding of each row's token: output[r] = weights[token(r)] * embed_scale. One warp copies a
// row.
template <class P>
MK_FN void gather(P& p, const Call& call, const Run& op) {
  const Sizes& d = *call.dims;
  const int width = call.phase().inner;
  const uint16_t* table = call.weights<uint16_t>(call.phase().weights);
  const int32_t* history = call.at<int32_t>(Buffer::HISTORY);
  float* out = call.at<float>(call.phase().output);
  for (int r = op.row + call.warp; r < op.row + op.rows; r += kConsumerWarps) {
    int32_t token = call.step->token_ids[r];
    if (token < 0)
      token = load_int(history + int64_t{-1 - token} * (d.max_context + 1) + call.step->positions[r]);
    const uint16_t* row = table + int64_t{token} * width;
    MK_LOOP for (int k = 8 * p.lane(); k < width; k += 8 * P::kLanes) {
      Eight part = read_eight(row + k);
      MK_UNROLL for (int i = 0; i < 8; ++i) part.v[i] *= d.embed_scale;
      store_eight(out + int64_t{r} * width + k, part);
    }
  }
}

}  // namespace mk
