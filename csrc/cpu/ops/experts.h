// Mixture-of-experts layers. `experts` multiplies each row of activations by the weights of the experts that
// the router (`route`) has chosen for the row. This gives one result row for every (row, expert) pair.
// `combine` then adds up the results of each row, weighted by the router's weights.
#pragma once
#include "matmul.h"

namespace mk::MK_SIMD {

// Clips gate and up, then stores their gated product (megakernel/isa/operations/experts.py). In `t`, the
// results of up begin kPanel floats after those of gate.
template <class T>
inline void store_clipped(const Call& call, int r, int first, int n, float* t) {
  T* out = call.output<T>() + int64_t{r} * call.phase->width + first;
  const F32 most = splat(kGateLimit);
  for (int i = 0; i < n; i += kLanes) {
    F32 gate = load(t + i, n - i), up = load(t + kPanel + i, n - i);
    gate = select(gate > most, most, gate);
    up = select(up > most, most, select(up < -most, -most, up));
    store(out + i, gate / (exp(gate * -kGateSlope) + 1.0f) * (up + 1.0f), n - i);
  }
}

// Returns the index of expert `number` among this rank's experts, or -1 if another rank has the expert.
inline int own_expert(const Dims& d, int32_t number) {
  const int64_t own = int64_t{number} - d.first_expert();
  return own >= 0 && own < d.rank_experts() ? static_cast<int>(own) : -1;
}

template <class T>
void experts(const Call& call, const ExpertTile& op) {
  const Dims& d = *call.dims;
  const int count = d.experts_per_token;
  const int32_t* const routes = call.at<int32_t>(Buffer::ROUTES);
  const bool gated = call.phase->result == Result::kGated;
  // If each rank has a part of every expert, the results of all ranks are added, so only rank 0 adds the
  // bias.
  const float* const biases = gated || d.expert_parallel || d.rank == 0 ? call.bias() : nullptr;
  const int64_t panels = int64_t{panel_count(0, call.phase->width)} * call.phase->matrices;
  int32_t tokens[kPassRows], results[kPassRows];  // the rows of inputs and of results to be multiplied next
  int rows = 0;
  const auto multiply = [&](int expert) {
    const Tile tile{0, rows, op.col, op.cols};
    const Panel* const weights = call.weights<Panel>() + expert * panels;
    const float* const bias =
        biases == nullptr ? nullptr : biases + int64_t{expert} * call.phase->matrices * call.phase->width;
    if (gated)
      gemm<T>(call, tile, weights, bias, d.clipped_gates ? store_clipped<T> : store_gated<T, silu_exponent>,
              {tokens}, {results});
    else
      gemm<T>(call, tile, weights, bias, store_plain<T>, {results}, {results});
    rows = 0;
  };
  const auto add = [&](int r, int j) {
    tokens[rows] = r;
    results[rows++] = r * count + j;
  };
  for (int r = op.row; r < op.row + op.rows; ++r) {
    const int32_t* const own = routes + int64_t{r} * count;
    if (!d.by_expert()) {
      const int expert = own_expert(d, own[op.place]);
      if (expert < 0) continue;
      add(r, op.place);
      multiply(expert);
      continue;
    }
    int j = 0;
    while (j < count && own_expert(d, own[j]) != op.place) ++j;
    if (j < count) add(r, j);
    if (rows == kPassRows) multiply(op.place);
  }
  if (rows > 0) multiply(op.place);
}

// Adds up the weighted results of each row's experts, in order. Skips experts that other ranks have.
template <class T>
void combine(const Call& call, const Run& op) {
  constexpr int kColumns = 256;
  const Dims& d = *call.dims;
  const int count = d.experts_per_token, hidden = d.hidden;
  for (int r = op.row; r < op.row + op.rows; ++r) {
    const int32_t* const routes = call.at<int32_t>(Buffer::ROUTES) + int64_t{r} * count;
    const float* const weights = call.at<float>(Buffer::ROUTE_WEIGHTS) + int64_t{r} * count;
    const T* const inputs = call.inputs<T>() + int64_t{r} * count * hidden;
    for (int first = 0; first < hidden; first += kColumns) {
      const int columns = lower_of(hidden - first, kColumns);
      float sums[kColumns];
      for (int i = 0; i < columns; i += kLanes) {
        F32 sum{};
        for (int j = 0; j < count; ++j)
          if (own_expert(d, routes[j]) >= 0)
            sum += load(inputs + int64_t{j} * hidden + first + i, columns - i) * weights[j];
        store(sums + i, sum);
      }
      if (call.phase->result == Result::kPartial)
        store_partial<T>(call, r, first, columns, sums);
      else
        add_residual(call, r, first, columns, sums);
    }
  }
}

}  // namespace mk::MK_SIMD
