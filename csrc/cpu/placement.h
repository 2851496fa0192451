// Moves the threads of a pool between cores. Only Linux lets a process move its threads, so elsewhere every
// function does nothing.
#pragma once
#include <atomic>
#include <vector>

namespace mk {

class Placement {
 public:
  explicit Placement(int threads);
  ~Placement();
  // Thread `self` calls this once, when it starts.
  void thread_starts(int self);
  // Called when a job starts on all threads.
  void job_starts();
  // Thread `self` calls this before its part of a job.
  void part_starts(int self);
  // Called on thread `self` when `other` could work but does not. The system may have queued it behind
  // `self`, on the same core, although another core is idle, and it corrects that milliseconds later. Until
  // the next job, `other` runs only on cores on which no other thread of the pool was seen.
  void separate(int self, int other);

 private:
  struct Place;
  std::vector<Place> places_;
  // Moves that may still be made. A job earns one and a move costs kMoveCost, because a machine on which
  // threads always have to wait has other work on its other cores.
  static constexpr int kMoveCost = 4, kMostCredit = 16;
  std::atomic<int> credit_{kMostCredit};
};

}  // namespace mk
