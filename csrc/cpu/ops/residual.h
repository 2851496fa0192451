// Projections into the residual stream: added at once, or stored as a partial of this rank and added by the
// owner.
#pragma once
#include "../gemm.h"
#include "store.h"

namespace mk::MK_SIMD {

// X[r] += a[r] w^T + bias on a tile; bias may be null.
template <class T>
inline void add_projection(const Call& call, const T* a, int k, const T* w, const float* bias, int row,
                           int rows, int col, int cols) {
  const int hidden = call.dims->hidden;
  gemm_columns(call, a, k, w, row, rows, col, cols, [&](int r, int first, int n, const float* t) {
    float* x = call.at<float>(Buffer::X) + int64_t{r} * hidden + first;
    for (int i = 0; i < n; i += kLanes) {
      F32 sum = load(t + i, n - i);
      if (bias) sum += load(bias + first + i, n - i);
      store(x + i, load(x + i, n - i) + sum, n - i);
    }
  });
}

template <class T>
void o_proj(const Call& call, const OProj& op) {
  const Dims& d = *call.dims;
  add_projection(call, call.at<T>(Buffer::ATTN), d.o_cols(), call.at<T>(Buffer::W_O),
                 d.attention_bias ? call.at<float>(Buffer::B_O) : nullptr, op.row, op.rows, op.col, op.cols);
}

template <class T>
void down_proj(const Call& call, const DownProj& op) {
  const Dims& d = *call.dims;
  add_projection(call, call.at<T>(Buffer::ACT), d.rank_ffn(), call.at<T>(Buffer::W_DOWN),
                 d.mlp_bias ? call.at<float>(Buffer::B_DOWN) : nullptr, op.row, op.rows, op.col, op.cols);
}

// REDUCE[this rank][r] = a[r] w^T on a tile, where the residual of r is kept.
template <class T>
inline void store_partial(const Call& call, const T* a, int k, const T* w, int row, int rows, int col,
                          int cols) {
  const Dims& d = *call.dims;
  gemm_columns(call, a, k, w, row, rows, col, cols, [&](int r, int first, int n, float* t) {
    store_to(call, Buffer::REDUCE, residual_ranks(d, r), reduce_row(d, d.rank, r) * d.hidden + first,
             narrow(t, n, T{}), n);
  });
}

// X[r] += (REDUCE[0][r] + REDUCE[1][r] + ..) + bias on a tile; bias may be null.
template <class T>
inline void add_partials(const Call& call, int ranks, const float* bias, int row, int rows, int col,
                         int cols) {
  const Dims& d = *call.dims;
  const T* partials = call.at<T>(Buffer::REDUCE);
  for (int r = row; r < row + rows; ++r) {
    float* x = call.at<float>(Buffer::X) + int64_t{r} * d.hidden + col;
    for (int i = 0; i < cols; i += kLanes) {
      const int n = cols - i;
      F32 sum{};
      for (int k = 0; k < ranks; ++k) {
        const T* p = partials + reduce_row(d, k, r) * d.hidden + col + i;
        sum = k == 0 ? load(p, n) : sum + load(p, n);
      }
      if (bias) sum += load(bias + col + i, n);
      store(x + i, load(x + i, n) + sum, n);
    }
  }
}

template <class T>
void o_partial(const Call& call, const OPartial& op) {
  store_partial(call, call.at<T>(Buffer::ATTN), call.dims->q_cols(), call.at<T>(Buffer::W_O), op.row, op.rows,
                op.col, op.cols);
}

template <class T>
void down_partial(const Call& call, const DownPartial& op) {
  store_partial(call, call.at<T>(Buffer::ACT), call.dims->rank_ffn(), call.at<T>(Buffer::W_DOWN), op.row,
                op.rows, op.col, op.cols);
}

template <class T>
void o_reduce(const Call& call, const OReduce& op) {
  const Dims& d = *call.dims;
  add_partials<T>(call, d.head_ranks(), d.attention_bias ? call.at<float>(Buffer::B_O) : nullptr, op.row,
                  op.rows, op.col, op.cols);
}

template <class T>
void down_reduce(const Call& call, const DownReduce& op) {
  const Dims& d = *call.dims;
  add_partials<T>(call, d.ffn_ranks(), d.mlp_bias ? call.at<float>(Buffer::B_DOWN) : nullptr, op.row, op.rows,
                  op.col, op.cols);
}

}  // namespace mk::MK_SIMD
