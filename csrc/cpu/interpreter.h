// Runs launches of programs on a pool of threads.
//
// A thread owns every T-th worker's stream and executes any head whose waits hold, so a program for 132
// workers runs on two cores. Within a stream order is fixed. A signal is a release, a met wait an acquire.
#pragma once
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "program.h"

namespace mk {

// A stall of one instruction, for tests of the trace; applies to traced launches.
struct Delay {
  int segment, layer;
  int32_t record;
  int64_t ns;  // 0: none
};

enum class Status { kDone, kRunning, kFailed };

class Interpreter {
 public:
  // `seconds` without progress count as a deadlock.
  Interpreter(const Dims& model, const Kernels& kernels, int threads, double deadlock_seconds);

  // Buffer pointers, [buffer][layer].
  void bind(Buffer buffer, int layer, void* data) { buffers_[index(buffer, layer)] = data; }
  void* bound(Buffer buffer, int layer) const { return buffers_[index(buffer, layer)]; }

  // Copies the step table's words. The interpreter must be idle and the program outlive the launch.
  void start(Program& program, const int32_t* step_words, bool trace);
  Status wait(std::chrono::milliseconds limit);
  // All threads leave soon; wait() then gives kFailed. Counters and SPLITS are as before the first launch.
  void abort() { abort_.store(1, std::memory_order_relaxed); }
  const std::string& error() const { return error_; }

  // One instruction on the calling thread, without waits and signals; attention runs all items of its slot.
  void execute(const Dims& dims, const int32_t* step_words, const int32_t* record, int layer);

  // The last traced launch, by worker and begin.
  std::vector<Interval> intervals() const;
  int64_t dropped() const;

  Delay delay{};
  int threads() const { return pool_.size(); }

 private:
  // Where a worker's stream stands.
  struct alignas(64) Cursor {
    int segment = 0, layer = 0;
    int32_t next = 0;                // record in the segment
    int32_t item = 0, item_end = 0;  // attention: work items to go
    bool entered = false;            // the head's items are known
    int blocked = 0;                 // wait word that did not hold
    int64_t prefetched = 0;          // bytes of the head's weights
    uint64_t wait_begin = 0, load_begin = 0, load_end = 0;
    std::vector<Interval> intervals;
    int64_t dropped = 0;
  };
  struct alignas(64) Progress {
    std::atomic<uint64_t> instructions{0};
  };
  struct Memory {  // of one thread
    Scratch scratch;
    std::unique_ptr<void, void (*)(void*)> block{nullptr, nullptr};
  };

  int64_t index(Buffer buffer, int layer) const {
    return int64_t{static_cast<int32_t>(buffer)} * layers_ + layer;
  }
  template <bool kTrace>
  void run(int thread);
  template <bool kTrace>
  bool step(Cursor& cursor, int worker, int thread);
  void enter(Cursor& cursor);
  bool settle(Cursor& cursor, int worker) const;
  bool ready(Cursor& cursor);
  bool met(int32_t block, int32_t counter) const;
  bool item_ready(const Cursor& cursor, int32_t word) const;
  bool rows_ready(const Cursor& cursor, int32_t word) const;
  bool run_item(const Call& call, const int32_t* record);
  void signal(const Cursor& cursor, const int32_t* record);
  void signal_item(const Cursor& cursor, const int32_t* record, int32_t item);
  bool prefetch(Cursor& cursor);
  void finish();
  std::string describe_block();
  template <bool kTrace>
  void stall(const Cursor& cursor) const;
  void record_interval(Cursor& cursor, int worker, IntervalKind kind, uint64_t begin, uint64_t end,
                       int slot) const;
  int64_t interval_bound(int worker) const;

  const int layers_;
  const Kernels& kernels_;
  std::vector<void*> buffers_;
  std::vector<Memory> memory_;
  const double deadlock_seconds_;
  std::string error_;

  // The launch in progress.
  Program* program_ = nullptr;
  std::vector<int32_t> words_;
  StepView view_{};
  std::vector<Cursor> cursors_;
  std::vector<Progress> progress_;
  std::atomic<int32_t> abort_{0};
  bool traced_ = false;
  bool failed_ = false;
  uint64_t seen_progress_ = 0;
  std::chrono::steady_clock::time_point seen_at_;

  Pool pool_;  // last: its threads end before the rest is destroyed
};

// CLOCK_MONOTONIC, nanoseconds.
uint64_t clock_ns();

}  // namespace mk
