// Runs launches of programs on a pool of threads: the streams of ranks [first_rank, first_rank + ranks).
//
// A thread owns some of the streams and executes the next instruction of any of them whose waits are
// satisfied, so a program for 8 ranks of 132 workers runs on two cores. A thread that has nothing to do takes
// over streams of other threads, which the system may have descheduled. Within a stream the order is fixed. A
// signal is a release, and a satisfied wait is an acquire; a stream that passes to another thread is released
// by the first thread and acquired by the second.
#pragma once
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "../common/index.h"
#include "arena.h"
#include "audit.h"
#include "kernels.h"
#include "pool.h"
#include "program.h"

namespace mk {

// A stall of one instruction, for tests of the trace; it applies to traced launches.
struct Delay {
  int segment, layer;
  int32_t record;  // as in a trace
  int64_t ns;      // 0: none
};

enum class Status { kDone, kRunning, kFailed };

class Interpreter {
 public:
  // `cores` is this process's share of the cores that it and the processes of other ranks may use. A launch
  // without progress for `deadlock_seconds` counts as a deadlock. `abort` is an integer; a value other than 0
  // ends launches. Other processes may write it too, and its owner sets it back to 0. Null: the interpreter
  // has its own.
  Interpreter(const Dims& model, int first_rank, int ranks, const Kernels& kernels, int threads, int cores,
              double deadlock_seconds, std::atomic<int32_t>* abort);
  // Aborts what runs.
  ~Interpreter() { abort(); }

  // Binds a buffer of any rank. For a rank that runs in another process, only the
  // buffers that instructions store to are bound.
  void bind(int rank, Buffer buffer, int layer, void* data) { buffers_[index(rank, buffer, layer)] = data; }
  void* bound(int rank, Buffer buffer, int layer) const { return buffers_[index(rank, buffer, layer)]; }

  // Copies the step table. The interpreter must be idle, and the program must outlive the launch.
  void start(Program& program, const int32_t* step_words, bool trace);
  Status wait(std::chrono::milliseconds limit);
  // All threads leave soon; wait() then returns kFailed, and the program needs a reset.
  void abort() { abort_->store(1, std::memory_order_relaxed); }
  // Resets counters and SPLITS after a failed launch, once no rank runs the program.
  void reset(Program& program);
  const std::string& error() const { return error_; }

  // Runs one instruction of rank `dims.rank`, which has these phases, on the calling thread, without waits
  // and signals; attention runs all items of its slot.
  void execute(const Dims& dims, const Phase* phases, const int32_t* step_words, const int32_t* record,
               int layer);

  // The bytes that a rank has stored into other ranks' memory so far.
  int64_t link_bytes(int rank) const;

  // The intervals of the last traced launch, by rank, worker and begin.
  std::vector<Interval> intervals() const;
  int64_t dropped() const;

  Delay delay{};
  bool fetch_ahead = true;       // a waiting worker prefetches the weights of its next instruction
  std::unique_ptr<Audit> audit;  // null: none
  int threads() const { return pool_.size(); }

 private:
  // Who may touch a stream: the thread that changed kFree to kHeld. kEnded is final.
  enum class Hold : int32_t { kFree, kHeld, kEnded };
  // The result of a visit to a stream. kHeld: another thread has it.
  enum class Visit { kMoved, kBlocked, kHeld, kEnded };

  // The position in a worker's stream.
  struct Cursor {
    // on a cache line of its own, because other threads read it
    alignas(64) std::atomic<Hold> hold{Hold::kFree};
    alignas(64) int rank = 0, worker = 0;
    int thread = 0;  // the thread to which it is dealt
    int segment = 0, layer = 0;
    int32_t next = 0;  // index of the next record in the segment
    // The record to run now: number `next`, or, if that is a drain, the record that it has claimed. Null: not
    // fetched yet.
    const int32_t* record = nullptr;
    const Phase* phase = nullptr;  // of `record`, like the next members
    int32_t number = 0;            // as in a trace
    bool claimed = false;
    int32_t item = 0, item_end = 0;  // attention: the remaining work items
    int blocked = 0;                 // the wait word that was not satisfied
    int64_t prefetched = 0;          // bytes of the record's weights that were prefetched
    uint64_t wait_begin = 0, load_begin = 0, load_end = 0;
    std::vector<Interval> intervals;
    int64_t dropped = 0;
  };
  struct alignas(64) Progress {
    std::atomic<uint64_t> instructions{0};
  };
  struct alignas(64) Memory {  // of one thread
    Scratch scratch;
    std::vector<int64_t> link_bytes;  // by rank
  };

  int64_t index(int rank, Buffer buffer, int layer) const {
    return (int64_t{rank} * kBuffers + static_cast<int32_t>(buffer)) * layers_ + layer;
  }
  const StepView& view(const Cursor& c) const { return views_[c.rank - first_rank_]; }
  int32_t block(const Cursor& c) const { return program_->block(c.segment, c.layer); }
  bool aborted() const { return abort_->load(std::memory_order_relaxed) != 0; }
  void deal_streams();
  template <bool kTrace>
  void run(int thread);
  void serve(int thread);  // calls `run`; ends the launch if memory runs out
  template <bool kTrace>
  Visit visit(Cursor& cursor, int thread);
  template <bool kTrace>
  bool fetch_weights(Cursor& cursor);
  bool hold(Cursor& cursor);
  template <bool kTrace>
  bool step(Cursor& cursor, int thread);
  bool settle(Cursor& cursor);
  void fetch(Cursor& cursor, const int32_t* record, int32_t number);
  bool claim(Cursor& cursor);
  bool ready(Cursor& cursor) const;
  bool met(int rank, int32_t block, int32_t counter) const;
  bool item_ready(const Cursor& cursor, int32_t word) const;
  bool rows_ready(const Cursor& cursor, int32_t word) const;
  bool run_item(const Call& call, const int32_t* record);
  void signal(const Cursor& cursor);
  void signal_item(const Cursor& cursor);
  void arrive(Ranks ranks, int32_t block, int32_t counter, int32_t count);
  bool prefetch(Cursor& cursor);
  void finish();
  std::string describe_block();
  template <bool kTrace>
  void stall(const Cursor& cursor) const;
  void record_interval(Cursor& cursor, IntervalKind kind, uint64_t begin, uint64_t end, int slot) const;
  int64_t interval_bound(const Cursor& cursor) const;

  const int layers_, first_rank_, ranks_;
  const int cores_;
  const Kernels& kernels_;
  std::vector<void*> buffers_;
  Arena scratch_;
  std::vector<Memory> memory_;
  const double deadlock_seconds_;
  std::atomic<int32_t> own_abort_{0};
  std::atomic<int32_t>* const abort_;
  std::string error_;

  // The launch in progress.
  Program* program_ = nullptr;
  std::vector<int32_t> words_;
  std::vector<StepView> views_;  // of the ranks that run here, like the next two
  std::vector<Cursor> cursors_;
  std::vector<std::vector<Cursor*>> dealt_;   // to each thread
  bool crowded_ = false;                      // more threads have streams than there are cores
  alignas(64) std::atomic<int32_t> left_{0};  // streams that have not ended
  std::vector<Progress> progress_;
  bool traced_ = false;
  bool failed_ = false;
  std::atomic<bool> out_of_memory_{false};
  uint64_t seen_progress_ = 0;
  std::chrono::steady_clock::time_point seen_at_;

  Pool pool_;  // last, so that its threads end before the rest is destroyed
};

// CLOCK_MONOTONIC, nanoseconds.
uint64_t clock_ns();

}  // namespace mk
