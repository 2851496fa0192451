// Draws a token from unnormalised probabilities. This is the part of the `sample` operation that uses no SIMD
// code, so it is compiled only once, not for each instruction set.
#pragma once
#include <stdint.h>

namespace mk {

// Draws one of `vocab` tokens. `e` has each token's weight: at least 0, and the largest is 1. Three filters
// run in this order, and set the weights of the tokens that they reject to zero:
//   min-p  rejects weights below min_p
//   top-k  keeps the top_k largest weights (0: all)
//   top-p  keeps as many of the largest weights as are needed to reach the fraction top_p of their total
// Of equal weights, those of lower token ids are kept first. `u` is a random number, at least 0 and below 1.
// The result is the first token, in id order, at which the cumulative weight exceeds u times the total of the
// remaining weights. If all weights are zero, the result is `fallback`.
int32_t draw(float* e, int32_t vocab, float min_p, int32_t top_k, float top_p, double u, int32_t fallback);

}  // namespace mk
