// Moves the threads of a pool between cores.
#pragma once
#if defined(__linux__)
#include <sched.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <vector>
#endif

namespace mk {

#if defined(__linux__)
class Placement {
 public:
  explicit Placement(int threads) : places_(threads) {}

  // Thread `self` calls this once, when it starts.
  void thread_starts(int self) { places_[self].id.store(gettid(), std::memory_order_relaxed); }

  // Called once per job, before any thread starts its part.
  void job_starts() {
    const int credit = credit_.load(std::memory_order_relaxed);
    credit_.store(std::min(credit + 1, kMostCredit), std::memory_order_relaxed);
  }

  // Thread `self` calls this before its part of a job.
  void part_starts(int self) {
    Place& place = places_[self];
    if (place.move.load(std::memory_order_acquire) == Move::kDone) {
      if (CPU_COUNT(&place.cores) > 0) sched_setaffinity(0, sizeof(place.cores), &place.cores);
      place.move.store(Move::kNone, std::memory_order_relaxed);
    }
    place.core.store(sched_getcpu(), std::memory_order_relaxed);
  }

  // Thread `self` calls this when it sees that thread `other` has work but does not run. The operating system
  // may have put both threads on the same core although another core is idle, and would take milliseconds to
  // correct this. The call therefore restricts `other` to cores on which no other thread of the pool was
  // seen, until the next job.
  void separate(int self, int other) {
    Place& place = places_[other];
    const pid_t id = place.id.load(std::memory_order_relaxed);
    Move none = Move::kNone;
    if (credit_.load(std::memory_order_relaxed) < kMoveCost) return;
    if (id == 0 || !place.move.compare_exchange_strong(none, Move::kBegun, std::memory_order_acquire)) return;
    credit_.fetch_sub(kMoveCost, std::memory_order_relaxed);
    places_[self].core.store(sched_getcpu(), std::memory_order_relaxed);
    cpu_set_t cores;
    CPU_ZERO(&cores);
    sched_getaffinity(id, sizeof(cores), &cores);
    place.cores = cores;
    for (size_t t = 0; t < places_.size(); ++t) {
      const int core = places_[t].core.load(std::memory_order_relaxed);
      if (t != size_t(other) && core >= 0 && core < CPU_SETSIZE) CPU_CLR(core, &cores);
    }
    if (CPU_COUNT(&cores) > 0) sched_setaffinity(id, sizeof(cores), &cores);
    place.move.store(Move::kDone, std::memory_order_release);
  }

 private:
  enum class Move : int { kNone, kBegun, kDone };
  // The core where a thread of the pool was last seen, and the state of its move to another core.
  struct alignas(64) Place {
    std::atomic<pid_t> id{0};  // the thread's id in the operating system; 0 until it starts
    std::atomic<int> core{0};  // the core on which the thread was last seen
    std::atomic<Move> move{Move::kNone};
    cpu_set_t cores;  // if the thread was moved: its former affinity, restored by its next job
  };
  std::vector<Place> places_;
  // Limits how often `separate` moves a thread to another core. If the machine's other cores are busy with
  // other work, moving threads is of no use, and would otherwise happen in every job. Each job adds 1 to the
  // credit, up to kMostCredit, and each move costs kMoveCost.
  static constexpr int kMoveCost = 4, kMostCredit = 16;
  std::atomic<int> credit_{kMostCredit};
};
#else
// On other systems, threads stay on the cores that the system chooses.
struct Placement {
  explicit Placement(int) {}
  void thread_starts(int) {}
  void job_starts() {}
  void part_starts(int) {}
  void separate(int, int) {}
};
#endif

}  // namespace mk
