// Threads that live as long as an engine and run one job at a time.
#pragma once
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
  explicit Pool(int threads);
  ~Pool();
  int size() const { return static_cast<int>(threads_.size()); }
  // Starts job(thread) on every thread. The last thread to end its job then calls finish(). The pool must be
  // idle.
  void start(std::function<void(int)> job, std::function<void()> finish);
  // Waits until the pool is idle and returns true, or returns false if that takes longer than `limit`.
  bool wait(std::chrono::milliseconds limit);
  Placement& placement() { return placement_; }

 private:
  void serve(int thread);
  void end();

  std::mutex mutex_;
  std::condition_variable work_, idle_;
  std::function<void(int)> job_;
  std::function<void()> finish_;
  uint64_t epoch_ = 0;
  int running_ = 0;
  bool stop_ = false;
  Placement placement_;
  std::vector<std::thread> threads_;
};

}  // namespace mk
