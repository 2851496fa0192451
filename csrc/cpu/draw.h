// Chooses a token from unnormalised probabilities: the part of `sample` that needs no SIMD.
#pragma once
#include <stdint.h>

namespace mk {

// Draws one of `vocab` tokens. The weights e lie in [0, 1], and the largest is 1. Three cuts, one after
// another, set weights to zero: weights below min_p are cut; only the top_k largest are kept (0: all); only
// the fewest largest are kept that reach the fraction top_p of the total. Of equal weights, those with the
// lowest ids are kept. The result is the first token, in id order, whose cumulative weight exceeds the
// fraction u of the kept total. `fallback` is returned if no token has weight.
int32_t draw(float* e, int32_t vocab, float min_p, int32_t top_k, float top_p, double u, int32_t fallback);

}  // namespace mk
