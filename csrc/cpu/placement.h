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
  // Thread `self` calls this when `other` could work but does not. The system may have queued `other` behind
  // `self`, on the same core, although another core is idle; the system itself would correct this only
  // milliseconds later. Until the next job, `other` runs only on cores on which no other thread of the pool
  // was seen.
  void separate(int self, int other);

 private:
  struct Place;
  std::vector<Place> places_;
  // The credit for moves: a job earns 1, and a move costs kMoveCost. The credit limits moves where they do
  // not help: if threads have to wait in every job, the machine's other cores have other work.
  static constexpr int kMoveCost = 4, kMostCredit = 16;
  std::atomic<int> credit_{kMostCredit};
};

}  // namespace mk
