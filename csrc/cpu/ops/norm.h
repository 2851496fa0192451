// RMS norms of rows. `norm` writes the results to the rank's own copy of the output. `send_norm` then copies
// them to the other ranks that need them.
#pragma once
#include "../rms_norm.h"
#include "store.h"

namespace mk::MK_SIMD {

// Calls row(to, from) for each row that this rank normalises. `from` is the row's index in the inputs, and
// `to` its index in the output. If the output row is padding, `from` is negative.
template <class F>
inline void each_norm(const Call& call, const Run& op, const F& row) {
  const bool logit = call.phase->rows == Rows::kLogit;
  for (int i = op.row; i < op.row + op.rows; ++i) {
    if (!logit)
      row(i, i);
    else if (norms_logit_row(*call.dims, *call.step, i))
      row(i, call.step->logit_rows[i]);
  }
}

// Adds the norm of each row to the residual, not rounded to the compute type.
inline void add_norm(const Call& call, const Run& op) {
  const int n = call.phase->inner;
  for (int64_t r = op.row; r < op.row + op.rows; ++r) {
    const float *x = call.inputs<float>() + r * n, *weight = call.weights<float>();
    float* out = call.output<float>() + r * n;
    const float scale = rms_scale(x, n, call.dims->rms_eps);
    for (int i = 0; i < n; i += kLanes)
      store(out + i, load(out + i, n - i) + normalised(x + i, weight + i, scale, n - i), n - i);
  }
}

template <class T>
void norm(const Call& call, const Run& op) {
  const int n = call.phase->inner;
  if (call.phase->result == Result::kResidual) return add_norm(call, op);
  each_norm(call, op, [&](int64_t to, int64_t from) {
    T* out = call.output<T>() + to * n;
    if (from < 0)
      memset(out, 0, n * sizeof(T));
    else
      rms_norm(call.inputs<float>() + from * n, call.weights<float>(), n, call.dims->rms_eps, out);
  });
}

template <class T>
void send_norm(const Call& call, const Run& op) {
  const int n = call.phase->inner;
  if (call.phase->result == Result::kResidual) return;  // it is added only to the rank's own residual
  each_norm(call, op, [&](int64_t to, int64_t) {
    store_to(call, call.phase->output, norm_ranks(*call.dims), to * n, call.output<T>() + to * n, n);
  });
}

}  // namespace mk::MK_SIMD
