#pragma once
#include "../gemm.h"
#include "store.h"

namespace mk::MK_SIMD {

// LOGITS[i] = Y[i] LM_HEAD^T, over the rank's part of the vocabulary, at the rank that samples row i.
template <class T>
void lm_head(const Call& call, const LmHead& op) {
  const Dims& d = *call.dims;
  gemm_columns(call, call.at<T>(Buffer::Y), d.hidden, call.at<T>(Buffer::LM_HEAD), op.row, op.rows, op.col,
               op.cols, [&](int r, int first, int n, const float* t) {
                 const int sampler = r / d.own_logit_rows();
                 store_to(call, Buffer::LOGITS, {sampler, sampler + 1},
                          int64_t{r} * d.vocab + d.first_vocab() + first, t, n);
               });
}

}  // namespace mk::MK_SIMD
