#pragma once
#include "call.h"
#include "memory.h"

namespace mk {

// Returns the cosine and sine of an angle from 0 to about 2^30. The angle is reduced to at most pi/4 in
// magnitude. The cosine and the sine are then computed as Taylor series in double, which is exact enough for
// float32.
MK_FN Pair cos_sin(float angle) {
  constexpr double kQuarters = 0.63661977236758134308;  // quarter turns in a radian
  constexpr double kQuarter = 1.57079632679489655800, kQuarterRest = 6.12323399573676603587e-17;
  const int quadrant = static_cast<int>(angle * kQuarters + 0.5);
  const double x = (angle - quadrant * kQuarter) - quadrant * kQuarterRest, square = x * x;
  double sin = 1.0, cos = 1.0;
  MK_UNROLL for (int n = 13; n > 1; n -= 2) {
    sin = 1.0 - square * (1.0 / (n * (n - 1))) * sin;
    cos = 1.0 - square * (1.0 / ((n - 1) * (n - 2))) * cos;
  }
  sin *= x;
  const double c = quadrant & 1 ? sin : cos, s = quadrant & 1 ? cos : sin;
  return {static_cast<float>((quadrant + 1) & 2 ? -c : c), static_cast<float>(quadrant & 2 ? -s : s)};
}

// Computes the RoPE table. For row r and each RoPE pair, the angle is the row's position times the pair's
// inverse frequency. Its cosine and sine, both times the pair's factor, are stored in row r of the output.
// The phase's weights are the inverse frequencies, followed by the factors. Each lane computes one pair at a
// time.
template <class P>
MK_FN void rope(P& p, const Call& call, const Run& op) {
  const Sizes& d = *call.dims;
  const float* inv_freq = call.weights<float>(call.phase().weights);
  const float* factors = inv_freq + d.head_dim / 2;
  float* out = call.at<float>(call.phase().output);
  for (int r = op.row + call.warp; r < op.row + op.rows; r += kConsumerWarps) {
    const float position = static_cast<float>(call.step->positions[r]);
    for (int i = p.lane(); i < d.head_dim / 2; i += P::kLanes) {
      const Pair angle = cos_sin(position * inv_freq[i]);
      store_pair(out + int64_t{r} * d.head_dim + 2 * i, {factors[i] * angle.a, factors[i] * angle.b});
    }
  }
}

}  // namespace mk
