// Threads that live as long as an engine and run one job at a time.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "placement.h"

namespace mk {

class Pool {
 public:
  // If a thread cannot be started, the destructor ends the others, as it does once any constructor has
  // returned.
  explicit Pool(int threads) : Pool(threads, 0) {
    for (int t = 0; t < threads; ++t) threads_.emplace_back([this, t] { serve(t); });
  }
  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    work_.notify_all();
    for (std::thread& t : threads_) t.join();
  }
  int size() const { return static_cast<int>(threads_.size()); }
  Placement& placement() { return placement_; }

  // Starts job(thread) on every thread. The last thread to end its job then calls finish(). The pool must be
  // idle.
  void start(std::function<void(int)> job, std::function<void()> finish) {
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

  // Waits until the pool is idle and returns true, or returns false if that takes longer than `limit`.
  bool wait(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    return idle_.wait_for(lock, limit, [this] { return running_ == 0; });
  }

 private:
  // How long an idle thread yields before it sleeps. Between two steps, the host needs less time than this,
  // but a sleeping thread would take about as long again to wake up.
  static constexpr std::chrono::microseconds kYields{200};

  Pool(int threads, int started) : placement_(threads), threads_(started) { threads_.reserve(threads); }

  void serve(int thread) {
    placement_.thread_starts(thread);
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      lock.unlock();
      const auto end = std::chrono::steady_clock::now() + kYields;
      while (epoch_.load(std::memory_order_relaxed) == seen && std::chrono::steady_clock::now() < end)
        std::this_thread::yield();
      lock.lock();
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

  std::mutex mutex_;
  std::condition_variable work_, idle_;
  std::function<void(int)> job_;
  std::function<void()> finish_;
  std::atomic<uint64_t> epoch_{0};
  int running_ = 0;
  bool stop_ = false;
  Placement placement_;
  std::vector<std::thread> threads_;
};

}  // namespace mk
