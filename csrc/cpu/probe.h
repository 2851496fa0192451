// Measures the peak memory bandwidth and FLOP/s that this machine reaches with a SIMD path.
#pragma once
#include <string.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

#include "interpreter.h"

namespace mk {

// Calls pass(thread) on all threads at once, again and again for about `seconds` seconds. Returns the
// shortest time, in seconds, in which all threads completed a call.
template <class Pass>
double best_round(int threads, double seconds, const Pass& pass) {
  std::barrier gate(threads);
  bool stop = false;
  double best = 1e30;
  const auto work = [&](int t) {
    for (const uint64_t start = clock_ns(); !stop;) {
      gate.arrive_and_wait();
      const uint64_t begin = clock_ns();
      pass(t);
      gate.arrive_and_wait();
      const uint64_t end = clock_ns();
      if (t == 0) {
        best = std::min(best, static_cast<double>(end - begin) * 1e-9);
        stop = static_cast<double>(end - start) * 1e-9 > seconds;
      }
      gate.arrive_and_wait();
    }
  };
  std::vector<std::thread> pool;
  for (int t = 1; t < threads; ++t) pool.emplace_back(work, t);
  work(0);
  for (std::thread& t : pool) t.join();
  return best;
}

// Returns the bandwidth, in bytes per second, with which `threads` threads together read `bytes` bytes of
// memory. Repeats the measurement for about `seconds` seconds and returns the best result.
inline double probe_read(const Kernels& kernels, int threads, int64_t bytes, double seconds) {
  const int64_t share = bytes / threads / 4096 * 4096;
  Arena arena;
  char* data = static_cast<char*>(arena.allocate(share * threads));
  memset(data, 1, share * threads);  // otherwise all addresses could map to one shared page of zeros
  std::atomic<double> sink{0.0};
  const double best = best_round(threads, seconds, [&](int t) {
    sink.store(kernels.read(data + t * share, share), std::memory_order_relaxed);
  });
  return static_cast<double>(share * threads) / best;
}

// Measures arithmetic speed. Runs `kernel`, a loop of multiply-adds, on `threads` threads at once, and
// returns the operations per second of all threads together. Repeats this for about `seconds` seconds and
// returns the best result.
inline double probe_multiply_add(double (*kernel)(int64_t, double*), int threads, double seconds) {
  constexpr int64_t kRounds = 1 << 20;
  std::atomic<double> sink{0.0};
  double flops = 0.0;
  const double best = best_round(threads, seconds, [&](int t) {
    double mine;
    sink.store(kernel(kRounds, &mine), std::memory_order_relaxed);
    if (t == 0) flops = mine;
  });
  return flops * threads / best;
}

}  // namespace mk
