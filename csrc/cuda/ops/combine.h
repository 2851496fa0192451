#pragma once
#include "../../common/index.h"
#include "../routes.h"

namespace mk {

// Adds up the weighted results of each row's experts, in the order of the router's choices. Skips other
// ranks' experts. Adds the sums to the residual, or stores them as partial sums on ranks that keep it.
template <class P>
MK_FN void combine(P& p, const Call& call, const Run& op) {
  const Sizes& d = *call.dims;
  const Phase& phase = call.phase();
  const int count = d.experts_per_token, groups = d.hidden / 8;
  const uint16_t* inputs = call.at<uint16_t>(phase.inputs);
  const float* weights = call.at<float>(Buffer::ROUTE_WEIGHTS);
  const Routes routes(*call.params, d);
  MK_LOOP for (int i = call.warp * P::kLanes + p.lane(); i < op.rows * groups;
               i += kConsumerWarps * P::kLanes) {
    const int r = op.row + i / groups, k = i % groups * 8;
    const int64_t first = int64_t{r} * count;
    Eight sum{};
    MK_UNROLL_4 for (int j = 0; j < count; ++j) {
      const float weight = load_float(weights + first + j);
      const Eight result = load_eight(inputs + (first + j) * d.hidden + k);
      if (!routes.own(routes.at(r, j))) continue;
      MK_UNROLL for (int e = 0; e < 8; ++e) sum.v[e] += weight * result.v[e];
    }
    if (phase.result == Result::kPartial) {
      const Ranks ranks = residual_ranks(d, r);
      const int64_t at = int64_t{d.reduce_row(d.rank, r)} * d.hidden + k;
      MK_LOOP for (int rank = ranks.begin; rank < ranks.end; ++rank)
          store_words(call.copy<uint16_t>(phase.output, rank) + at, pack_eight(sum));
    } else {
      float* x = call.at<float>(phase.output) + int64_t{r} * d.hidden + k;
      sum += load_eight(x);
      store_eight(x, sum);
    }
  }
}

}  // namespace mk
