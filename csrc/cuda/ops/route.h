// Chooses the experts of rows. All consumer warps compute the logits of a few rows; each warp does so for
// other experts. Then one warp for each of these rows chooses the best experts.
#pragma once
#include "sample.h"
#include "softmax.h"

namespace mk {

constexpr int kRouteRows = 4;     // rows whose logits are computed together
constexpr int kRouteExperts = 4;  // experts whose logits a warp computes together
static_assert(2 * kRouteRows * kMostExperts * sizeof(float) <= sizeof(Scratch::rows));

// Chooses the experts of a row. `logits` has the row's logits and, kRouteRows * kMostExperts further on, room
// for the weights. NaN counts as -infinity, and afterwards marks the logits of experts that are chosen.
template <class P>
MK_FN void choose_experts(P& p, const Call& call, int row, float* logits) {
  const Sizes& d = *call.dims;
  const int64_t at = int64_t{row} * d.experts_per_token;
  float* const chosen = logits + kRouteRows * kMostExperts;
  MK_LOOP for (int e = p.lane(); e < d.experts; e += P::kLanes) logits[e] =
      logits[e] == logits[e] ? logits[e] : minus_infinity();
  float top = minus_infinity(), sum = 0.0f;
  MK_LOOP for (int j = -1; j < d.experts_per_token; ++j) {
    uint64_t key = 0;
    MK_LOOP for (int e = p.lane(); e < d.experts; e += P::kLanes) {
      if (logits[e] == logits[e]) key = greater(key, peak_key(logits[e], e));
    }
    const Peak best = as_peak(reduce_lanes<P>(key, greater));
    if (j < 0) {  // sums over all experts, before any is chosen
      top = best.value;
      MK_LOOP for (int e = p.lane(); e < d.experts; e += P::kLanes) sum += exp_fast(logits[e] - top);
      sum = d.normalised_routes ? 0.0f : reduce_lanes<P>(sum, [](float a, float b) { return a + b; });
      continue;
    }
    const float weight = exp_fast(best.value - top);
    if (d.normalised_routes) sum += weight;
    if (best.id % P::kLanes == p.lane()) logits[best.id] = bits_to_float(0x7FC00000u);
    if (j % P::kLanes == p.lane()) {
      chosen[j] = weight;
      call.at<int32_t>(call.phase().output)[at + j] = best.id;
    }
  }
  MK_LOOP for (int j = p.lane(); j < d.experts_per_token; j += P::kLanes)
      call.at<float>(Buffer::ROUTE_WEIGHTS)[at + j] = chosen[j] / sum;
}

// A lane adds its products of a row and an expert in ascending order, then a tree adds the sums of the lanes.
template <class P>
MK_FN void route(P& p, const Call& call, const Run& op) {
  const int width = call.phase().inner, experts = call.dims->experts, end = op.row + op.rows;
  const uint16_t* inputs = call.at<uint16_t>(call.phase().inputs);
  const uint16_t* weights = call.weights<uint16_t>(call.phase().weights);
  const float* bias = call.weights<float>(call.phase().bias);
  auto* logits = reinterpret_cast<float (*)[kMostExperts]>(call.shared->rows);
  MK_LOOP for (int row = op.row; row < end; row += kRouteRows) {
    const int rows = lower_of(kRouteRows, end - row);
    p.consumer_sync();  // all warps have left the scratch memory
    MK_LOOP for (int first = call.warp * kRouteExperts; first < experts;
                 first += kConsumerWarps * kRouteExperts) {
      float sums[kRouteRows][kRouteExperts]{};
      MK_LOOP for (int k = 8 * p.lane(); k < width; k += 8 * P::kLanes) {
        Eight own[kRouteExperts];
        MK_UNROLL for (int i = 0; i < kRouteExperts; ++i) own[i] =
            read_eight(weights + int64_t{lower_of(first + i, experts - 1)} * width + k);
        MK_UNROLL for (int r = 0; r < kRouteRows; ++r) {
          if (r >= rows) break;
          const Eight x = load_eight(inputs + int64_t{row + r} * width + k);
          MK_UNROLL for (int i = 0; i < kRouteExperts; ++i) {
            MK_UNROLL for (int e = 0; e < 8; ++e) sums[r][i] += x.v[e] * own[i].v[e];
          }
        }
      }
      MK_UNROLL for (int n = 0; n < kRouteRows * kRouteExperts; ++n) {
        const int r = n / kRouteExperts, i = n % kRouteExperts;
        const float logit = reduce_lanes<P>(sums[r][i], [](float a, float b) { return a + b; });
        if (p.lane() == 0 && r < rows && first + i < experts)
          logits[r][first + i] = logit + (bias ? bias[first + i] : 0.0f);
      }
    }
    p.consumer_sync();
    if (call.warp < rows) choose_experts(p, call, row + call.warp, logits[call.warp]);
  }
}

// Prefetches the router's weights, while other instructions still compute the inputs.
template <class P>
MK_FN void prefetch_router(P& p, const Call& call) {
  constexpr int kLine = 64;  // elements of a line in the L2 cache
  const uint16_t* weights = call.weights<uint16_t>(call.phase().weights);
  const int count = call.dims->experts * call.phase().inner;
  MK_LOOP for (int i = kLine * (call.warp * P::kLanes + p.lane()); i < count;
               i += kLine * kConsumerWarps * P::kLanes) prefetch(weights + i);
}

}  // namespace mk
