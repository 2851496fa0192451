// Waits that last too long: a bug of the program or of the interpreter, which ends the launch with a
// Diagnosis.
//
// A wait for a counter (csrc/cuda/counters.h) writes it at once. One for a barrier sits in the middle of the
// work, in many places: it only leaves a note in `late`, which its warp reports at its end.
#pragma once
#include "block.h"

namespace mk {

// Which barrier it is: what for, and the slot of its page or instruction.
struct BarrierName {
  Awaited what;
  int32_t slot;
};
template <class Barrier>
MK_FN BarrierName name_of(const BlockMemory<Barrier>& block, const Barrier& barrier) {
  MK_LOOP for (int32_t s = 0; s < kPages; ++s) {
    if (&barrier == &block.full[s]) return {Awaited::kFull, s};
    if (&barrier == &block.ready[s]) return {Awaited::kReady, s};
    if (&barrier == &block.empty[s]) return {Awaited::kEmpty, s};
  }
  MK_LOOP for (int32_t s = 0; s < kSlots; ++s) {
    const SlotMemory<Barrier>& slot = block.slots[s];
    if (&barrier == &slot.fetched) return {Awaited::kFetched, s};
    if (&barrier == &slot.inputs) return {Awaited::kInputs, s};
    if (&barrier == &slot.loaded) return {Awaited::kLoaded, s};
    if (&barrier == &slot.outputs) return {Awaited::kOutputs, s};
    if (&barrier == &slot.retired) return {Awaited::kRetired, s};
  }
  return {Awaited::kParted, 0};
}

// How often Params.timeout_ns a wait for a barrier may last. Most who wait too long wait for another who
// does: whoever waits for a counter is to be the first to say so, then who waits for a page.
template <class Barrier>
MK_FN uint32_t patience(const BlockMemory<Barrier>& block, const Barrier& barrier) {
  return &barrier < &block.slots[0].fetched ? 2 : 3;
}

// Fills in who waited too long, and for what; by who has found `set` to be 0 when he added to it.
MK_FN void diagnose(Diagnosis& d, int32_t rank, int32_t worker, int32_t warp, const Where& where,
                    Awaited awaited, int32_t slot, int32_t counter, int32_t value, int32_t expected) {
  d.rank = rank;
  d.worker = worker;
  d.warp = warp;
  d.segment = where.segment;
  d.layer = where.layer;
  d.number = where.number;
  d.awaited = static_cast<int32_t>(awaited);
  d.slot = slot;
  d.counter = counter;
  d.value = value;
  d.expected = expected;
}

// By a warp at its end: what it waited for too long, where it did.
template <class P>
MK_FN void report(P& p, const Block<P>& block, const Params& params) {
  p.sync_warp();
  const auto& late = block.late[p.warp()];
  if (late.barrier == nullptr || p.arrive_acq_rel(&params.diagnosis->set) != 0 || p.lane() != 0) return;
  const BarrierName name = name_of(block, *late.barrier);
  diagnose(*params.diagnosis, block.rank, block.worker, p.warp(), late.where, name.what, name.slot, 0, 0,
           static_cast<int32_t>(late.parity));
}

}  // namespace mk
