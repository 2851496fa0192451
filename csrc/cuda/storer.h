// The storer warp copies output pages from shared memory to global memory, of this rank or of others. Once
// all of an instruction's stores are visible, it signals the instruction's counters.
#pragma once
#include "counters.h"
#include "plan.h"

namespace mk {

// Starts the bulk stores of an output page at address `page`. Where they go depends on the result:
// results for the residual are added to it; partial sums go to the rank that stores the rows' residual, or to
// all ranks if the residual is replicated; all other results are stored at this rank.
template <class P>
MK_FN void store(P& p, Block<P>& block, const Params& params, const Task& task, const PageUse& use,
                 const unsigned char* page) {
  const Sizes& d = block.dims;
  const Result result = task.phase.result;
  const Ranks ranks =
      result == Result::kPartial ? residual_ranks(d, operands<Tile>(task.record).row) : own_rank(d);
  MK_LOOP for (int32_t rank = ranks.begin; rank < ranks.end; ++rank) {
    const TensorMap& map = map_of(params, rank, use.buffer, false);
    use.for_boxes(0, 1, [&](const Box& box) {
      p.store_tile(map, box.x, box.y, use.z, page + box.at, result == Result::kResidual);
    });
  }
}

template <class P>
MK_FN void store_outputs(P& p, Block<P>& block, const Params& params) {
  bool live = true;
  uint32_t stage = 0;
  uint32_t written = 0;  // bit s: parity of the next phase of stage s's barrier `ready`
  for (uint32_t j = 0;; ++j) {
    Slot<P>& slot = block.slots[slot_of(j)];
    if (!p.wait_always(slot.fetched, slot_parity(j)) || slot.task.end()) break;
    uint64_t begin = 0;
    bool stored = false;
    live = live && for_chunks(block.dims, slot.task, [&](const Chunk& chunk) {
             stage += chunk.steps();
             MK_LOOP for (int32_t page = 0; page < chunk.outputs(); ++stage) {
               const int at = stage_of(stage).slot;
               if (!p.wait(block.stages[at].ready, written >> at & 1, slot.task.where)) return false;
               written ^= 1u << at;
               if (begin == 0) begin = p.now();
               stored = true;
               MK_LOOP for (int i = 0; i < kStepPages && page < chunk.outputs(); ++i, ++page)
                   store(p, block, params, slot.task, chunk.output(page), block.pages[at * kStepPages + i]);
               p.wait_read();  // then the stage may be overwritten
               p.arrive(block.stages[at].empty, kConsumerWarps);
             }
             return true;
           });
    const Signals<P> signals(p, params, block.dims, slot.task);
    live = live && p.wait(slot.outputs, slot_parity(j), slot.task.where);
    if (stored) p.wait_stores();
    if (live) signals.send(p);
    if (begin) p.trace(slot.task.where, Role::STORER, IntervalKind::STORE, begin);
    p.arrive(slot.retired);
  }
}

}  // namespace mk
