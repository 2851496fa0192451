// Implements the platform interface of csrc/cuda/platform.h on the CPU, for quick tests of what instructions
// compute. Each warp is a fibre (a user-space thread); they take turns, always in the same order. Copies
// happen at once. Interleavings, memory order, fences and misuse of the hardware are checked where the
// interpreter's PTX is executed (tests/cuda/ptx).
#pragma once
#include <deque>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "../../../csrc/cuda/watchdog.h"
#include "../fibres.h"
#include "accumulators.h"
#include "attention_tile.h"
#include "tensor_map.h"

namespace mk {

class Fibres {
 public:
  explicit Fibres(size_t most) : size_(kStackBytes * most), stacks_(reserve(size_)) {}
  ~Fibres() { munmap(stacks_, size_); }

  void add(std::function<void()> body) {
    fibres_.emplace_back(stacks_ + fibres_.size() * kStackBytes, kStackBytes, std::move(body));
  }
  // Runs until all fibres have ended. Calls `stuck` when every fibre waits.
  void run(const std::function<void()>& stuck) {
    moved_ = true;
    for (bool any = true; any;) {
      if (!moved_) stuck();
      any = moved_ = false;
      for (Fibre& fibre : fibres_) {
        if (fibre.ended()) continue;
        fibre.resume();
        moved_ |= fibre.ended();
        any |= !fibre.ended();
      }
    }
  }
  // Must be called after a change for which other fibres may wait.
  void moved() { moved_ = true; }

 private:
  static constexpr size_t kStackBytes = 128 << 10;

  const size_t size_;
  char* stacks_;
  std::deque<Fibre> fibres_;
  bool moved_ = false;
};

struct HostBarrier {
  int arrivals = 0, pending = 0;
  int64_t bytes = 0;
  uint32_t phase = 0;
};

// State that the warps of a launch share. Once `leaving` is true, waits end at once, so that the launch ends.
struct HostWorld {
  const std::vector<const Params*>& grids;
  Fibres fibres;
  bool leaving = false;
  std::string wrong;

  // Aborts the launch. Only the first failure is reported.
  void fail(const std::string& what) {
    if (wrong.empty()) wrong = what;
    for (const Params* params : grids) *params->abort = 1;
    fibres.moved();
  }
};

// State that the warps of a block share, besides its memory.
struct HostBlock {
  struct Meeting {
    int here = 0, times = 0;
  };
  HostWorld& world;
  const Params& params;
  BlockMemory<HostBarrier>& memory;
  std::string name;
  std::set<std::tuple<const TensorMap*, int, int, int, int>> ahead;  // boxes prefetched but not loaded yet
  Meeting all, consumers;

  // Completes the barrier's phase if no arrivals and no bytes are missing.
  void settle(HostBarrier& barrier) {
    world.fibres.moved();
    if (barrier.pending < 0) world.fail(name + ": too many arrivals at a barrier");
    if (barrier.pending != 0 || barrier.bytes != 0) return;
    ++barrier.phase;
    barrier.pending = barrier.arrivals;
  }
};

class HostWarp {
  struct None {
    bool operator()() const { return false; }
  };

 public:
  using Barrier = HostBarrier;
  using Accumulators = HostAccumulators;
  using AttentionTile = HostAttentionTile;
  static constexpr int kLanes = 1, kTrace = 0;

  HostWarp(HostBlock& block, int warp) : block_(block), world_(block.world), warp_(warp) {}

  int lane() const { return 0; }
  int warp() const { return warp_; }
  void forget() const {}

  void init(Barrier& barrier, int arrivals) { barrier.arrivals = barrier.pending = arrivals; }
  void sync_block() { meet(block_.all, kWarps); }
  void consumer_sync() { meet(block_.consumers, kConsumerWarps); }
  bool all(bool held) { return held; }
  void sync_warp() {}

  template <class Idle = None>
  bool wait(Barrier& barrier, uint32_t parity, const Where& where, const Idle& idle = {}) {
    late_ = {&barrier, parity, where};
    while (!aborted() && !test(barrier, parity) && !idle()) Fibre::pass();
    if (!aborted()) late_ = {};
    return !aborted();
  }
  bool test(const Barrier& barrier, uint32_t parity) { return (barrier.phase & 1) != parity; }
  bool passed(uint32_t&, uint32_t) { return true; }
  template <class Idle = None>
  bool wait_always(Barrier& barrier, uint32_t parity, const Where& where = between(), const Idle& idle = {}) {
    if (!aborted()) late_ = {&barrier, parity, where};
    while (!test(barrier, parity) && !idle()) {
      if (world_.leaving) return false;
      Fibre::pass();
    }
    if (!aborted()) late_ = {};
    return true;
  }
  void arrive(Barrier& barrier, int count = 1) {
    for (int i = 0; i < count; ++i) {
      --barrier.pending;
      block_.settle(barrier);
    }
  }
  void expect(Barrier& barrier, uint32_t bytes) {
    barrier.bytes += bytes;
    arrive(barrier);
  }

  void acquire_map(const TensorMap&) {}
  void load_tile(void* to, const TensorMap& map, int x, int y, int z, Barrier& barrier) {
    load_at(to, map, {{x, y, z}}, barrier);
  }
  void load_columns(void* to, const TensorMap& map, int piece, int a, int b, int z, Barrier& barrier) {
    block_.ahead.erase({&map, piece, a, b, z});
    load_at(to, map, {{0, piece, a, b, z}}, barrier);
  }
  void prefetch_columns(const TensorMap& map, int piece, int a, int b, int z) {
    if (!block_.ahead.insert({&map, piece, a, b, z}).second)
      world_.fail(block_.name + " prefetches a page twice");
  }
  void load_bytes(void* to, const void* from, uint32_t bytes, Barrier& barrier) {
    if (bytes % 16 || reinterpret_cast<uint64_t>(from) % 16)
      world_.fail(block_.name + " has a load that is not 16-byte aligned");
    memcpy(to, from, bytes);
    barrier.bytes -= bytes;
    block_.settle(barrier);
  }
  void store_tile(const TensorMap& map, int x, int y, int z, const void* from, bool add) {
    (add ? add_box : store_box)(host_map(map), {{x, y, z}}, from);
  }
  void wait_read() {}
  void wait_stores() {}
  void fence_pages() {}
  void fence_async() {}

  template <class F>
  bool wait_counters(int n, Scope, const Where& where, F need) {
    for (int i = 0; i < n; ++i) {
      const Need wanted = need(i);
      if (wanted.value == nullptr) continue;
      if (!aborted()) late_ = {wanted.value, 0, where};
      while (!aborted() && static_cast<int32_t>(static_cast<uint32_t>(*wanted.value) - wanted.target) < 0)
        Fibre::pass();
      if (aborted()) return false;
    }
    late_ = {};
    return true;
  }
  void signal(int32_t* counter, int count, Scope) {
    *counter = static_cast<int32_t>(static_cast<uint32_t>(*counter) + static_cast<uint32_t>(count));
    world_.fibres.moved();
  }
  int claim(int32_t* word, uint32_t base, int end) {
    const int done = static_cast<int32_t>(static_cast<uint32_t>(*word) - base);
    if (done >= end) return -1;
    *word = static_cast<int32_t>(static_cast<uint32_t>(*word) + 1);
    return done;
  }
  int arrive_acq_rel(int32_t* word) { return (*word)++; }
  bool aborted() const { return *block_.params.abort != 0; }

  uint64_t now() const { return 0; }
  void trace(const Where&, Role, IntervalKind, uint64_t) {}

  // Records what the warp waits for, as the watchdog does before it aborts a launch.
  void note() { block_.memory.late[warp_] = late_; }

 private:
  void meet(HostBlock::Meeting& meeting, int warps) {
    const int time = meeting.times;
    if (++meeting.here == warps) {
      meeting.here = 0;
      ++meeting.times;
      world_.fibres.moved();
    }
    while (meeting.times == time && !world_.leaving) Fibre::pass();
  }
  void load_at(void* to, const TensorMap& map, const Corner& corner, Barrier& barrier) {
    const HostMap host = host_map(map);
    load_box(to, host, corner);
    barrier.bytes -= host.bytes();
    block_.settle(barrier);
  }

  HostBlock& block_;
  HostWorld& world_;
  const int warp_;
  Late late_{};  // what the warp waits for now
};

}  // namespace mk
