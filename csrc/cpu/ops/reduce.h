#pragma once
#include "../simd/simd.h"

namespace mk::MK_SIMD {

// The second half of an all-reduce. For each row r of a tile, adds the partial sums of all ranks and the
// bias, if there is one, to the residual: output[r] += inputs[0][r] + inputs[1][r] + ... + bias. If the
// phase's result is "stored", the sum replaces output[r] instead.
template <class T>
void reduce(const Call& call, const Tile& op) {
  const Dims& d = *call.dims;
  const T* partials = call.inputs<T>();
  const float* bias = call.bias();
  const bool stored = call.phase->result == Result::kStored;
  for (int r = op.row; r < op.row + op.rows; ++r) {
    float* x = call.output<float>() + int64_t{r} * d.hidden + op.col;
    for (int i = 0; i < op.cols; i += kLanes) {
      const int n = op.cols - i;
      F32 sum{};
      for (int k = 0; k < call.phase->ranks; ++k) {
        const F32 part = load(partials + int64_t{d.reduce_row(k, r)} * d.hidden + op.col + i, n);
        sum = k == 0 ? part : sum + part;
      }
      if (bias) sum += load(bias + op.col + i, n);
      store(x + i, stored ? sum : load(x + i, n) + sum, n);
    }
  }
}

}  // namespace mk::MK_SIMD
