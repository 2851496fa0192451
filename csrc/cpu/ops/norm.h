// RMS norms of rows of X. The rows are written to the own copy first; `send_` then copies them to the other
// ranks that need them.
#pragma once
#include <math.h>

#include "../../common/record.h"
#include "store.h"

namespace mk::MK_SIMD {

// out = x / sqrt(mean(x^2) + eps) * weight, rounded once.
template <class T>
inline void rms_norm(const float* x, const float* weight, int n, float eps, T* out) {
  F32 squares{};
  for (int i = 0; i < n; i += kLanes) {
    const F32 v = load(x + i, n - i);
    squares += v * v;
  }
  const float scale = 1.0f / sqrtf(sum(squares) / static_cast<float>(n) + eps);
  for (int i = 0; i < n; i += kLanes) {
    store(out + i, load(x + i, n - i) * scale * load(weight + i, n - i), n - i);
  }
}

template <class T>
inline void norm_rows(const Call& call, const float* weight, int row, int rows) {
  const Dims& d = *call.dims;
  for (int r = row; r < row + rows; ++r) {
    const int64_t at = int64_t{r} * d.hidden;
    rms_norm(call.at<float>(Buffer::X) + at, weight, d.hidden, d.rms_eps, call.at<T>(Buffer::H) + at);
  }
}

template <class T>
void first_norm(const Call& call, const FirstNorm& op) {
  norm_rows<T>(call, call.at<float>(Buffer::ATTN_NORM), op.row, op.rows);
}

template <class T>
void attn_norm(const Call& call, const AttnNorm& op) {
  norm_rows<T>(call, call.at<float>(Buffer::ATTN_NORM), op.row, op.rows);
}

template <class T>
void next_norm(const Call& call, const NextNorm& op) {
  norm_rows<T>(call, call.next<float>(Buffer::ATTN_NORM), op.row, op.rows);
}

template <class T>
void mlp_norm(const Call& call, const MlpNorm& op) {
  norm_rows<T>(call, call.at<float>(Buffer::MLP_NORM), op.row, op.rows);
}

// The rows of H that any of them wrote: their operands are alike.
template <class T>
void send_norm(const Call& call, const int32_t* record) {
  const Dims& d = *call.dims;
  const AttnNorm& op = operands<AttnNorm>(record);
  const int64_t at = int64_t{op.row} * d.hidden;
  store_to(call, Buffer::H, norm_ranks(d), at, call.at<T>(Buffer::H) + at, int64_t{op.rows} * d.hidden);
}

template <class T>
void final_norm(const Call& call, const FinalNorm& op) {
  const Dims& d = *call.dims;
  for (int i = op.row; i < op.row + op.rows; ++i) {
    if (!norms_logit_row(d, *call.step, i)) continue;
    T* y = call.at<T>(Buffer::Y) + int64_t{i} * d.hidden;
    const int32_t r = call.step->logit_rows[i];
    if (r < 0) {
      memset(y, 0, d.hidden * sizeof(T));
    } else {
      rms_norm(call.at<float>(Buffer::X) + int64_t{r} * d.hidden, call.at<float>(Buffer::FINAL_NORM),
               d.hidden, d.rms_eps, y);
    }
  }
}

template <class T>
void send_final_norm(const Call& call, const int32_t* record) {
  const Dims& d = *call.dims;
  const FinalNorm& op = operands<FinalNorm>(record);
  for (int i = op.row; i < op.row + op.rows; ++i) {
    if (!norms_logit_row(d, *call.step, i)) continue;
    const int64_t at = int64_t{i} * d.hidden;
    store_to(call, Buffer::Y, norm_ranks(d), at, call.at<T>(Buffer::Y) + at, d.hidden);
  }
}

}  // namespace mk::MK_SIMD
