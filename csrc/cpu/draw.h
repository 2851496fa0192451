// Chooses a token from unnormalised probabilities: the part of `sample` that needs no SIMD.
#pragma once
#include <stdint.h>

namespace mk {

// One token of `vocab`. The weights e in [0, 1], whose largest is 1, are cut by min-p (relative to the
// largest), then to the top_k largest (0: all), then to the fewest largest whose share reaches top_p; among
// equals the lowest id wins. The result is the first kept token, in id order, whose cumulative weight exceeds
// u of the total. Cut entries of e become zero. `fallback` is returned if no token has weight.
int32_t draw(float* e, int32_t vocab, float min_p, int32_t top_k, float top_p, double u, int32_t fallback);

}  // namespace mk
