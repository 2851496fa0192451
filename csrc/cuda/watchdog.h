// Detects waits that last too long because of a bug in the program or in the interpreter.
//
// Most stuck warps wait for another warp that is stuck too, so no single warp can tell where the fault
// is. Therefore a warp records each wait that lasts a millisecond. A wait of Params.timeout_ns aborts
// the launch. By then every stuck warp has a record, and records are kept after the abort.
// megakernel/runtime/cuda/stall.py reads them and finds the one wait that all others depend on.
//
// Before a warp ends, it copies its record from the block's array `late` to Params.diagnoses.
#pragma once
#include "counters.h"

namespace mk {

// Identifies a barrier of a block: its purpose, and the index of the page, stage or instruction slot to
// which the barrier belongs.
struct BarrierName {
  Awaited what;
  int32_t slot;
};
template <class Barrier>
MK_FN BarrierName name_of(const BlockMemory<Barrier>& block, const Barrier& barrier) {
  MK_LOOP for (int32_t s = 0; s < kRing; ++s) {
    if (&barrier == &block.full[s]) return {Awaited::kFull, s};
    if (&barrier == &block.empty[s]) return {Awaited::kEmpty, s};
  }
  MK_LOOP for (int32_t s = 0; s < kStages; ++s) {
    const StageMemory<Barrier>& stage = block.stages[s];
    if (&barrier == &stage.full[0] || &barrier == &stage.full[1]) return {Awaited::kFilled, s};
    if (&barrier == &stage.ready) return {Awaited::kReady, s};
    if (&barrier == &stage.empty) return {Awaited::kFree, s};
  }
  MK_LOOP for (int32_t s = 0;; ++s) {
    const SlotMemory<Barrier>& slot = block.slots[s];
    if (&barrier == &slot.fetched) return {Awaited::kFetched, s};
    if (&barrier == &slot.inputs) return {Awaited::kInputs, s};
    if (&barrier == &slot.loaded) return {Awaited::kLoaded, s};
    if (&barrier == &slot.outputs) return {Awaited::kOutputs, s};
    if (&barrier == &slot.retired || s + 1 == kSlots) return {Awaited::kRetired, s};
  }
}

// Called by each warp before it ends. Reports the wait that lasted too long, if the warp has recorded one.
template <class P>
MK_FN void report(P& p, const Block<P>& block, const Params& params) {
  p.sync_warp();
  const Late& late = block.late[p.warp()];
  if (late.what == nullptr || p.lane() != 0) return;
  Diagnosis& d = params.diagnoses[block.index * kWarps + p.warp()];
  d.set = 1;
  d.segment = late.where.segment;
  d.layer = late.where.layer;
  d.number = late.where.number;
  if (late.what >= &block && late.what < &block + 1) {
    const BarrierName name = name_of(block, *static_cast<const typename P::Barrier*>(late.what));
    d.awaited = static_cast<int32_t>(name.what);
    d.index = name.slot;
    d.expected = static_cast<int32_t>(late.parity);
  } else {
    const auto* counter = static_cast<const volatile int32_t*>(late.what);
    const Need first = need_of(params, block.dims, late.where, 0);
    d.awaited = static_cast<int32_t>(Awaited::kCounter);
    d.index = static_cast<int32_t>(counter - first.value);
    d.value = *counter;
    d.expected = static_cast<int32_t>(need_of(params, block.dims, late.where, d.index).target);
  }
}

}  // namespace mk
