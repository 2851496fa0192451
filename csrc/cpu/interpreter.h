// Runs programs on a pool of CPU threads. A program has a stream of instructions for each worker of each
// rank. A worker stands for one SM if the program was made for GPUs. A launch is one execution of the
// program.
//
// Each thread is assigned some streams. It looks for a stream whose next instruction has all its waits
// satisfied, and executes that instruction. So a program for 8 ranks of 132 workers runs even on two cores.
// If the operating system has descheduled a thread, idle threads take over its streams. The instructions of a
// stream always run in order. Memory order: a signal releases and a satisfied wait acquires. When a stream
// moves to another thread, the old thread releases and the new thread acquires.
//
// `launch.cpp` starts launches and tells how they ended. `streams.cpp` has the loop in which threads
// execute streams.
#pragma once
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "../common/index.h"
#include "arena.h"
#include "pool.h"
#include "program.h"
#include "simd/kernels.h"

namespace mk {

// An artificial delay of one instruction, for tests of the trace. It affects only traced launches.
struct Delay {
  int segment, layer;
  int32_t record;  // number as in a trace
  int64_t ns;      // 0: no delay
};

enum class Status : int32_t { kDone = 0, kRunning = 1, kFailed = -1 };  // Python uses these values

class Interpreter {
 public:
  // `cores` is the number of cores that this process may use. A launch that makes no progress for
  // `deadlock_seconds` is treated as a deadlock and aborted.
  Interpreter(const Dims& model, const Kernels& kernels, int threads, int cores, double deadlock_seconds);
  ~Interpreter() { abort(); }

  // Makes `data` the memory of a rank's buffer.
  void bind(int rank, Buffer buffer, int layer, void* data) { buffers_[index(rank, buffer, layer)] = data; }
  void* bound(int rank, Buffer buffer, int layer) const { return buffers_[index(rank, buffer, layer)]; }

  // Starts a launch with a step table, which describes the batch. The interpreter must be idle, and the
  // program and the table must outlive the launch.
  void start(Program& program, const int32_t* step_words, bool trace);
  Status wait(std::chrono::milliseconds limit);
  // Makes all threads stop soon. wait() then returns kFailed, and the program needs a reset.
  void abort() { abort_.store(1, std::memory_order_relaxed); }
  // Resets the program's counters, and those in the buffer SPLITS, after a failed launch.
  void reset(Program& program);
  const std::string& error() const { return error_; }

  // Runs one instruction of rank `dims.rank` on the calling thread, and ignores its waits and signals.
  // `phases` is the rank's table of model operations. For attention, runs all work items that the step's
  // tables assign to the instruction.
  void execute(const Dims& dims, const Phase* phases, const int32_t* step_words, const int32_t* record,
               int layer);

  // Returns the intervals (trace entries) of the last traced launch, sorted by rank, worker and begin time.
  std::vector<Interval> intervals() const;

  Delay delay{};
  int threads() const { return pool_.size(); }

 private:
  // Whether a thread has reserved an instruction stream. The thread that changes kFree to kHeld has the
  // stream to itself until it sets kFree again. kEnded: the stream has no instructions left.
  enum class Hold : int32_t { kFree, kHeld, kEnded };
  // The result of a thread's attempt to continue a stream. kMoved: the thread executed an instruction.
  // kBlocked: a wait is not satisfied. kHeld: another thread has reserved the stream.
  enum class Visit { kMoved, kBlocked, kHeld, kEnded };

  // A position in the stream of one worker: how far the stream has been executed, and data about its current
  // record.
  struct Cursor {
    // `hold` has a cache line of its own, because other threads read it.
    alignas(64) std::atomic<Hold> hold{Hold::kFree};
    alignas(64) int rank = 0, worker = 0;
    int thread = 0;  // the thread that normally executes the stream
    int segment = 0, layer = 0;
    int32_t next = 0;  // index of the stream's next record in the segment's list of records
    // The instruction that is being executed, or null if none has been fetched yet. Normally it is number
    // `next` of the segment. While a DRAIN is number `next`, it may be an instruction taken from a shared
    // queue instead.
    const int32_t* record = nullptr;
    const Phase* phase = nullptr;    // the phase of `record`
    int32_t number = 0;              // the number by which a trace identifies `record`
    bool claimed = false;            // whether a drain claimed `record`
    int32_t item = 0, item_end = 0;  // if `record` is attention: its remaining work items, [item, item_end)
    int blocked = 0;                 // which wait of `record` was found unsatisfied last
    int64_t prefetched = 0;          // how many bytes of the weights of `record` have been prefetched
    uint64_t wait_begin = 0, load_begin = 0, load_end = 0;
    std::vector<Interval> intervals;
  };
  struct alignas(64) Progress {
    std::atomic<uint64_t> instructions{0};
  };
  struct alignas(64) Memory {  // memory that one thread uses
    Scratch scratch;
    int64_t link_bytes = 0;  // bytes that the thread has stored in other ranks' memory
  };

  int64_t index(int rank, Buffer buffer, int layer) const {
    return (int64_t{rank} * kBuffers + static_cast<int32_t>(buffer)) * layers_ + layer;
  }
  const StepView& view(const Cursor& c) const { return views_[c.rank]; }
  int32_t block(const Cursor& c) const { return program_->block(c.segment, c.layer); }
  bool aborted() const { return abort_.load(std::memory_order_relaxed) != 0; }
  void deal_streams();
  void run(int thread);
  Visit visit(Cursor& cursor, int thread);
  bool fetch_weights(Cursor& cursor);
  bool hold(Cursor& cursor);
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
  void stall(const Cursor& cursor) const;
  void record_interval(Cursor& cursor, IntervalKind kind, uint64_t begin, uint64_t end, int slot) const;

  const int layers_, ranks_, cores_;
  const Kernels& kernels_;
  std::vector<void*> buffers_;
  Arena scratch_;
  std::vector<Memory> memory_;
  const double deadlock_seconds_;
  std::atomic<int32_t> abort_{0};  // any value other than 0 ends the launch
  std::string error_;

  // The state of the launch in progress.
  Program* program_ = nullptr;
  std::vector<StepView> views_;               // for each rank: pointers into the step table
  std::vector<Cursor> cursors_;               // one for each stream
  std::vector<std::vector<Cursor*>> dealt_;   // for each thread: the streams that it normally executes
  bool crowded_ = false;                      // whether more threads have streams than there are cores
  alignas(64) std::atomic<int32_t> left_{0};  // number of streams that have not ended
  std::vector<Progress> progress_;
  bool traced_ = false;
  bool failed_ = false;
  std::atomic<bool> out_of_memory_{false};
  uint64_t seen_progress_ = 0;
  std::chrono::steady_clock::time_point seen_at_;

  Pool pool_;  // declared last, so that its threads end before the other members are destroyed
};

// Returns the time of CLOCK_MONOTONIC in nanoseconds.
uint64_t clock_ns();

}  // namespace mk
