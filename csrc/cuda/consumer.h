// The consumer warps are the eight warps of a block that together compute each instruction, in
// Bodies::run. Before an instruction's inputs are written, Bodies::prepare does what needs no inputs.
#pragma once
#include "pages.h"

namespace mk {

template <class P, class Bodies>
MK_FN void consume(P& p, Block<P>& block, const Params& params) {
  uint32_t page = 0, stage = 0;
  for (uint32_t j = 0;; ++j) {
    p.forget();
    const int32_t warp = p.warp() - kConsumerWarp;
    Slot<P>& slot = block.slots[slot_of(j)];
    [[maybe_unused]] const uint64_t waiting = p.now();
    const Task& task = slot.task;
    if (!p.wait_always(slot.fetched, slot_parity(j)) || task.end()) break;
    Call call{&params, &block.dims, &block.step, &block.scratch, &task, block.index, warp};
    Bodies::prepare(p, call);
    p.wait(slot.inputs, slot_parity(j), task.where);
    if (P::kTrace && warp == 0 && p.lane() == 0) block.begun = p.now();
    if (warp == 0) p.trace(task.where, Role::CONSUMER, IntervalKind::COUNTER_WAIT, waiting);
    Pages<P> pages(p, block, params, task, page, stage);
    Bodies::run(p, call, pages);
    page = pages.next(), stage = pages.stage();
    p.fence_async();
    p.arrive(slot.outputs);
    if (warp == 0) p.trace(task.where, Role::CONSUMER, IntervalKind::COMPUTE, block.begun);
    p.arrive(slot.retired);
  }
}

}  // namespace mk
