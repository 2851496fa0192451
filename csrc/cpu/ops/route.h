// Chooses the experts of rows.
#pragma once
#include "../simd/gemm.h"

namespace mk::MK_SIMD {

static_assert(kMostExperts <= kTilePanels * kPanel, "a row's logits must come in one piece");

// The router of a mixture of experts. `t` has the logits of row r for all n experts. Chooses the
// experts_per_token experts with the largest logits; of equal logits, the lower expert number wins. NaN
// counts as -infinity. An expert's weight is the softmax of its logit, either over the chosen experts or over
// all experts.
inline void choose(const Call& call, int r, int, int n, float* t) {
  const Dims& d = *call.dims;
  const int64_t at = int64_t{r} * d.experts_per_token;
  int32_t* const experts = call.output<int32_t>() + at;
  float* const weights = call.at<float>(Buffer::ROUTE_WEIGHTS) + at;
  float every[kMostExperts], top = -__builtin_inff();
  for (int e = 0; e < n; ++e) {
    if (t[e] != t[e]) t[e] = -__builtin_inff();
    if (t[e] > top) top = t[e];
  }
  for (int e = 0; e < n; e += kLanes) store(every + e, exp(load(t + e, n - e) - top), n - e);
  bool taken[kMostExperts] = {};
  float sum = 0.0f;
  for (int j = 0; j < d.experts_per_token; ++j) {
    int best = -1;
    for (int e = 0; e < n; ++e) {
      if (!taken[e] && (best < 0 || t[e] > t[best])) best = e;
    }
    taken[best] = true;
    experts[j] = best;
    weights[j] = every[best];
    sum += every[best];
  }
  if (!d.normalised_routes) {
    sum = 0.0f;
    for (int e = 0; e < n; ++e) sum += every[e];
  }
  for (int j = 0; j < d.experts_per_token; ++j) weights[j] /= sum;
}

template <class T>
void route(const Call& call, const Run& op) {
  gemm<T>(call, {op.row, op.rows, 0, call.dims->experts}, choose);
}

}  // namespace mk::MK_SIMD
