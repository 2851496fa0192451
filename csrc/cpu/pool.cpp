#include "pool.h"

namespace mk {

Pool::Pool(int threads) : placement_(threads) {
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
    placement_.job_starts();
    ++epoch_;
  }
  work_.notify_all();
}

bool Pool::wait(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, limit, [this] { return running_ == 0; });
}

void Pool::serve(int thread) {
  placement_.thread_starts(thread);
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [&] { return stop_ || epoch_ != seen; });
    if (stop_) return;
    seen = epoch_;
    lock.unlock();
    placement_.part_starts(thread);
    job_(thread);
    lock.lock();
    if (--running_ == 0) {
      finish_();
      idle_.notify_all();
    }
  }
}

}  // namespace mk
