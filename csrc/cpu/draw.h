// Choosing a token from unnormalised probabilities: the part of `sample` that needs no SIMD.
#pragma once
#include <stdint.h>

namespace mk {

// One token of `vocab`: weights e in [0, 1], the largest 1, are cut by min-p (relative to the largest), then
// to the top_k largest (0: all), then to the fewest largest whose share reaches top_p; ties go to the lowest
// id. Among the kept, in id order, the first whose cumulative weight exceeds u of the total. Cut entries of e
// become zero. `fallback` is returned where nothing has weight.
int32_t draw(float* e, int32_t vocab, float min_p, int32_t top_k, float top_p, double u, int32_t fallback);

}  // namespace mk
