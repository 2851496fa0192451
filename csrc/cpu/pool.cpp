#include "pool.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace mk {
namespace {

void pin_to_core(std::thread& thread, int index) {
#if defined(__linux__)
  cpu_set_t allowed, one;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || index-- > 0) continue;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_setaffinity_np(thread.native_handle(), sizeof one, &one);
    return;
  }
#else
  (void)thread;
  (void)index;
#endif
}

}  // namespace

Pool::Pool(int threads, bool pin) {
  for (int t = 0; t < threads; ++t) threads_.emplace_back([this, t] { serve(t); });
  if (!pin) return;
  for (int t = 0; t < threads; ++t) pin_to_core(threads_[t], t);
}

Pool::~Pool() {
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
    ++epoch_;
  }
  work_.notify_all();
}

bool Pool::wait(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, limit, [this] { return running_ == 0; });
}

void Pool::serve(int thread) {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [&] { return stop_ || epoch_ != seen; });
    if (stop_) return;
    seen = epoch_;
    lock.unlock();
    job_(thread);
    lock.lock();
    if (--running_ == 0) {
      finish_();
      idle_.notify_all();
    }
  }
}

}  // namespace mk
