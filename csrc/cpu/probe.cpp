#include "probe.h"

#include <string.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "interpreter.h"
#include "packing.h"

namespace mk {
namespace {

// Calls pass(thread) on all threads at once, again and again for about `seconds` seconds. Returns the
// shortest time, in seconds, in which all threads completed a call.
template <class Pass>
double best_round(int threads, double seconds, const Pass& pass) {
  std::atomic<int> arrived{0}, round{0};
  std::atomic<bool> stop{false};
  double best = 1e30;
  const auto work = [&](int t) {
    const uint64_t start = clock_ns();
    for (int r = 0; !stop.load(); ++r) {
      arrived.fetch_add(1);
      if (t == 0) {
        while (arrived.load() < threads) std::this_thread::yield();
        arrived.store(0);
        round.store(r + 1);
      }
      while (round.load() <= r) std::this_thread::yield();
      const uint64_t begin = clock_ns();
      pass(t);
      arrived.fetch_add(1);
      if (t == 0) {
        while (arrived.load() < threads) std::this_thread::yield();
        const uint64_t end = clock_ns();
        best = std::min(best, static_cast<double>(end - begin) * 1e-9);
        if (static_cast<double>(end - start) * 1e-9 > seconds) stop.store(true);
        arrived.store(0);
        round.store(-1 - r);
      }
      while (round.load() > r) std::this_thread::yield();
    }
  };
  std::vector<std::thread> pool;
  for (int t = 1; t < threads; ++t) pool.emplace_back(work, t);
  work(0);
  for (std::thread& t : pool) t.join();
  return best;
}

}  // namespace

double probe_read(const Kernels& kernels, int threads, int64_t bytes, double seconds) {
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

double probe_multiply_add(double (*kernel)(int64_t, double*), int threads, double seconds) {
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
