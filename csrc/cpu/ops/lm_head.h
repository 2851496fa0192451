#pragma once
#include "../gemm.h"

namespace mk::MK_SIMD {

// LOGITS[i] = Y[i] LM_HEAD^T.
template <class T>
void lm_head(const Call& call, const LmHead& op) {
  const Dims& d = *call.dims;
  gemm_columns(call, call.at<T>(Buffer::Y), d.hidden, call.at<T>(Buffer::LM_HEAD), op.row, op.rows, op.col,
               op.cols, [&](int r, int first, int n, const float* t) {
                 memcpy(call.at<float>(Buffer::LOGITS) + int64_t{r} * d.vocab + first, t, n * sizeof(float));
               });
}

}  // namespace mk::MK_SIMD
