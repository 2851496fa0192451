#include "pool.h"

#include <unistd.h>

#include <algorithm>

namespace mk {

Pool::Pool(int threads) : places_(threads) {
  threads_.reserve(threads);
  try {
    for (int t = 0; t < threads; ++t) threads_.emplace_back([this, t] { serve(t); });
  } catch (...) {
    end();
    throw;
  }
}

Pool::~Pool() { end(); }

void Pool::end() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  for (std::thread& t : threads_) t.join();
}

void Pool::start(std::function<void(int)> job, std::function<void()> finish) {
  {
    std::lock_guard lock(mutex_);
    job_ = std::move(job);
    finish_ = std::move(finish);
    running_ = size();
    credit_.store(std::min(credit_.load(std::memory_order_relaxed) + 1, kMostCredit),
                  std::memory_order_relaxed);
    ++epoch_;
  }
  work_.notify_all();
}

bool Pool::wait(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, limit, [this] { return running_ == 0; });
}

void Pool::separate(int self, int other) {
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
  for (int t = 0; t < size(); ++t) {
    const int core = places_[t].core.load(std::memory_order_relaxed);
    if (t != other && core >= 0 && core < CPU_SETSIZE) CPU_CLR(core, &cores);
  }
  if (CPU_COUNT(&cores) > 0) sched_setaffinity(id, sizeof(cores), &cores);
  place.move.store(Move::kDone, std::memory_order_release);
}

void Pool::undo_move(Place& place) {
  if (place.move.load(std::memory_order_acquire) != Move::kDone) return;
  if (CPU_COUNT(&place.cores) > 0) sched_setaffinity(0, sizeof(place.cores), &place.cores);
  place.move.store(Move::kNone, std::memory_order_relaxed);
}

void Pool::serve(int thread) {
  Place& place = places_[thread];
  place.id.store(gettid(), std::memory_order_relaxed);
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [&] { return stop_ || epoch_ != seen; });
    if (stop_) return;
    seen = epoch_;
    lock.unlock();
    undo_move(place);
    place.core.store(sched_getcpu(), std::memory_order_relaxed);
    job_(thread);
    lock.lock();
    if (--running_ == 0) {
      finish_();
      idle_.notify_all();
    }
  }
}

}  // namespace mk
