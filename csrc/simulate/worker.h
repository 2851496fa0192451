// A simulated worker (an SM or a CPU thread) is a pipeline of the roles below. Every role processes the
// worker's tasks in order; a task is an instruction, or one work item of attention. Loaded data goes
// into the worker's ring, a circular buffer in shared memory. The "head" of a task's load begins before
// the task's waits are satisfied, the "body" afterwards.
//   controller     sets up a task if fewer than `in_flight` tasks are between set-up and the end of their
//                  store
//   weight loader  loads the head: as many weights as the ring has room for, and inputs too if the waits are
//                  already satisfied; then prefetches some of the other weights into the L2 cache
//   input loader   waits for the task's counters, then loads the body: all remaining data
//   consumers      start to compute when the first bytes arrive, and compute no faster than bytes arrive
//   storer         stores the output on this rank and on others, after which the task's signals are sent
#pragma once
#include <stdint.h>

#include <algorithm>
#include <vector>

#include "../common/isa.h"
#include "fluid.h"
#include "simulate.h"

namespace mk::simulate {

constexpr int kDepth = 8;                        // length of the ring buffer `runs`: at least in_flight + 1
enum Part { kHead, kBodyPart, kAhead, kParts };  // parts of a load

// A task that a worker executes, and when its load, computation and store begin and end, in seconds.
// Times that are still unknown are kNever.
struct Run {
  int32_t record = 0, layer = 0, segment = 0;
  const Task* task = nullptr;
  double fetched = 0.0;  // time at which the controller has set the task up
  double head_begin = 0.0, head_end = 0.0, ready = 0.0;
  double body_begin = kNever, body_end = kNever;
  // The time at which the last part of the task's load begins. That part is as large as the ring buffer, so
  // soon after this time the task has requested all its data.
  double last_begin = kNever;
  double begin = kNever, end = kNever;
  double store_begin = 0.0;
  double rest = 0.0, rest_missing = 0.0;  // bytes still to be loaded; how many of them are not in the cache
  double ahead = 0.0;                     // bytes prefetched into the L2 cache that are not loaded yet
  int32_t slot = 0;                       // which of the record's waits was satisfied last
  bool read_ahead = false;                // whether inputs were loaded early, together with the first weights
  bool began = false;

  // Returns the argument that is named after the task's segment of the program: prologue, body (the
  // layers) or epilogue.
  int32_t by_segment(int32_t prologue, int32_t body, int32_t epilogue) const {
    return segment == kPrologue ? prologue : segment == kBody ? body : epilogue;
  }
};

struct Worker {
  Worker(const Program& p, int32_t stream)
      : stream(stream), rank(stream / p.workers), record(p.offsets[kPrologue][stream]) {}

  int32_t stream, rank;
  // How many tasks have passed each step: set up, first part of the load (the head) begun, loaded
  // completely, computed, stored.
  int64_t fetched = 0, headed = 0, loaded = 0, computed = 0, stored = 0;
  bool ended = false;
  double set_up_free = 0.0;  // when the controller may set up the next task
  // The head of a load is the first part of the next task's data, loaded before the task's waits are
  // satisfied. head_asked: when the head began to wait for room in the ring buffer.
  double head_asked = kNever;
  // For each part of a load: how many transfers are in progress, and when all bytes have been requested.
  int flows[kParts] = {};
  double asked[kParts] = {};
  int64_t ahead = 0;  // number of the task whose weights are being prefetched into the cache
  bool storing = false;
  int store_flows = 0;     // number of transfers of a store that are in progress
  double store_end = 0.0;  // when this rank's part of the store ends

  double alarm = kNever;  // when the worker's alarm rings
  double due = kNever;    // the first time for which a role of the worker waits

  // The worker's position in its instruction stream.
  int32_t record, segment = 0, layer = 0, task = 0, task_end = 0, current = -1;
  int32_t wait = 0;      // index of the next wait of the task being loaded; -1: none left
  bool waiting = false;  // whether a counter wakes this worker
  Worker* next_waiter = nullptr;
  double compute_end = 0.0;  // when the last computation ended
  Run runs[kDepth];
  Run& run(int64_t n) { return runs[n % kDepth]; }
};

// If the worker has no task left in its record (an instruction), moves to the next record of its stream.
// Returns false if the stream has ended.
inline bool seek(const Program& p, Worker& w) {
  while (w.task == w.task_end) {
    const int32_t end = p.offsets[w.segment][w.stream + 1];
    if (w.record != end) break;
    if (w.segment == kBody && ++w.layer < p.layers && p.offsets[kBody][w.stream] != end) {
      w.record = p.offsets[kBody][w.stream];
      continue;
    }
    if (w.segment == kEpilogue) return false;
    w.layer = 0;
    w.record = p.offsets[++w.segment][w.stream];
  }
  return true;
}

// Returns whether the worker's next task may have to be claimed from a queue.
inline bool claims(const Program& p, Worker& w) {
  return seek(p, w) && w.task == w.task_end && p.records[w.record].queue >= 0;
}

// Takes the worker's next task. At a drain, the worker claims an instruction from a queue that all
// workers of its rank share, and takes its first task. If the queue's first claims_end instructions have
// been claimed, the worker takes the drain's own task. `claimed` [layers][ranks * queues] counts the
// instructions that have been claimed.
inline Run& take(const Program& p, Worker& w, std::vector<int32_t>& claimed) {
  if (w.task == w.task_end) {
    w.current = w.record;
    if (p.records[w.record].queue >= 0) {
      const int32_t queue = w.rank * p.queues + p.records[w.record].queue;
      int32_t& next = claimed[static_cast<int64_t>(w.layer) * p.ranks * p.queues + queue];
      if (next < p.records[w.record].claims_end) w.current = p.offsets[kQueues][queue] + next++;
    }
    if (w.current == w.record) ++w.record;
    w.task = p.records[w.current].first_task;
    w.task_end = p.records[w.current].end_task;
  }
  return w.run(w.fetched++) = {
             .record = w.current, .layer = w.layer, .segment = w.segment, .task = &p.tasks[w.task++]};
}

// Returns which fraction of a task's loads fits into the ring buffer at once. Some of the ring is not
// available for loads: the bytes that stay there until the task is computed, and the bytes of its outputs.
inline double kept(const Costs& c, const Task& task) {
  const double ring = c.ring_bytes - task.held_bytes - task.output_bytes;
  return task.ring_bytes <= ring ? 1.0 : std::max(0.0, ring / task.ring_bytes);
}

// Returns how many bytes of the ring buffer are free for task number `n`. The task that is being computed
// frees its bytes gradually. If its load is complete, its bytes count as free at once, and `leaving` is set
// to their number; otherwise `leaving` is 0.
inline double room(const Costs& c, Worker& w, int64_t n, double& leaving) {
  double bytes = c.ring_bytes;
  leaving = 0.0;
  for (int64_t m = w.stored; m < n; ++m) {
    const Task& before = *w.run(m).task;
    bytes -= before.output_bytes;
    if (m < w.computed) continue;
    bytes -= before.held_bytes;
    if (m == w.computed && w.run(m).end != kNever)
      leaving = before.ring_bytes;
    else
      bytes -= before.ring_bytes;
  }
  return bytes;
}

// Returns when the worker may claim another task from a queue: once `run`, its latest task, has requested all
// its loads. By then, that task's waits are satisfied, and the ring buffer has room for all remaining loads.
// Returns kNever if the time is not known yet.
inline double asked_for(const Costs& c, const Run& run) {
  const double kept = simulate::kept(c, *run.task);
  if (kept >= 1.0) return run.body_begin;
  if (run.begin == kNever || run.last_begin == kNever) return kNever;
  return std::max(run.begin + (1.0 - kept) * run.task->compute_s,
                  run.last_begin + c.latency_s + run.task->tail_s);
}

inline Interval interval(const Program& p, const Worker& w, const Run& run, Role role, IntervalKind kind,
                         double begin, double end, int32_t slot) {
  return {
      .begin = static_cast<uint64_t>(begin * 1e9),
      .end = static_cast<uint64_t>(end * 1e9),
      .instruction = static_cast<uint32_t>(p.records[run.record].number),
      .launch = 1,
      .worker = static_cast<uint16_t>(w.stream % p.workers),
      .layer = static_cast<uint16_t>(run.by_segment(kTracePrologue, run.layer, kTraceEpilogue)),
      .rank = static_cast<uint8_t>(w.rank),
      .role = static_cast<uint8_t>(role),
      .kind = static_cast<uint8_t>(kind),
      .slot = static_cast<uint8_t>(slot),
  };
}

}  // namespace mk::simulate
