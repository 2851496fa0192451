// o_proj and down_proj: a projection added to the residual stream.
#pragma once
#include "../gemm.h"

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
  add_projection(call, call.at<T>(Buffer::ATTN), d.q_cols(), call.at<T>(Buffer::W_O),
                 d.attention_bias ? call.at<float>(Buffer::B_O) : nullptr, op.row, op.rows, op.col, op.cols);
}

template <class T>
void down_proj(const Call& call, const DownProj& op) {
  const Dims& d = *call.dims;
  add_projection(call, call.at<T>(Buffer::ACT), d.ffn, call.at<T>(Buffer::W_DOWN),
                 d.mlp_bias ? call.at<float>(Buffer::B_DOWN) : nullptr, op.row, op.rows, op.col, op.cols);
}

}  // namespace mk::MK_SIMD
