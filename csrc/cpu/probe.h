// Measures the ceilings of this machine with the chosen SIMD path.
#pragma once
#include <stdint.h>

#include "kernels.h"

namespace mk {

// Bytes per second that `threads` threads read together from `bytes` of memory, in the fastest pass of those
// made within `seconds`.
double probe_read(const Kernels& kernels, int threads, int64_t bytes, double seconds);

// float32 FLOP per second of multiply-adds on `threads` threads, in the fastest pass of those made within
// `seconds`.
double probe_multiply_add(const Kernels& kernels, int threads, double seconds);

}  // namespace mk
