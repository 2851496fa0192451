#pragma once
#include "../../common/index.h"
#include "call.h"
#include "memory.h"

namespace mk {

// o_reduce and down_reduce: X[r] += (REDUCE[0][r] + REDUCE[1][r] + ..) + bias, where there is one, on a tile
// whose columns are multiples of eight.
template <class P>
MK_FN void reduce(P& p, const Call& call, Opcode opcode, const OReduce& op) {
  const Sizes& d = *call.dims;
  const bool heads = opcode == Opcode::o_reduce;
  const int ranks = heads ? d.head_ranks() : d.ffn_ranks();
  const bool biased = heads ? d.attention_bias : d.mlp_bias;
  const float* bias = biased ? call.at<float>(heads ? Buffer::B_O : Buffer::B_DOWN) : nullptr;
  const uint16_t* partials = call.at<uint16_t>(Buffer::REDUCE);
  const int64_t slot = int64_t{reduce_slot(d)} * d.hidden;
  const int groups = op.cols / 8;
  MK_LOOP for (int i = call.warp * P::kLanes + p.lane(); i < op.rows * groups;
               i += kConsumerWarps * P::kLanes) {
    const int r = op.row + i / groups, k = op.col + i % groups * 8;
    float* x = call.at<float>(Buffer::X) + int64_t{r} * d.hidden + k;
    const Eight before = load_eight(x);
    const uint16_t* partial = partials + int64_t{reduce_place(d, r)} * d.hidden + k;
    Eight sum = load_eight(partial);
    MK_UNROLL_4 for (int rank = 1; rank < ranks; ++rank) {
      const Eight more = load_eight(partial + rank * slot);
      MK_UNROLL for (int e = 0; e < 8; ++e) sum.v[e] += more.v[e];
    }
    if (bias) {
      const Eight b = read_eight(bias + k);
      MK_UNROLL for (int e = 0; e < 8; ++e) sum.v[e] += b.v[e];
    }
    MK_UNROLL for (int e = 0; e < 8; ++e) sum.v[e] += before.v[e];
    store_eight(x, sum);
  }
}

}  // namespace mk
