// Measures the peak memory bandwidth and FLOP/s that this machine reaches with a SIMD path.
#pragma once
#include <stdint.h>

#include "simd/kernels.h"

namespace mk {

// Returns the bandwidth, in bytes per second, with which `threads` threads together read `bytes` bytes of
// memory. Repeats the measurement for about `seconds` seconds and returns the best result.
double probe_read(const Kernels& kernels, int threads, int64_t bytes, double seconds);

// Measures arithmetic speed. Runs `kernel`, a loop of multiply-adds, on `threads` threads at once, and
// returns the operations per second of all threads together. Repeats this for about `seconds` seconds and
// returns the best result.
double probe_multiply_add(double (*kernel)(int64_t, double*), int threads, double seconds);

}  // namespace mk
