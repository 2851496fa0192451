// What the workers of one rank share: its memory, its cache, and the counters for which instructions wait.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <vector>

#include "cache.h"
#include "fluid.h"
#include "worker.h"

namespace mk::simulate {

struct Counter {
  // Number of arrivals that the counter still expects. It has 64 bits because a faulty program may have far
  // more arrivals than the counter expects.
  int64_t left = 0;
  Worker* waiter = nullptr;
  double met = 0.0;  // time at which the latest arrival becomes visible to waiting workers
};

class Device {
 public:
  Device(const Program& p, const Costs& c, int64_t rank)
      : memory(c.memory_bytes_per_s, c.worker_bytes_per_s),
        cached(c.cache_bytes_per_s, c.worker_bytes_per_s),
        cache_(c.cache_bytes, p.key_bytes + rank * p.keys, p.keys, p.layered_keys),
        window_(c.window_bytes),
        width_(p.counters),
        splits_(p.splits) {
    for (int32_t block = 0; block <= p.layers; ++block) {
      const int32_t* totals = p.totals[block == 0 ? 0 : block == p.layers ? 2 : 1] + rank * width_;
      for (int64_t i = 0; i < width_; ++i) counters_.push_back({.left = totals[i]});
    }
  }

  // Each layer has its own set ("block") of counters, and so has the epilogue.
  Counter& counter(int32_t block, int32_t index) { return counters_[block * width_ + index]; }

  // Counts a task that has ended, and returns whether it sends its signals now. If several tasks divide
  // the KV tokens of the same rows (a split), only the last of them to end sends signals.
  bool completes(const Task& task) {
    if (task.split < 0) return true;
    int32_t& arrived = splits_[task.split];
    const bool last = ++arrived == task.parts;
    if (last) arrived = 0;
    return last;
  }

  // Reads `bytes` bytes of cache entry `key` and returns how many of them were not in the cache. A negative
  // key means data that is never cached.
  double missing(double now, int32_t key, int32_t layer, double bytes) {
    if (key < 0) return bytes;
    const double missing = cache_.read(key, layer, bytes, filled(now));
    write_back(now);
    return missing;
  }
  // Starts to load `bytes` bytes: all of them pass through the cache, and `missing` of them come from
  // memory. `who` tells which worker's load it is. Returns the number of transfers that have begun.
  int load(double now, double bytes, double missing, int32_t who) {
    cached.add(now, bytes, who);
    if (missing <= 0) return 1;
    memory.add(now, missing, who);
    return 2;
  }
  void store(double now, int32_t key, double bytes) {
    cache_.write(key, bytes, filled(now));
    stored_ += bytes;
    write_back(now);
  }

  // Returns how many seconds a small access waits: all bytes that are in flight when it begins arrive first
  // (Little's law). At most `window_` bytes of each transfer are in flight.
  double queue_s(double now) const {
    return std::max(memory.backlog_s(now, window_), cached.backlog_s(now, window_));
  }

  Shared memory, cached;  // the transfers that share the bandwidth of memory, and of the cache

 private:
  double filled(double now) const { return memory.delivered(now) + stored_; }
  void write_back(double now) {
    const double bytes = cache_.take_written_back();
    if (bytes > 0) memory.add(now, bytes, -1);
  }

  Cache cache_;
  double stored_ = 0.0;  // bytes
  const double window_;  // bytes
  int64_t width_;        // number of counters in a block
  std::vector<Counter> counters_;
  std::vector<int32_t> splits_;  // how many tasks of each split have ended
};

}  // namespace mk::simulate
