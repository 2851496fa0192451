// Draws a token from unnormalised probabilities. This is the part of the `sample` operation that uses no SIMD
// code, so it is compiled only once, not for each instruction set.
#pragma once
#include <stdint.h>

namespace mk {

// Draws one of `vocab` tokens. The weights `e` are between 0 and 1, and the largest is 1. Three filters run
// in this order and set the weights of the tokens that they reject to zero. The first rejects weights below
// min_p. The second keeps only the top_k largest weights (0: all). The third keeps only as many of the
// largest weights as are needed to reach the fraction top_p of their total. Among equal weights, those of the
// lowest token ids are kept. The result is the first token, in id order, whose cumulative weight exceeds u
// times the total of the remaining weights, or `fallback` if all weights are zero.
int32_t draw(float* e, int32_t vocab, float min_p, int32_t top_k, float top_p, double u, int32_t fallback);

}  // namespace mk
