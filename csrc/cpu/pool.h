// Threads that live as long as an engine and run one job at a time.
#pragma once
#include <sched.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace mk {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  int size() const { return static_cast<int>(threads_.size()); }
  // Runs job(thread) on every thread, then finish() on the last to end. The pool must be idle.
  void start(std::function<void(int)> job, std::function<void()> finish);
  // True once idle; false where `limit` passed first.
  bool wait(std::chrono::milliseconds limit);
  // Called on thread `self` when `other` could work but does not. The system may have queued it behind
  // `self`, on the same core, although another core is idle, and it corrects that milliseconds later. Until
  // the next job, `other` runs only on cores on which no other thread of the pool was seen.
  void separate(int self, int other);

 private:
  enum class Move : int { kNone, kBegun, kDone };
  // Where a thread runs.
  struct alignas(64) Place {
    std::atomic<pid_t> id{0};  // the system's name of it; 0 until it runs for the first time
    std::atomic<int> core{0};  // where it was last seen
    std::atomic<Move> move{Move::kNone};
    cpu_set_t cores;  // of a moved thread: where it may run otherwise
  };

  void serve(int thread);
  static void undo_move(Place& place);
  void end();

  std::mutex mutex_;
  std::condition_variable work_, idle_;
  std::function<void(int)> job_;
  std::function<void()> finish_;
  uint64_t epoch_ = 0;
  int running_ = 0;
  bool stop_ = false;
  std::vector<Place> places_;
  // Moves that may still be made. A job earns one and a move costs kMoveCost, because a machine on which
  // threads always have to wait has other work on its other cores.
  static constexpr int kMoveCost = 4, kMostCredit = 16;
  std::atomic<int> credit_{kMostCredit};
  std::vector<std::thread> threads_;
};

}  // namespace mk
