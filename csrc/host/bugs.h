// Bugs to plant: each weakens one primitive where one role calls it, so that tests show which check finds the
// bug. The roles do not know of the bugs.
#pragma once
#include "../cuda/watchdog.h"

namespace mk {

enum class Bug : int32_t {
  kNone,
  kDroppedArrival,  // a consumer warp forgets to release a page
  kEarlyRelease,    // the storer frees a page that its store still reads
  kRelaxedSignal,   // the storer's signals do not release
  kNoInputFence,    // the input loader loads data it has waited for without a proxy fence
  kNoOutputFence,   // a consumer warp does not fence what it has written
  kWrongPhase,      // a consumer warp waits for the phase before the one it needs
  kEarlySignal,     // the storer signals before its stores have completed
  kOldMap,          // a block uses a tensor map as it was in the previous launch
  kOtherScope,      // the storer signals with another scope than that of the waits
  kNeverRetired,    // a consumer warp does not report the end of an instruction
  kLostLoad,        // a load of weights never happens
  kLostInput,       // a load of activations never happens
  kHanging,         // a consumer warp never returns from its arithmetic
  kLoneRelease,     // a consumer warp releases a page in its own block only
  kForgottenTwin,   // a block treats a page as free although the other SM's consumers still read it
  kEarlyEnd,        // a block ends while the other SM may still access it
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
