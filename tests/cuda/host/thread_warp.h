// Implements the platform interface of csrc/cuda/platform.h on operating system threads, one per warp, with
// exactly the memory orderings that the interface states. So a race detector finds code that relies on an
// ordering which it did not request. Bulk copies happen at once, element by element;
// tests/cuda/host/fibre_warp.h varies their timing.
#pragma once
#include <sched.h>

#include <atomic>
#include <chrono>

#include "../../../csrc/cuda/watchdog.h"
#include "accumulators.h"
#include "tensor_map.h"

extern "C" {
// Between Begin and End, the race detector ignores the calling thread's reads, which race on purpose.
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
}

namespace mk {

// A barrier whose state is one 64-bit word: the arrivals (16 bits) and bytes (32 bits) that the current phase
// lacks, and the phase's number (16 bits).
class ThreadBarrier {
 public:
  void init(int arrivals) {
    arrivals_ = arrivals;
    state_.store(static_cast<uint64_t>(arrivals) << 48, std::memory_order_relaxed);
  }
  // Counts arrivals and adds `bytes` to the bytes that the phase lacks, with release ordering.
  void change(int arrivals, int64_t bytes) {
    uint64_t seen = state_.load(std::memory_order_relaxed), next;
    do {
      next = seen - (static_cast<uint64_t>(arrivals) << 48) + (static_cast<uint64_t>(bytes) << 16);
      if (next >> 16 == 0) next = static_cast<uint64_t>(arrivals_) << 48 | ((seen + 1) & 0xFFFF);
    } while (!state_.compare_exchange_weak(seen, next, std::memory_order_release, std::memory_order_relaxed));
  }
  // Whether the phase with this parity has completed. If so, the call has acquire ordering.
  bool passed(uint32_t parity) const { return (state_.load(std::memory_order_acquire) & 1) != parity; }

 private:
  std::atomic<uint64_t> state_{0};
  int arrivals_ = 0;
};

struct ThreadBlock {
  ThreadBarrier all, consumers;
};

class ThreadWarp {
 public:
  using Barrier = ThreadBarrier;
  using Accumulators = HostAccumulators;
  static constexpr int kLanes = 1, kTrace = 0;

  // `sms` lists the shared memory of the worker's blocks, one per SM. `block` has the barriers of this warp's
  // block, and `first` has those of the worker's first block. All warps of the worker meet at the barrier
  // first.all.
  ThreadWarp(const Params& params, BlockMemory<Barrier>* const* sms, ThreadBlock& first, ThreadBlock& block,
             int sm, int warp)
      : params_(params), sms_(sms), memory_(*sms[sm]), first_(first), block_(block), warp_(warp) {}

  int lane() const { return 0; }
  int warp() const { return warp_; }
  void forget() const {}

  void init(Barrier& barrier, int arrivals) { barrier.init(arrivals); }
  void sync_block() { meet(first_.all, times_++ & 1); }
  void consumer_sync() { meet(block_.consumers, meetings_++ & 1); }
  void sync_warp() {}

  bool wait(Barrier& barrier, uint32_t parity, const Where& where) {
    return spin([&] { return barrier.passed(parity); }, {&barrier, parity, where});
  }
  bool wait_always(Barrier& barrier, uint32_t parity, const Where& where = between()) {
    if (wait(barrier, parity, where)) return true;
    const auto passed = [&] { return barrier.passed(parity); };
    for (const auto begin = Clock::now(); !passed(); sched_yield()) {
      if (Clock::now() - begin > kLeave) return false;
    }
    return true;
  }
  void arrive(Barrier& barrier, int count = 1) { barrier.change(count, 0); }
  void arrive_at(int sm, Barrier& barrier, int count = 1) { at_sm(sm, barrier).change(count, 0); }
  void hand_over_at(int sm, Barrier& barrier) { arrive_at(sm, barrier); }
  template <class T>
  T& at_sm(int sm, T& here) {
    const auto offset = reinterpret_cast<char*>(&here) - reinterpret_cast<char*>(&memory_);
    return *reinterpret_cast<T*>(reinterpret_cast<char*>(sms_[sm]) + offset);
  }
  void expect(Barrier& barrier, uint32_t bytes) { barrier.change(1, bytes); }

  void acquire_map(const TensorMap&) {}
  void load_tile(void* to, const TensorMap& map, int x, int y, int z, Barrier& barrier) {
    load_at(to, map, {{x, y, z}}, barrier);
  }
  void load_tile_for_all(void* to, const TensorMap& map, int x, int y, int z, Barrier& barrier) {
    for (int sm = 0; sm < kSms; ++sm)
      load_at(&at_sm(sm, *static_cast<char*>(to)), map, {{x, y, z}}, at_sm(sm, barrier));
  }
  void load_columns(void* to, const TensorMap& map, int piece, int a, int b, int z, Barrier& barrier) {
    load_at(to, map, {{0, piece, a, b, z}}, barrier);
  }
  void prefetch_columns(const TensorMap&, int, int, int, int) {}
  void load_bytes(void* to, const void* from, uint32_t bytes, Barrier& barrier) {
    for (uint32_t i = 0; i < bytes / sizeof(uint64_t); ++i)
      static_cast<uint64_t*>(to)[i] = static_cast<const uint64_t*>(from)[i];
    barrier.change(0, -static_cast<int64_t>(bytes));
  }
  void store_tile(const TensorMap& map, int x, int y, int z, const void* from) {
    store_box(host_map(map), {{x, y, z}}, from);
  }
  void add_tile(const TensorMap& map, int x, int y, int z, const void* from) {
    add_box(host_map(map), {{x, y, z}}, from);
  }
  void commit() {}
  void wait_read(int) {}
  void wait_stores() {}
  void fence_pages() {}
  void fence_async() {}

  template <class F>
  bool wait_counters(int n, Scope, const Where& where, F need) {
    for (int i = 0; i < n; ++i) {
      const Need wanted = need(i);
      if (wanted.value == nullptr) continue;
      const auto holds = [&] {
        const int32_t value = __atomic_load_n(wanted.value, __ATOMIC_RELAXED);
        return static_cast<int32_t>(static_cast<uint32_t>(value) - wanted.target) >= 0;
      };
      if (!spin(holds, {wanted.value, 0, where})) return false;
      __atomic_load_n(wanted.value, __ATOMIC_ACQUIRE);
    }
    return true;
  }
  void signal(int32_t* counter, int count, Scope, int order = __ATOMIC_RELEASE) {
    if (order == __ATOMIC_RELAXED) {
      __atomic_fetch_add(counter, count, __ATOMIC_RELAXED);
    } else {
      __atomic_fetch_add(counter, count, __ATOMIC_RELEASE);
    }
  }
  int claim(int32_t* word, uint32_t base, int end) {
    int32_t seen = __atomic_load_n(word, __ATOMIC_RELAXED), done;
    do {
      done = static_cast<int32_t>(static_cast<uint32_t>(seen) - base);
      if (done >= end) return -1;
    } while (!__atomic_compare_exchange_n(word, &seen, seen + 1, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return done;
  }
  int arrive_acq_rel(int32_t* word) { return __atomic_fetch_add(word, 1, __ATOMIC_ACQ_REL); }
  bool aborted() const { return __atomic_load_n(params_.abort, __ATOMIC_RELAXED) != 0; }

  void reads(const void*, bool) {}
  void writes(const void*) {}

  uint64_t now() const { return 0; }
  void trace(const Where&, Role, IntervalKind, uint64_t) {}
  void stall(uint64_t) {}
  void hang() {
    for (;;) sched_yield();
  }

 protected:
  const BlockMemory<Barrier>& memory() const { return memory_; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds kLeave{1};

  void load_at(void* to, const TensorMap& map, const Corner& corner, Barrier& barrier) {
    const HostMap host = host_map(map);
    if (host.shared) AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    load_box(to, host, corner);
    if (host.shared) AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    barrier.change(0, -static_cast<int64_t>(host.bytes()));
  }
  // Calls `held` until it returns true, and yields the core between calls. Returns false if the launch is
  // aborted, by another warp or because this wait takes too long. `note` describes the wait.
  template <class Held>
  bool spin(Held held, const Late& note) {
    const auto begin = Clock::now();
    const std::chrono::nanoseconds limit(params_.timeout_ns);
    Late& late = memory_.late[warp_];
    for (; !held(); sched_yield()) {
      if (aborted()) return false;
      late = note;
      if (Clock::now() - begin > limit) __atomic_store_n(params_.abort, 1, __ATOMIC_RELAXED);
    }
    if (late.what && !aborted()) late.what = nullptr;
    return true;
  }
  void meet(ThreadBarrier& barrier, uint32_t parity) {
    barrier.change(1, 0);
    while (!barrier.passed(parity)) sched_yield();
  }

  const Params& params_;
  BlockMemory<Barrier>* const* sms_;
  BlockMemory<Barrier>& memory_;
  ThreadBlock &first_, &block_;
  const int warp_;
  uint32_t meetings_ = 0, times_ = 0;
};

}  // namespace mk
