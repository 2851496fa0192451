#pragma once
#include "isa.h"

namespace mk {

// Returns 24 random bits for sampling the token at `position` of a completion; `choice` is the completion's
// number within its request. The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3", SC 2011) with key (seed_low, seed_high) and counter (position, choice, 0, 0). The result is
// the upper 24 bits of its first output word.
MK_DIMS_FN inline uint32_t random_bits(int32_t seed_low, int32_t seed_high, int32_t position,
                                       int32_t choice) {
  uint32_t key[2] = {static_cast<uint32_t>(seed_low), static_cast<uint32_t>(seed_high)};
  uint32_t x[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(choice), 0, 0};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * x[0], b = uint64_t{0xCD9E8D57} * x[2];
    x[0] = static_cast<uint32_t>(b >> 32) ^ x[1] ^ key[0];
    x[1] = static_cast<uint32_t>(b);
    x[2] = static_cast<uint32_t>(a >> 32) ^ x[3] ^ key[1];
    x[3] = static_cast<uint32_t>(a);
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return x[0] >> 8;
}

}  // namespace mk
