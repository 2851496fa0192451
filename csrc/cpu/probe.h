// Measures the peak memory bandwidth and FLOP/s that this machine reaches with a SIMD path.
#pragma once
#include <stdint.h>

#include "kernels.h"

namespace mk {

// Returns the bandwidth, in bytes per second, with which `threads` threads together read `bytes` bytes of
// memory. Repeats the measurement for about `seconds` seconds and returns the best result.
double probe_read(const Kernels& kernels, int threads, int64_t bytes, double seconds);

// Returns the operations per second that `kernel`, one of the functions of Kernels that multiply and add,
// does on `threads` threads together. Repeats the measurement for about `seconds` seconds and returns the
// best result.
double probe_multiply_add(double (*kernel)(int64_t, double*), int threads, double seconds);

}  // namespace mk
