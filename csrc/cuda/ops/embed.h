#pragma once
#include "call.h"
#include "memory.h"

namespace mk {

// X[r] = EMBED[token(r)]: a warp per row.
template <class P>
MK_FN void embed(P& p, const Call& call, const Embed& op) {
  const Sizes& d = *call.dims;
  const uint16_t* table = call.at<uint16_t>(Buffer::EMBED);
  const int32_t* history = call.at<int32_t>(Buffer::HISTORY);
  float* x = call.at<float>(Buffer::X);
  for (int r = op.row + call.warp; r < op.row + op.rows; r += kConsumerWarps) {
    int32_t token = call.step->token_ids[r];
    if (token < 0)
      token = load_int(history + int64_t{-1 - token} * (d.max_context + 1) + call.step->positions[r]);
    const uint16_t* row = table + int64_t{token} * d.hidden;
    for (int k = 8 * p.lane(); k < d.hidden; k += 8 * P::kLanes) {
      store_eight(x + int64_t{r} * d.hidden + k, read_eight(row + k));
    }
  }
}

}  // namespace mk
