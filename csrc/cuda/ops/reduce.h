#pragma once
#include "../../common/index.h"
#include "call.h"
#include "memory.h"

namespace mk {

// The second half of an all-reduce. For each row r of a tile: output[r] += inputs[0][r] + inputs[1][r] + ...
// + bias (if any), where inputs[i] are the partial sums of rank i. If the phase's result is "stored", the sum
// replaces output[r] instead. The tile's first column and width are multiples of eight.
template <class P>
MK_FN void reduce(P& p, const Call& call, const Tile& op) {
  const Sizes& d = *call.dims;
  const Phase& phase = call.phase();
  const float* bias = call.weights<float>(phase.bias);
  const uint16_t* partials = call.at<uint16_t>(phase.inputs);
  const int64_t slot = int64_t{d.own_rows()} * d.hidden;
  const int groups = op.cols / 8;
  MK_LOOP for (int i = call.warp * P::kLanes + p.lane(); i < op.rows * groups;
               i += kConsumerWarps * P::kLanes) {
    const int r = op.row + i / groups, k = op.col + i % groups * 8;
    float* x = call.at<float>(phase.output) + int64_t{r} * d.hidden + k;
    const Eight before = phase.result == Result::kStored ? Eight{} : load_eight(x);
    const uint16_t* partial = partials + int64_t{d.reduce_place(r)} * d.hidden + k;
    Eight sum = load_eight(partial);
    MK_UNROLL_4 for (int rank = 1; rank < phase.ranks; ++rank) sum += load_eight(partial + rank * slot);
    if (bias) sum += read_eight(bias + k);
    sum += before;
    store_eight(x, sum);
  }
}

}  // namespace mk
