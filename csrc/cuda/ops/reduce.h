#pragma once
#include "../../common/index.h"
#include "call.h"
#include "memory.h"

namespace mk {

// X[r] += (REDUCE[0][r] + REDUCE[1][r] + ..) + bias on a tile whose columns are multiples of eight; bias may
// be null.
template <class P>
MK_FN void add_partials(P& p, const Call& call, int ranks, const float* bias, int row, int rows, int col,
                        int cols) {
  const Dims& d = *call.dims;
  const uint16_t* partials = call.at<uint16_t>(Buffer::REDUCE);
  const int groups = cols / 8;
  for (int i = call.warp * P::kLanes + p.lane(); i < rows * groups; i += kConsumerWarps * P::kLanes) {
    const int r = row + i / groups, k = col + i % groups * 8;
    float* x = call.at<float>(Buffer::X) + int64_t{r} * d.hidden + k;
    const Eight before = load_eight(x);
    Eight sum = load_eight(partials + reduce_row(d, 0, r) * d.hidden + k);
    for (int rank = 1; rank < ranks; ++rank) {
      const Eight partial = load_eight(partials + reduce_row(d, rank, r) * d.hidden + k);
      MK_UNROLL for (int e = 0; e < 8; ++e) sum.v[e] += partial.v[e];
    }
    if (bias) {
      const Eight b = read_eight(bias + k);
      MK_UNROLL for (int e = 0; e < 8; ++e) sum.v[e] += b.v[e];
    }
    MK_UNROLL for (int e = 0; e < 8; ++e) sum.v[e] += before.v[e];
    store_eight(x, sum);
  }
}

template <class P>
MK_FN void o_reduce(P& p, const Call& call, const OReduce& op) {
  const Dims& d = *call.dims;
  add_partials(p, call, d.head_ranks(), d.attention_bias ? call.at<float>(Buffer::B_O) : nullptr, op.row,
               op.rows, op.col, op.cols);
}

template <class P>
MK_FN void down_reduce(P& p, const Call& call, const DownReduce& op) {
  const Dims& d = *call.dims;
  add_partials(p, call, d.ffn_ranks(), d.mlp_bias ? call.at<float>(Buffer::B_DOWN) : nullptr, op.row, op.rows,
               op.col, op.cols);
}

}  // namespace mk
