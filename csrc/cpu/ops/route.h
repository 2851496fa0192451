// Chooses the experts of each row, in layers with a mixture of experts.
#pragma once
#include "../simd/gemm.h"

namespace mk::MK_SIMD {

static_assert(kMostExperts <= kTilePanels * kPanel, "a row's logits must come in one piece");

// Chooses row r's experts and their weights (megakernel/isa/operations/route.py). `t` has the row's
// logits: one for each routed expert and, if shared experts have a gate, one more for the gate.
inline void choose(const Call& call, int r, int, int, float* t) {
  const Dims& d = *call.dims;
  const int count = d.experts_per_token - d.shared_experts, n = d.routed_experts();
  const int64_t at = int64_t{r} * d.experts_per_token;
  int32_t* const experts = call.output<int32_t>() + at;
  float* const weights = call.at<float>(Buffer::ROUTE_WEIGHTS) + at;
  const auto sigmoid = [](F32 x) { return 1.0f / (exp(-x) + 1.0f); };
  float every[kMostExperts], top = -__builtin_inff(), whole = d.sigmoid_routes ? 1.0f : 0.0f;
  for (int j = count; j < d.experts_per_token; ++j) {
    experts[j] = n + j - count;
    weights[j] = d.shared_gate ? sigmoid(splat(t[n]))[0] : 1.0f;
  }
  for (int e = 0; e < n; ++e) {
    if (t[e] != t[e]) t[e] = -__builtin_inff();
    if (t[e] > top) top = t[e];
  }
  for (int e = 0; e < n; e += kLanes) {
    const F32 logits = load(t + e, n - e);
    store(every + e, d.sigmoid_routes ? sigmoid(logits) : exp(logits - top), n - e);
  }
  if (!d.sigmoid_routes && (d.choice_bias || !d.normalised_routes))
    for (int e = 0; e < n; ++e) whole += every[e];
  if (d.choice_bias)
    for (int e = 0; e < n; ++e) t[e] = every[e] / whole + call.bias()[e];
  bool taken[kMostExperts] = {};
  float sum = 0.0f;
  for (int j = 0; j < count; ++j) {
    int best = -1;
    for (int e = 0; e < n; ++e) {
      if (!taken[e] && (best < 0 || t[e] > t[best])) best = e;
    }
    taken[best] = true;
    experts[j] = best;
    weights[j] = every[best];
    sum += every[best];
  }
  for (int j = 0; j < count; ++j)
    weights[j] = weights[j] / (d.normalised_routes ? sum : whole) * d.route_scale;
}

template <class T>
void route(const Call& call, const Run& op) {
  const Dims& d = *call.dims;
  if (call.layer >= d.dense_layers) {
    const float* const bias = d.choice_bias ? nullptr : call.bias();
    gemm<T>(call, {op.row, op.rows, 0, d.router_rows()}, call.weights<Panel>(), bias, choose);
    return;
  }
  const int64_t count = d.experts_per_token, end = (op.row + op.rows) * count;
  for (int64_t i = op.row * count; i < end; ++i) {
    call.output<int32_t>()[i] = static_cast<int32_t>(i % count);
    call.at<float>(Buffer::ROUTE_WEIGHTS)[i] = 1.0f;
  }
}

}  // namespace mk::MK_SIMD
