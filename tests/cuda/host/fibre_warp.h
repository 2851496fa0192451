// Implements the platform interface of csrc/cuda/platform.h on fibres (user-space threads). Asynchronous
// operations complete late, and a page holds NaN until a copy into it completes. Memory order, fences and
// misuse of the hardware are checked where the interpreter's PTX is executed instead (tests/cuda/ptx).
#pragma once
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "../../../csrc/cuda/watchdog.h"
#include "accumulators.h"
#include "fibre.h"
#include "tensor_map.h"

namespace mk {

struct FibreBarrier {
  int arrivals = 0, pending = 0;
  int64_t bytes = 0;
  uint32_t phase = 0;
  Waiters waiters;
};

// State that the warps of a launch share.
struct FibreWorld {
  FibreWorld(const Params& launch, uint64_t seed, int warps) : params(launch), scheduler(seed, warps) {}

  // The first failure ends the launch.
  void fail(const std::string& what) {
    if (wrong.empty()) wrong = what;
    abort();
  }
  void abort() {
    *params.abort = 1;
    scheduler.wake_all();
  }
  // Makes all warps stop waiting for operations that are still outstanding.
  void leave() {
    leaving = true;
    scheduler.wake_all();
  }

  const Params& params;
  bool leaving = false;
  Scheduler scheduler;
  std::unordered_map<const int32_t*, Waiters> counters;
  std::string wrong;
};

// State that the warps of a block share, besides its memory.
struct FibreBlock {
  // `worker` lists the blocks of this block's worker, one per SM.
  FibreBlock(FibreWorld& launch, BlockMemory<FibreBarrier>& block, FibreBlock* const* worker,
             std::string called)
      : world(launch), memory(block), sms(worker), name(std::move(called)) {}

  FibreWorld& world;
  BlockMemory<FibreBarrier>& memory;
  FibreBlock* const* const sms;
  const std::string name;
  // TMA boxes that were prefetched but not loaded yet.
  std::set<std::tuple<const TensorMap*, int, int, int, int>> ahead;

  struct Meeting {
    int here = 0;
    uint32_t times = 0;
    Waiters waiters;
  } all, consumers;

  std::string name_of_barrier(const FibreBarrier& barrier) const {
    static constexpr const char* kNames[] = {"counter", "full",   "ready",   "empty",   "fetched",
                                             "inputs",  "loaded", "outputs", "retired", "parted"};
    const BarrierName known = name_of(memory, barrier);
    return std::string(kNames[static_cast<int>(known.what)]) + "[" + std::to_string(known.slot) + "]";
  }
  // Called after an arrival or a load. Completes the barrier's phase if no arrivals and no bytes are missing.
  void settle(FibreBarrier& barrier) {
    if (barrier.pending < 0) world.fail(name + ": too many arrivals at " + name_of_barrier(barrier));
    if (barrier.pending != 0 || barrier.bytes != 0) return;
    ++barrier.phase;
    barrier.pending = barrier.arrivals;
    world.scheduler.wake(barrier.waiters);
  }
  void arrive(FibreBarrier& barrier, int count) {
    barrier.pending -= count;
    settle(barrier);
  }
  // Returns the counterpart of `here` in the shared memory of SM `sm` of the worker.
  template <class T>
  T& at_sm(int sm, T& here) const {
    const auto offset = reinterpret_cast<char*>(&here) - reinterpret_cast<char*>(&memory);
    return *reinterpret_cast<T*>(reinterpret_cast<char*>(&sms[sm]->memory) + offset);
  }
};

class FibreWarp {
 public:
  using Barrier = FibreBarrier;
  using Accumulators = HostAccumulators;
  static constexpr int kLanes = 1, kTrace = 0;

  FibreWarp(FibreBlock& block, int warp) : block_(block), world_(block.world), warp_(warp) {}

  int lane() const { return 0; }
  int warp() const { return warp_; }
  void forget() const {}

  void init(Barrier& barrier, int arrivals) { barrier.arrivals = barrier.pending = arrivals; }
  void sync_block() { meet(block_.sms[0]->all, kSms * kWarps); }
  void consumer_sync() { meet(block_.consumers, kConsumerWarps); }
  void sync_warp() {}

  bool wait(Barrier& barrier, uint32_t parity, const Where& where) {
    scheduler().pause();
    while (!aborted()) {
      if (passed(barrier, parity)) return true;
      sleep(barrier, parity, where);
    }
    return false;
  }
  bool wait_always(Barrier& barrier, uint32_t parity, const Where& where = between()) {
    scheduler().pause();
    while (!passed(barrier, parity)) {
      if (world_.leaving) return false;
      sleep(barrier, parity, where);
    }
    return true;
  }
  void arrive(Barrier& barrier, int count = 1) { arrive_at(sm_of(memory()), barrier, count); }
  void arrive_at(int sm, Barrier& barrier, int count = 1) {
    scheduler().pause();
    block_.sms[sm]->arrive(at_sm(sm, barrier), count);
  }
  void hand_over_at(int sm, Barrier& barrier) { arrive_at(sm, barrier); }
  template <class T>
  T& at_sm(int sm, T& here) {
    return block_.at_sm(sm, here);
  }
  void expect(Barrier& barrier, uint32_t bytes) {
    barrier.bytes += bytes;
    arrive(barrier);
  }

  void acquire_map(const TensorMap&) {}
  void load_tile(void* to, const TensorMap& map, int x, int y, int z, Barrier& barrier) {
    load_at(to, map, {{x, y, z}}, barrier);
  }
  void load_tile_for_all(void* to, const TensorMap& map, int x, int y, int z, Barrier& barrier) {
    for (int sm = 0; sm < kSms; ++sm)
      load_at(&at_sm(sm, *static_cast<char*>(to)), map, {{x, y, z}}, at_sm(sm, barrier), block_.sms[sm]);
  }
  void load_columns(void* to, const TensorMap& map, int piece, int a, int b, int z, Barrier& barrier) {
    block_.ahead.erase({&map, piece, a, b, z});
    load_at(to, map, {{0, piece, a, b, z}}, barrier);
  }
  void prefetch_columns(const TensorMap& map, int piece, int a, int b, int z) {
    if (!block_.ahead.insert({&map, piece, a, b, z}).second) fail("prefetches a page twice");
  }
  void load_bytes(void* to, const void* from, uint32_t bytes, Barrier& barrier) {
    if (bytes % 16 || reinterpret_cast<uint64_t>(from) % 16) fail("has a load that is not 16-byte aligned");
    load(to, bytes, barrier, [=] { memcpy(to, from, bytes); });
  }
  void store_tile(const TensorMap& map, int x, int y, int z, const void* from) {
    store(from, [=, host = host_map(map)](const void* box) { store_box(host, {{x, y, z}}, box); });
  }
  void add_tile(const TensorMap& map, int x, int y, int z, const void* from) {
    store(from, [=, host = host_map(map)](const void* box) { add_box(host, {{x, y, z}}, box); });
  }
  void commit() { groups_.push_back({}); }
  void wait_read(int pending) {
    while (unread(static_cast<int>(groups_.size()) - 1 - pending) > 0) scheduler().block(own_);
  }
  void wait_stores() {
    while (storing_ > 0) scheduler().block(own_);
  }
  void fence_pages() {}
  void fence_async() {}

  template <class F>
  bool wait_counters(int n, Scope, const Where& where, F need) {
    scheduler().pause();
    for (int i = 0; i < n; ++i) {
      const Need wanted = need(i);
      if (wanted.value == nullptr) continue;
      while (!aborted() && static_cast<int32_t>(static_cast<uint32_t>(*wanted.value) - wanted.target) < 0) {
        waits_for_ = &wanted;
        where_ = where;
        scheduler().block(world_.counters[wanted.value]);
        waits_for_ = nullptr;
      }
      if (aborted()) return false;
    }
    return true;
  }
  void signal(int32_t* counter, int count, Scope) {
    *counter = static_cast<int32_t>(static_cast<uint32_t>(*counter) + static_cast<uint32_t>(count));
    if (const auto found = world_.counters.find(counter); found != world_.counters.end())
      scheduler().wake(found->second);
    scheduler().pause();
  }
  int claim(int32_t* word, uint32_t base, int end) {
    scheduler().pause();
    const int done = static_cast<int32_t>(static_cast<uint32_t>(*word) - base);
    if (done >= end) return -1;
    *word = static_cast<int32_t>(static_cast<uint32_t>(*word) + 1);
    return done;
  }
  int arrive_acq_rel(int32_t* word) {
    scheduler().pause();
    return (*word)++;
  }
  bool aborted() const { return *world_.params.abort != 0; }

  uint64_t now() const { return 0; }
  void trace(const Where&, Role, IntervalKind, uint64_t) {}
  void stall(uint64_t) {}
  void hang() {
    for (;;) scheduler().block(own_);
  }

  // Describes what the warp waits for. The text is empty if it waits for neither a barrier nor a counter.
  std::string describe() const;
  bool waits_for_counter() const { return waits_for_ != nullptr; }
  // Does what the watchdog does for a waiting warp, except the abort. Called while no fibre runs.
  void note() {
    Late& late = block_.memory.late[warp_];
    if (barrier_) late = {barrier_, parity_, where_};
    if (waits_for_) late = {waits_for_->value, 0, where_};
  }

 protected:
  const BlockMemory<Barrier>& memory() const { return block_.memory; }

 private:
  struct Group {
    int unread = 0;
  };

  Scheduler& scheduler() const { return world_.scheduler; }
  void fail(const std::string& what) {
    if (!aborted()) world_.fail(block_.name + " warp " + std::to_string(warp_) + " " + what);
  }
  static bool passed(const Barrier& barrier, uint32_t parity) { return (barrier.phase & 1) != parity; }
  void sleep(Barrier& barrier, uint32_t parity, const Where& where) {
    barrier_ = &barrier;
    parity_ = parity;
    where_ = where;
    scheduler().block(barrier.waiters);
    barrier_ = nullptr;
  }
  void meet(FibreBlock::Meeting& meeting, int warps) {
    const uint32_t time = meeting.times;
    if (++meeting.here == warps) {
      meeting.here = 0;
      ++meeting.times;
      scheduler().wake(meeting.waiters);
      scheduler().pause();
    }
    while (meeting.times == time) scheduler().block(meeting.waiters);
  }
  // `into` is the block whose page is loaded; null means the warp's own block.
  void load_at(void* to, const TensorMap& map, const Corner& corner, Barrier& barrier,
               FibreBlock* into = nullptr) {
    const HostMap host = host_map(map);
    load(to, host.bytes(), barrier, [=] { load_box(to, host, corner); }, into);
  }
  template <class F>
  void load(void* to, uint32_t bytes, Barrier& barrier, F copy, FibreBlock* into = nullptr) {
    FibreBlock* const block = into ? into : &block_;
    memset(to, 0xFF, bytes);  // NaN both as bf16 and as float32
    scheduler().post([block, bytes, copy, &barrier] {
      copy();
      barrier.bytes -= bytes;
      block->settle(barrier);
    });
  }
  // Schedules two operations: one reads the page, and a later one writes the data to memory.
  template <class F>
  void store(const void* from, F put) {
    if (groups_.empty()) groups_.push_back({});
    const size_t group = groups_.size() - 1;
    ++groups_[group].unread;
    ++storing_;
    scheduler().post([this, from, put, group] {
      auto box = std::make_shared<std::vector<unsigned char>>(
          static_cast<const unsigned char*>(from), static_cast<const unsigned char*>(from) + kBoxBytes);
      --groups_[group].unread;
      scheduler().wake(own_);
      scheduler().post([this, put, box] {
        put(box->data());
        --storing_;
        scheduler().wake(own_);
      });
    });
  }
  // Returns the number of stores in the groups before `end` that have not read their pages yet.
  int unread(int end) const {
    int n = 0;
    for (int i = 0; i < end; ++i) n += groups_[i].unread;
    return n;
  }

  FibreBlock& block_;
  FibreWorld& world_;
  const int warp_;
  Waiters own_;
  std::vector<Group> groups_;  // the last group is not committed yet
  int storing_ = 0;

  // What the warp waits for now: a barrier, a counter, or nothing.
  const Barrier* barrier_ = nullptr;
  uint32_t parity_ = 0;
  const Need* waits_for_ = nullptr;
  Where where_ = between();
};

inline std::string FibreWarp::describe() const {
  static constexpr const char* kRoles[] = {"controller", "weight loader", "storer", "input loader"};
  const std::string who =
      block_.name + " " +
      (warp_ < kConsumerWarp ? kRoles[warp_] : "consumer " + std::to_string(warp_ - kConsumerWarp));
  if (barrier_)
    return who + " waits for " + block_.name_of_barrier(*barrier_) + " phase " +
           std::to_string(barrier_->phase);
  if (waits_for_)
    return who + " waits in segment " + std::to_string(where_.segment) + " layer " +
           std::to_string(where_.layer) + " record " + std::to_string(where_.number) + " for counter " +
           std::to_string(waits_for_->value - need_of(world_.params, memory().dims, where_, 0).value) + ": " +
           std::to_string(*waits_for_->value) + " of " + std::to_string(waits_for_->target);
  return "";
}

}  // namespace mk
