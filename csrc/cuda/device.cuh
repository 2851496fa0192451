// Implements the interface of platform.h for a Hopper GPU, in PTX and without CUDA headers.
#pragma once
#include "ops/attention_mma.h"
#include "watchdog.h"
#include "wgmma.cuh"

#define MK_DEVICE __device__ __forceinline__

namespace mk {

MK_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Returns the wall-clock time in nanoseconds, which advances in steps of about 32 ns.
MK_DEVICE uint64_t wall_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}

// Emits a PTX instruction: `before`, then the scope's suffix (.gpu or .sys), then `after`.
#define MK_SCOPED_ASM(scope, before, after, ...)   \
  if (scope == Scope::kGpu) {                      \
    asm volatile(before ".gpu" after __VA_ARGS__); \
  } else {                                         \
    asm volatile(before ".sys" after __VA_ARGS__); \
  }

MK_DEVICE int32_t load_relaxed(const int32_t* at, Scope scope) {
  int32_t v;
  MK_SCOPED_ASM(scope, "ld.relaxed", ".global.s32 %0, [%1];", : "=r"(v) : "l"(at) : "memory")
  return v;
}

MK_DEVICE int32_t load_acquire(const int32_t* at, Scope scope) {
  int32_t v;
  MK_SCOPED_ASM(scope, "ld.acquire", ".global.s32 %0, [%1];", : "=r"(v) : "l"(at) : "memory")
  return v;
}

class Device {
  struct None {
    MK_DEVICE bool operator()() const { return false; }
  };

 public:
  static constexpr int kLanes = 32;
  static constexpr int kTrace = MK_TRACE;
  using Accumulators = mk::Accumulators;
  using AttentionTile = mk::AttentionTile;

  struct Barrier {
    uint64_t state;
  };

  MK_DEVICE Device(const Params& params, BlockMemory<Barrier>& block)
      : params_(params),
        block_(block),
        lane_(static_cast<int>(threadIdx.x % kLanes)),
        warp_(__shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / kLanes), 0)) {}

  MK_DEVICE int lane() const { return lane_; }
  MK_DEVICE int warp() const { return warp_; }
  MK_DEVICE void forget() { asm volatile("" : "+r"(lane_), "+r"(warp_)); }

  MK_DEVICE void init(Barrier& b, int arrivals) {
    if (lane_ == 0)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at(b)), "r"(arrivals) : "memory");
  }
  MK_DEVICE void sync_block() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("bar.sync 0;" ::: "memory");
  }

  template <class Idle = None>
  MK_DEVICE bool wait(Barrier& b, uint32_t parity, const Where& where, const Idle& idle = {}) {
    if (__all_sync(0xFFFFFFFFu, try_wait(b, parity))) return true;
    bool held;
    uint32_t since = 0;
    while (!(held = try_wait(b, parity) || idle()) && still_wait(since, &b, parity, where)) {
    }
    if (since != 0) forget_late();
    return __all_sync(0xFFFFFFFFu, held);  // lanes leave the loop one by one but must agree on the result
  }
  MK_DEVICE bool test(Barrier& b, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;"
        " selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(at(b)), "r"(parity)
        : "memory");
    return done != 0;
  }
  MK_DEVICE bool all(bool held) { return __all_sync(0xFFFFFFFFu, held); }
  MK_DEVICE bool passed(uint32_t& since, uint32_t ns) {
    const uint32_t now = static_cast<uint32_t>(wall_ns());
    if (now - since < ns) return false;
    since = now;
    return true;
  }
  template <class Idle = None>
  MK_DEVICE bool wait_always(Barrier& b, uint32_t parity, const Where& where = between(),
                             const Idle& idle = {}) {
    if (wait(b, parity, where, idle)) return true;
    uint32_t since = 0;
    bool held = false;
    while (!held && waited(since) <= kLeaveTicks) held = try_wait(b, parity) || idle();
    return __all_sync(0xFFFFFFFFu, held);
  }
  MK_DEVICE void arrive(Barrier& b, int count = 1) {
    __syncwarp();
    if (lane_ < count)
      asm volatile("{ .reg .b64 s; mbarrier.arrive.release.cta.shared::cta.b64 s, [%0]; }" ::"r"(at(b))
                   : "memory");
  }
  MK_DEVICE void expect(Barrier& b, uint32_t bytes) {
    if (lane_ == 0)
      asm volatile(
          "{ .reg .b64 s; mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 s, [%0], %1; }" ::"r"(at(b)),
          "r"(bytes)
          : "memory");
  }

  // Makes the copy engine (TMA) see the current contents of a tensor map. This is needed because the host may
  // write a map between launches, while the copy engine may still have the old one in its cache.
  MK_DEVICE void acquire_map(const TensorMap& map) {
    if (lane_ == 0)
      asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(&map) : "memory");
  }
  MK_DEVICE void load_tile(void* to, const TensorMap& map, int x, int y, int z, Barrier& b) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(at(b))
        : "memory");
  }
  // Loads weights with the L2 policy "evict first". Each weight is read once per launch, so it need not stay
  // in the L2 cache, which is better used for machine code, tables and activations.
  MK_DEVICE void load_columns(void* to, const TensorMap& map, int piece, int a, int b, int z,
                              Barrier& barrier) {
    asm volatile(
        "{ .reg .b64 once; createpolicy.fractional.L2::evict_first.b64 once;"
        " cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4, %5, %6}], [%7], once; }" ::"r"(shared_address(to)),
        "l"(&map), "r"(0), "r"(piece), "r"(a), "r"(b), "r"(z), "r"(at(barrier))
        : "memory");
  }
  MK_DEVICE void prefetch_columns(const TensorMap& map, int piece, int a, int b, int z) {
    asm volatile(
        "{ .reg .b64 once; createpolicy.fractional.L2::evict_first.b64 once;"
        " cp.async.bulk.prefetch.tensor.5d.L2.global.tile.L2::cache_hint [%0, {%1, %2, %3, %4, %5}], once; "
        "}" ::"l"(&map),
        "r"(0), "r"(piece), "r"(a), "r"(b), "r"(z)
        : "memory");
  }
  MK_DEVICE void load_bytes(void* to, const void* from, uint32_t bytes, Barrier& b) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(at(b))
        : "memory");
  }
  MK_DEVICE void store_tile(const TensorMap& map, int x, int y, int z, const void* from, bool add) {
    if (lane_ != 0) return;
#define MK_BULK(what)                                                                         \
  "cp" what ".tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map), "r"(x), "r"(y), "r"(z), \
      "r"(at) : "memory"
    const uint32_t at = shared_address(from);
    if (add)
      asm volatile(MK_BULK(".reduce.async.bulk.tensor.3d.global.shared::cta.add"));
    else
      asm volatile(MK_BULK(".async.bulk.tensor.3d.global.shared::cta"));
  }
  MK_DEVICE void wait_read() {
    if (lane_ == 0) {
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
    __syncwarp();
  }
  MK_DEVICE void wait_stores() {
    if (lane_ == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    fence_async();
    __syncwarp();
  }
  MK_DEVICE void fence_pages() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
  MK_DEVICE void fence_async() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

  // Each lane polls its counters with acquire loads; relaxed loads would need a further acquire at the
  // end. __all_sync does not order memory, so a __syncwarp follows it. After that, the lane that starts
  // the loads sees the writes that the other lanes have acquired.
  template <class F>
  MK_DEVICE bool wait_counters(int n, Scope scope, const Where& where, const F& need) {
    bool held = true;
    for (int i = lane_; i < n && held; i += kLanes) {
      const Need wanted = need(i);
      if (wanted.value) held = wait_counter(wanted, scope, where);
    }
    const bool all = __all_sync(0xFFFFFFFFu, held);
    __syncwarp();
    return all;
  }
  MK_DEVICE void signal(int32_t* to, int count, Scope scope){
      MK_SCOPED_ASM(scope, "red.release", ".global.add.s32 [%0], %1;", ::"l"(to),
                    "r"(count) : "memory")} MK_DEVICE int claim(int32_t* from, uint32_t base, int end) {
    int taken = -1;
    if (lane_ == 0) {
      int32_t seen = load_relaxed(from, Scope::kGpu);
      for (;;) {
        const int next = static_cast<int32_t>(static_cast<uint32_t>(seen) - base);
        if (next >= end) break;
        const int32_t found = atomicCAS(from, seen, seen + 1);
        if (found == seen) {
          taken = next;
          break;
        }
        seen = found;
      }
    }
    return __shfl_sync(0xFFFFFFFFu, taken, 0);
  }
  MK_DEVICE int arrive_acq_rel(int32_t* to) {
    int before = 0;
    if (lane_ == 0)
      asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(to) : "memory");
    return __shfl_sync(0xFFFFFFFFu, before, 0);
  }

  MK_DEVICE void sync_warp() { __syncwarp(); }
  MK_DEVICE void consumer_sync() {
    __syncwarp();  // bar.sync counts whole warps, so all lanes must reach it together
    asm volatile("bar.sync 1, %0;" ::"n"(kConsumerWarps * kLanes) : "memory");
  }
  MK_DEVICE bool aborted() { return load_relaxed(params_.abort, Scope::kSystem) != 0; }

  MK_DEVICE uint64_t now() {
    uint64_t t = 0;
    if constexpr (kTrace) asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
    return t;
  }
  MK_DEVICE void trace(const Where& where, Role role, IntervalKind kind, uint64_t begin) {
    const uint64_t end = now();
    if (!kTrace || lane_ != 0) return;
    const int32_t i = atomicAdd(&block_.traced, 1);
    if (i >= params_.trace_capacity) return;
    const int32_t layer = where.segment == kPrologue   ? kTracePrologue
                          : where.segment == kEpilogue ? kTraceEpilogue
                                                       : where.layer;
    params_.trace[static_cast<int64_t>(blockIdx.x) * params_.trace_capacity + i] = {
        .begin = begin,
        .end = end,
        .instruction = static_cast<uint32_t>(where.number),
        .launch = params_.launch,
        .worker = static_cast<uint16_t>(blockIdx.x % params_.workers),
        .layer = static_cast<uint16_t>(layer),
        .rank = static_cast<uint8_t>(params_.first_rank + blockIdx.x / params_.workers),
        .role = static_cast<uint8_t>(role),
        .kind = static_cast<uint8_t>(kind),
    };
  }

 private:
  // The longest time for which a try_wait may suspend the warp. In fact, an H100 resumes the warp after
  // a fraction of a microsecond.
  static constexpr uint32_t kSuspendNs = 1'000'000;
  static constexpr int kTick = 20;  // a tick of the watchdog's clock is 2^kTick ns

  // After an abort, a warp waits at most this many ticks, about a second, for operations that are still
  // in progress.
  static constexpr uint32_t kLeaveTicks = 1u << 10;

  MK_DEVICE static uint32_t at(const Barrier& b) { return shared_address(&b); }

  // Returns whether the barrier's phase with this parity has completed. If so, this warp sees everything that
  // the arriving warps wrote before they arrived.
  MK_DEVICE bool try_wait(Barrier& b, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2, %3;"
        " selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(at(b)), "r"(parity), "r"(kSuspendNs)
        : "memory");
    return done != 0;
  }

  // Returns how many ticks an unfinished wait has lasted. `since` is the tick of the first call for this
  // wait, or 0 before that call.
  MK_DEVICE static uint32_t waited(uint32_t& since) {
    const uint32_t time = static_cast<uint32_t>(wall_ns() >> kTick);
    if (since == 0) since = time;
    return time - since;
  }
  MK_DEVICE uint32_t limit() const {
    return static_cast<uint32_t>(here(static_cast<int32_t>(params_.timeout_ns >> kTick)));
  }

  // Called repeatedly while a warp waits. `since` is 0 at the first call. Returns false if the launch was
  // aborted. To save memory traffic, the abort flag is read only once the wait has lasted a tick. From then
  // on, the warp's wait is also recorded for the watchdog. All lanes write the same record, except that lanes
  // may wait for different counters. In that case, the record names any one of these counters.
  MK_DEVICE bool still_wait(uint32_t& since, const void* what, uint32_t parity, const Where& where) {
    const uint32_t ticks = waited(since);
    if (ticks == 0) return true;
    if (aborted()) return false;
    block_.late[warp_] = {what, parity, where};
    if (ticks > limit()) atomicExch(params_.abort, 1);
    return true;
  }
  // Called when a wait has ended. If the wait was recorded as late, clears the warp's record. If another lane
  // of the warp is still waiting, that lane writes the record again.
  MK_DEVICE void forget_late() {
    if (block_.late[warp_].what && !aborted()) block_.late[warp_].what = nullptr;
  }

  MK_DEVICE bool wait_counter(const Need& need, Scope scope, const Where& where) {
    uint32_t since = 0;
    while (static_cast<int32_t>(static_cast<uint32_t>(load_acquire(need.value, scope)) - need.target) < 0) {
      if (!still_wait(since, need.value, 0, where)) return false;
    }
    if (since != 0) forget_late();
    return true;
  }

  const Params& params_;
  BlockMemory<Barrier>& block_;
  int lane_, warp_;
};

}  // namespace mk
