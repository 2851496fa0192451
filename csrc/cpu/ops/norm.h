// Instructions that normalise rows (RMS norm). If such an instruction has no norm weights, it only converts
// the rows to the compute type. `norm` writes the results to the rank's own copy of the output, and
// `send_norm` then copies them to the other ranks that need them.
#pragma once
#include "heads.h"
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

// Normalises each row and adds the result, not rounded to the compute type, to the residual.
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

// Normalises each row's q, all heads together, and its k too. Stores this rank's heads like `heads`.
template <class T>
inline void norm_qkv(const Call& call, const Run& op) {
  const Dims& d = *call.dims;
  const int q = d.heads * d.head_dim, k = d.kv_heads * d.head_dim;
  const float* const weights = call.weights<float>();
  const struct {
    int at, col, cols;
  } parts[] = {
      {d.first_head() * d.head_dim, 0, d.q_cols()},
      {q + d.first_kv_head() * d.head_dim, d.q_cols(), d.kv_cols()},
      {q + k + d.first_kv_head() * d.head_dim, d.q_cols() + d.kv_cols(), d.kv_cols()},
  };
  for (int r = op.row; r < op.row + op.rows; ++r) {
    const float* const row = call.inputs<float>() + int64_t{r} * (q + 2 * k);
    const float scales[] = {rms_scale(row, q, d.rms_eps), rms_scale(row + q, k, d.rms_eps)};
    for (int p = 0; p < 3; ++p) {
      for (int i = 0; i < parts[p].cols; i += d.head_dim) {
        const int at = parts[p].at + i;
        float t[kMostHeadDim];
        for (int e = 0; e < d.head_dim; e += kLanes) {
          const int n = d.head_dim - e;
          const float* x = row + at + e;
          store(t + e, p == 2 ? load(x, n) : normalised(x, weights + at + e, scales[p], n), n);
        }
        store_heads<T>(call, r, parts[p].col + i, d.head_dim, t);
      }
    }
  }
}

template <class T>
void norm(const Call& call, const Run& op) {
  const int n = call.phase->inner;
  if (call.phase->result == Result::kResidual) return add_norm(call, op);
  if (call.phase->result == Result::kHeads) return norm_qkv<T>(call, op);
  each_norm(call, op, [&](int64_t to, int64_t from) {
    T* out = call.output<T>() + to * n;
    if (from < 0) {
      memset(out, 0, n * sizeof(T));
      return;
    }
    const float* x = call.inputs<float>() + from * n;
    if (call.phase->weights == Buffer::kNone)
      for (int i = 0; i < n; i += kLanes) store(out + i, load(x + i, n - i), n - i);
    else
      rms_norm(x, call.weights<float>(), n, call.dims->rms_eps, out);
  });
}

template <class T>
void send_norm(const Call& call, const Run& op) {
  const int n = call.phase->inner;
  if (call.phase->result != Result::kNone) return;  // the results are only for the rank itself
  each_norm(call, op, [&](int64_t to, int64_t) {
    store_to(call, call.phase->output, norm_ranks(*call.dims), to * n, call.output<T>() + to * n, n);
  });
}

}  // namespace mk::MK_SIMD
