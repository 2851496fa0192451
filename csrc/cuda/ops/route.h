// Chooses the experts of each row. The consumer warps compute the logits of a few rows at a time, each
// warp for other experts. Then each of these rows gets one warp, which chooses the best experts.
#pragma once
#include "sample.h"
#include "softmax.h"

namespace mk {

constexpr int kRouteRows = 4;     // rows whose logits are computed together
constexpr int kRouteExperts = 4;  // experts whose logits a warp computes together
static_assert(2 * kRouteRows * kMostExperts * sizeof(float) <= sizeof(Scratch::rows));

MK_FN float sigmoid(float x) { return 1.0f / (1.0f + exp_fast(-x)); }

// Stores a row's last `count` experts, which are fixed instead of chosen by the router. Their numbers
// are `first_expert`, `first_expert` + 1 and so on, and each has the weight `weight`.
template <class P>
MK_FN void store_fixed(P& p, const Call& call, int row, int count, int first_expert, float weight) {
  const int64_t at = int64_t{row + 1} * call.dims->experts_per_token - count;
  MK_LOOP for (int j = p.lane(); j < count; j += P::kLanes) {
    call.at<int32_t>(call.phase().output)[at + j] = first_expert + j;
    call.at<float>(Buffer::ROUTE_WEIGHTS)[at + j] = weight;
  }
}

// Chooses the experts of a row. `logits` is the row's logits, with room for weights kRouteRows *
// kMostExperts floats later. A NaN logit counts as -infinity. The logit of a chosen expert becomes NaN.
template <class P>
MK_FN void choose_experts(P& p, const Call& call, int row, float* logits) {
  const Sizes& d = *call.dims;
  const int experts = d.routed_experts(), count = d.experts_per_token - d.shared_experts;
  const int64_t at = int64_t{row} * d.experts_per_token;
  float* const chosen = logits + kRouteRows * kMostExperts;
  const float* const bias = d.choice_bias ? call.weights<float>(call.phase().bias) : nullptr;
  store_fixed(p, call, row, d.shared_experts, experts, d.shared_gate ? sigmoid(logits[experts]) : 1.0f);
  MK_LOOP for (int e = p.lane(); e < experts; e += P::kLanes) logits[e] =
      logits[e] == logits[e] ? logits[e] : minus_infinity();
  float top = minus_infinity(), sum = 0.0f, whole = 1.0f;
  const auto score = [&](float logit) { return d.sigmoid_routes ? sigmoid(logit) : exp_fast(logit - top); };
  MK_LOOP for (int j = -1; j < count; ++j) {
    uint64_t key = 0;
    MK_LOOP for (int e = p.lane(); e < experts; e += P::kLanes) {
      const float order = bias && j >= 0 ? score(logits[e]) / whole + bias[e] : logits[e];
      if (logits[e] == logits[e]) key = greater(key, peak_key(order, e));
    }
    const Peak best = as_peak(reduce_lanes<P>(key, greater));
    if (j < 0) {  // sums over all experts, before any is chosen
      top = best.value;
      if (d.sigmoid_routes || (d.normalised_routes && !bias)) continue;
      whole = 0.0f;
      MK_LOOP for (int e = p.lane(); e < experts; e += P::kLanes) whole += score(logits[e]);
      whole = reduce_lanes<P>(whole, [](float a, float b) { return a + b; });
      continue;
    }
    const int owner = best.id % P::kLanes;
    const int32_t logit =
        bias && owner == p.lane() ? static_cast<int32_t>(float_to_bits(logits[best.id])) : 0;
    const float weight =
        score(bias ? bits_to_float(static_cast<uint32_t>(shuffle(logit, owner))) : best.value);
    sum += weight;
    if (owner == p.lane()) logits[best.id] = bits_to_float(0x7FC00000u);
    if (j % P::kLanes == p.lane()) {
      chosen[j] = weight;
      call.at<int32_t>(call.phase().output)[at + j] = best.id;
    }
  }
  MK_LOOP for (int j = p.lane(); j < count; j += P::kLanes) call.at<float>(Buffer::ROUTE_WEIGHTS)[at + j] =
      chosen[j] / (d.normalised_routes ? sum : whole) * d.route_scale;
}

// For each logit, a lane adds its products in ascending order, then a tree adds the sums of the lanes.
template <class P>
MK_FN void route(P& p, const Call& call, const Run& op) {
  const Sizes& d = *call.dims;
  const int width = call.phase().inner, experts = d.router_rows(), end = op.row + op.rows;
  if (call.task->where.layer < d.dense_layers) {
    MK_LOOP for (int row = op.row + call.warp; row < end; row += kConsumerWarps)
        store_fixed(p, call, row, d.experts_per_token, 0, 1.0f);
    return;
  }
  const uint16_t* inputs = call.at<uint16_t>(call.phase().inputs);
  const uint16_t* weights = call.weights<uint16_t>(call.phase().weights);
  const float* bias = d.choice_bias ? nullptr : call.weights<float>(call.phase().bias);
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
  const int count = call.dims->router_rows() * call.phase().inner;
  MK_LOOP for (int i = kLine * (call.warp * P::kLanes + p.lane()); i < count;
               i += kLine * kConsumerWarps * P::kLanes) prefetch(weights + i);
}

}  // namespace mk
