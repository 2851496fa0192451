// Bugs that tests plant to see which check finds them. Each bug weakens one function of the platform
// (../cuda/platform.h) when warps of one role, such as the storer, call it. The code of the roles does not
// change.
#pragma once
#include "../../../csrc/cuda/watchdog.h"

namespace mk {

enum class Bug : int32_t {
  kNone,
  kDroppedArrival,  // a consumer warp forgets to release a page
  kEarlyRelease,    // the storer frees a page that its store still reads
  kRelaxedSignal,   // the storer signals without release ordering
  kNoInputFence,    // the input loader uses no proxy fence between waiting for data and loading it
  kNoOutputFence,   // a consumer warp does not fence what it has written
  kWrongPhase,      // a consumer warp waits for the phase before the one it needs
  kEarlySignal,     // the storer signals before its stores have completed
  kOldMap,          // a block uses the stale tensor map of the previous launch
  kOtherScope,      // the storer's signals have another scope than the waits
  kNeverRetired,    // a consumer warp does not report the end of an instruction
  kLostLoad,        // a load of weights never happens
  kLostInput,       // a load of activations never happens
  kHanging,         // a consumer warp never returns from its arithmetic
  kLoneRelease,     // a consumer warp does not release a page in the worker's other block
  kForgottenTwin,   // a block reuses a page that consumers on the worker's other SM still read
  kEarlyEnd,        // a block ends while the worker's other SM may still access it
};

template <class Base>
class Planted : public Base {
 public:
  using typename Base::Barrier;
  template <class... Args>
  explicit Planted(Bug bug, Args&&... args) : Base(static_cast<Args&&>(args)...), bug_(bug) {}

  void arrive(Barrier& barrier, int count = 1) {
    const bool wrong = bug_ == Bug::kDroppedArrival && at(kWarps - 1, barrier, Awaited::kEmpty);
    if (!wrong || ++times_ != 3) Base::arrive(barrier, count);
  }
  void init(Barrier& barrier, int arrivals) {
    const bool wrong =
        bug_ == Bug::kForgottenTwin && name_of(this->memory(), barrier).what == Awaited::kEmpty;
    Base::init(barrier, wrong ? arrivals / kSms : arrivals);
  }
  void arrive_at(int sm, Barrier& barrier, int count = 1) {
    if (name_of(this->memory(), barrier).what == Awaited::kRetired) {
      if (bug_ != Bug::kNeverRetired || this->warp() != kWarps - 1 || ++times_ != 3)
        Base::arrive_at(sm, barrier, count);
      return;
    }
    const bool released =
        sm != sm_of(this->memory()) && name_of(this->memory(), barrier).what == Awaited::kEmpty;
    if (released && bug_ == Bug::kForgottenTwin) return;
    if (released && bug_ == Bug::kLoneRelease && this->warp() == kWarps - 1 && ++times_ == 3) return;
    Base::arrive_at(sm, barrier, count);
  }
  void sync_block() {
    if (bug_ != Bug::kEarlyEnd || times_++ == 0) Base::sync_block();
  }
  bool wait(Barrier& barrier, uint32_t parity, const Where& where) {
    const bool wrong = bug_ == Bug::kWrongPhase && at(kWarps - 1, barrier, Awaited::kFull);
    return Base::wait(barrier, wrong ? parity ^ 1 : parity, where);
  }
  void load_tile(void* to, const TensorMap& map, int x, int y, int z, Barrier& barrier) {
    const bool wrong = (bug_ == Bug::kLostLoad && at(kWeightWarp, barrier, Awaited::kFull)) ||
                       (bug_ == Bug::kLostInput && at(kInputWarp, barrier, Awaited::kFull));
    if (!wrong || ++times_ != 3) Base::load_tile(to, map, x, y, z, barrier);
  }
  void load_tile_for_all(void* to, const TensorMap& map, int x, int y, int z, Barrier& barrier) {
    if (bug_ != Bug::kLostLoad || ++times_ != 3) Base::load_tile_for_all(to, map, x, y, z, barrier);
  }
  void acquire_map(const TensorMap& map) {
    if (bug_ != Bug::kOldMap) Base::acquire_map(map);
  }
  void wait_read(int pending) {
    if (bug_ != Bug::kEarlyRelease) Base::wait_read(pending);
  }
  void wait_stores() {
    if (bug_ != Bug::kEarlySignal) Base::wait_stores();
  }
  void fence_pages() {
    if (bug_ != Bug::kNoOutputFence || this->warp() < kConsumerWarp) Base::fence_pages();
  }
  void fence_async() {
    if (bug_ == Bug::kNoInputFence && this->warp() == kInputWarp) return;
    if (bug_ == Bug::kNoOutputFence && this->warp() >= kConsumerWarp) return;
    Base::fence_async();
  }
  void reads(const void* page, bool generic) {
    if (bug_ == Bug::kHanging && this->warp() == kWarps - 1 && ++times_ == 3) Base::hang();
    Base::reads(page, generic);
  }
  void signal(int32_t* counter, int count, Scope scope) {
    const Scope other = scope == Scope::kGpu ? Scope::kSystem : Scope::kGpu;
    Base::signal(counter, count, bug_ == Bug::kOtherScope ? other : scope,
                 bug_ == Bug::kRelaxedSignal ? __ATOMIC_RELAXED : __ATOMIC_RELEASE);
  }

 private:
  bool at(int warp, const Barrier& barrier, Awaited what) const {
    return this->warp() == warp && name_of(this->memory(), barrier).what == what;
  }

  const Bug bug_;
  int times_ = 0;  // how many calls could have shown the bug so far
};

}  // namespace mk
