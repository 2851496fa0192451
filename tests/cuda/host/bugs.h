// Bugs that tests plant to see that the launch ends and that its error names who keeps the others waiting.
// The code of the roles does not change.
#pragma once
#include "../../../csrc/cuda/watchdog.h"

namespace mk {

enum class Bug : int32_t {
  kNone,
  kDroppedArrival,  // a consumer warp forgets to release a page
  kNeverRetired,    // a consumer warp does not report the end of an instruction
  kLostLoad,        // a load of weights never happens
  kLostInput,       // a load of activations never happens
  kHanging,         // a consumer warp never returns from its arithmetic
};

template <class Base>
class Planted : public Base {
 public:
  using typename Base::Barrier;
  template <class... Args>
  explicit Planted(Bug bug, Args&&... args) : Base(static_cast<Args&&>(args)...), bug_(bug) {}

  void arrive(Barrier& barrier, int count = 1) {
    if (!shows(Bug::kDroppedArrival, kWarps - 1, barrier, Awaited::kEmpty)) Base::arrive(barrier, count);
  }
  void arrive_at(int sm, Barrier& barrier, int count = 1) {
    if (!shows(Bug::kNeverRetired, kWarps - 1, barrier, Awaited::kRetired))
      Base::arrive_at(sm, barrier, count);
  }
  bool wait(Barrier& barrier, uint32_t parity, const Where& where) {
    if (shows(Bug::kHanging, kWarps - 1, barrier, Awaited::kFull)) Base::hang();
    return Base::wait(barrier, parity, where);
  }
  void load_tile(void* to, const TensorMap& map, int x, int y, int z, Barrier& barrier) {
    if (!shows(Bug::kLostLoad, kWeightWarp, barrier, Awaited::kFull) &&
        !shows(Bug::kLostInput, kInputWarp, barrier, Awaited::kFull))
      Base::load_tile(to, map, x, y, z, barrier);
  }
  void load_tile_for_all(void* to, const TensorMap& map, int x, int y, int z, Barrier& barrier) {
    if (!shows(Bug::kLostLoad, kWeightWarp, barrier, Awaited::kFull))
      Base::load_tile_for_all(to, map, x, y, z, barrier);
  }

 private:
  // Whether a bug shows in this call: the third one by that warp with such a barrier.
  bool shows(Bug bug, int warp, const Barrier& barrier, Awaited what) {
    return bug_ == bug && this->warp() == warp && name_of(this->memory(), barrier).what == what &&
           ++times_ == 3;
  }

  const Bug bug_;
  int times_ = 0;
};

}  // namespace mk
