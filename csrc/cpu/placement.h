// Moves the threads of a pool between cores.
#pragma once
#include <atomic>
#include <vector>

namespace mk {

#if defined(__linux__)
class Placement {
 public:
  explicit Placement(int threads);
  ~Placement();
  // Thread `self` calls this once, when it starts.
  void thread_starts(int self);
  // Called once per job, before any thread starts its part.
  void job_starts();
  // Thread `self` calls this before its part of a job.
  void part_starts(int self);
  // Thread `self` calls this when it sees that thread `other` has work but does not run. The operating system
  // may have put both threads on the same core although another core is idle, and would take milliseconds to
  // correct this. The call therefore restricts `other` to cores on which no other thread of the pool was
  // seen, until the next job.
  void separate(int self, int other);

 private:
  struct Place;
  std::vector<Place> places_;
  // Limits how often `separate` moves a thread to another core. If the machine's other cores are busy with
  // other work, moving threads is of no use, and would otherwise happen in every job. Each job adds 1 to the
  // credit, up to kMostCredit, and each move costs kMoveCost.
  static constexpr int kMoveCost = 4, kMostCredit = 16;
  std::atomic<int> credit_{kMostCredit};
};
#else
// Only Linux lets a process move its threads.
struct Placement {
  explicit Placement(int) {}
  void thread_starts(int) {}
  void job_starts() {}
  void part_starts(int) {}
  void separate(int, int) {}
};
#endif

}  // namespace mk
