// The storer warp copies output pages from shared memory to global memory, of this rank or of others. Once
// all of an instruction's stores are visible, it signals the instruction's counters.
#pragma once
#include "counters.h"
#include "plan.h"

namespace mk {

// Starts the bulk stores of the output page in slot `slot` of the ring. Where they go depends on the result:
// results for the residual are added to it; partial sums go to the rank that stores the rows' residual, or to
// all ranks if the residual is replicated; all other results are stored at this rank.
template <class P>
MK_FN void store(P& p, Block<P>& block, const Params& params, const Task& task, const PageUse& use,
                 int slot) {
  const Sizes& d = block.dims;
  const Result result = task.phase.result;
  const unsigned char* page = block.pages[slot];
  const auto map = [&](int32_t rank) -> const TensorMap& { return map_of(params, rank, use.buffer, false); };
  if (result == Result::kResidual) {
    use.for_boxes(0, 1, [&](const Box& box) { p.add_tile(map(d.rank), box.x, box.y, use.z, page + box.at); });
  } else {
    const Ranks ranks =
        result == Result::kPartial ? residual_ranks(d, operands<Tile>(task.record).row) : own_rank(d);
    MK_LOOP for (int32_t rank = ranks.begin; rank < ranks.end; ++rank) {
      use.for_boxes(0, 1,
                    [&](const Box& box) { p.store_tile(map(rank), box.x, box.y, use.z, page + box.at); });
    }
  }
  p.commit();
}

template <class P>
MK_FN void store_outputs(P& p, Block<P>& block, const Params& params) {
  bool live = true;
  uint32_t page = 0;
  uint32_t written = 0;  // bit s: parity of the next phase of barrier ready[s]
  for (uint32_t j = 0;; ++j) {
    Slot<P>& slot = block.slots[slot_of(j)];
    if (!p.wait_always(slot.fetched, slot_parity(j)) || slot.task.end()) break;
    uint64_t begin = 0;
    bool stored = false;
    int reading = -1;  // ring slot of the page being stored; -1: none
    const auto release = [&](int pending) {
      if (reading < 0) return;
      p.wait_read(pending);
      p.arrive(block.empty[reading], kConsumerWarps);
    };
    live = live && for_pages(block.dims, block.step, slot.task, [&](const PageUse& use) {
             const Page at = page_of(page++);
             const bool output = use.fill == Fill::kOutput;
             if (output) {
               if (!p.wait(block.ready[at.slot], written >> at.slot & 1, slot.task.where)) return false;
               written ^= 1u << at.slot;
               if (begin == 0) begin = p.now();
               store(p, block, params, slot.task, use, at.slot);
               stored = true;
             }
             // An output page may be released when its bulk store has read it. The storer starts the next
             // page's store before it waits for this one, so that two stores overlap. The last output page of
             // a chunk (256 columns) is different: the storer waits at once, because the next chunk's pages
             // need the slot.
             release(output ? 1 : 0);
             reading = output ? at.slot : -1;
             return true;
           });
    release(0);
    const Signals<P> signals(p, params, block.dims, slot.task);
    live = live && p.wait(slot.outputs, slot_parity(j), slot.task.where);
    if (stored) p.wait_stores();
    if (live) signals.send(p);
    if (begin) p.trace(slot.task.where, Role::STORER, IntervalKind::STORE, begin);
    p.arrive(slot.retired);
  }
}

}  // namespace mk
