// Checks that all indices and ranges in a program to be simulated are within bounds, before any code uses
// them.
#pragma once
#include <stdint.h>

#include "../common/isa.h"
#include "simulate.h"

namespace mk::simulate {

inline bool inside(int64_t value, int64_t end) { return value >= 0 && value < end; }

inline bool is_range(int32_t first, int32_t end, int32_t size) {
  return first >= 0 && first <= end && end <= size;
}

inline bool is_sound(const Program& p, const Record& r) {
  return inside(r.phase, kMaxPhases + 1) && is_range(r.first_task, r.end_task, p.task_count) &&
         r.first_task < r.end_task && r.queue < p.queues;
}

inline bool is_sound(const Program& p, const Task& t) {
  for (int32_t key : {t.weight_key, t.read_key, t.write_key})
    if (key >= p.keys) return false;
  return t.split < p.splits && is_range(t.first_wait, t.end_wait, p.wait_count) &&
         is_range(t.first_signal, t.end_signal, p.signal_count);
}

// Checks that an instruction record signals only counters that exist. Each layer has its own set of counters.
// A signal may go to the next layer's set (`next`) only if the record runs once per layer, which is so for
// the program's body and for queues.
inline bool has_blocks(const Program& p, int list, const Record& r) {
  if (list == kBody || list == kQueues) return true;
  for (int32_t s = p.tasks[r.first_task].first_signal; s < p.tasks[r.end_task - 1].end_signal; ++s)
    if (p.signals[s].next) return false;
  return true;
}

inline bool is_sound(const Program& p) {
  if (p.ranks < 1 || p.workers < 1 || p.layers < 1 || p.counters < 1 || p.queues < 0 || p.splits < 0)
    return false;
  for (int32_t w = 0; w < p.wait_count; ++w)
    if (!inside(p.waits[w].counter, p.counters)) return false;
  for (int32_t s = 0; s < p.signal_count; ++s) {
    const Signal& signal = p.signals[s];
    if (!inside(signal.counter, p.counters) || signal.rank >= p.ranks || !inside(signal.next, 2))
      return false;
  }
  for (int32_t t = 0; t < p.task_count; ++t)
    if (!is_sound(p, p.tasks[t])) return false;
  for (int32_t r = 0; r < p.record_count; ++r)
    if (!is_sound(p, p.records[r])) return false;
  for (int list = 0; list < kLists; ++list) {
    const int32_t streams = p.ranks * (list == kQueues ? p.queues : p.workers);
    const int32_t* offsets = p.offsets[list];
    for (int32_t s = 0; s < streams; ++s) {
      if (!is_range(offsets[s], offsets[s + 1], p.record_count)) return false;
      for (int32_t r = offsets[s]; r < offsets[s + 1]; ++r) {
        if (!has_blocks(p, list, p.records[r])) return false;
        const int32_t queue = p.records[r].queue;
        if (queue < 0) continue;
        const int32_t* of = p.offsets[kQueues] + (s / p.workers) * p.queues + queue;
        if (list != kBody || p.records[r].claims_end > of[1] - of[0]) return false;
      }
    }
  }
  return true;
}

}  // namespace mk::simulate
