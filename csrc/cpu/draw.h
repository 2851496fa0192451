// Choosing a token from unnormalised probabilities: the part of `sample` that needs no SIMD.
#pragma once
#include <stdint.h>

namespace mk {

// Uniform in [0, 1): 24 bits of Philox4x32-10 (Salmon et al., SC 2011) with key (seed_low, seed_high) and
// counter (position, choice, 0, 0).
double uniform(int32_t seed_low, int32_t seed_high, int32_t position, int32_t choice);

// One token of `vocab`: weights e in [0, 1], the largest 1, are cut by min-p (relative to the largest), then
// to the top_k largest (0: all), then to the fewest largest whose share reaches top_p; ties go to the lowest
// id. Among the kept, in id order, the first whose cumulative weight exceeds u of the total. Cut entries of e
// become zero. `fallback` is returned where nothing has weight.
int32_t draw(float* e, int32_t vocab, float min_p, int32_t top_k, float top_p, double u, int32_t fallback);

}  // namespace mk
