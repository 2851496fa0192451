// The two loader warps, which copy data to pages in shared memory. The weight loader runs ahead to later
// instructions as long as pages are free, because weights do not depend on other instructions. The input
// loader first waits for each instruction's counters, because other instructions write its inputs.
#pragma once
#include "ablation.h"
#include "counters.h"

namespace mk {

// Starts the load of a page into slot `slot` of the ring. `rows` is the result of `pieces_of`. If a single
// copy loads a page of weights for dot products, also prefetches a later page of weights into the L2 cache,
// so that memory stays busy while workers wait for one another.
template <class P>
MK_FN void fill(P& p, Block<P>& block, const Params& params, const Task& task, const PageUse& use, int slot,
                const char* rows) {
  unsigned char* page = block.pages[slot];
  typename P::Barrier& full = block.full[slot];
  p.expect(full, use.bytes());
  const TensorMap& map = map_of(params, block.rank, use.buffer, use.whole);
  if (use.whole) {
    if (p.lane() == 0) {
      if ((kHasExperts || uses_dots(block.dims)) && use.pieces) {
        // Weight pages come in pairs, and use.member (0 or 1) says which page of the pair this is. With two
        // matrices, the pages have the same columns of one matrix each. With one matrix, page 0 has the even
        // columns of the pair and page 1 the odd ones.
        const bool two = use.step == 1;
        const int32_t piece = use.x / kPieceInner;
        p.load_columns(page, map, piece, two ? use.y : use.member, two ? use.member : use.y / 2, use.z, full);
        const Matmul m = matmul_of(task);
        const int32_t ahead = ahead_cols(m), y = use.y + ahead;
        if (ahead > 0 && y + unit_cols(m) <= m.tile.col + m.tile.cols)
          p.prefetch_columns(map, piece, two ? y : use.member, two ? use.member : y / 2, use.z);
      } else {
        p.load_tile(page, map, use.x, use.y, use.z, full);
      }
    }
  } else if (use.pieces) {
    use.for_boxes(p.lane(), P::kLanes, [&](const Box& box) {
      int64_t row = box.y;
      if (is_experts(task) && use.fill == Fill::kInputs) row = Routes(params, block.dims).input(task, box.y);
      const int64_t element = row * use.inner + box.x;
      p.load_bytes(page + box.at, rows + element * 2, box.bytes, full);
    });
  } else {
    use.for_boxes(p.lane(), P::kLanes,
                  [&](const Box& box) { p.load_tile(page + box.at, map, box.x, box.y, use.z, full); });
  }
  p.sync_warp();
}

// For a matmul that is computed as dot products, returns the address from which a loader copies pieces of
// rows: the inputs if `inputs` is set, otherwise the instruction's weights. Returns null if the loader copies
// no pieces for this task.
template <class P>
MK_FN const char* pieces_of(P&, const Block<P>& block, const Params& params, const Task& task, bool inputs) {
  if (!is_experts(task) && !(uses_dots(block.dims) && task.is(Operation::kMatmul))) return nullptr;
  if (inputs && matmul_of(task).normed()) return nullptr;
  const Phase& phase = task.phase;
  const int32_t layer = inputs ? 0 : layer_of_weights(block.dims, task);
  const auto* start =
      static_cast<const char*>(params.at(block.rank, inputs ? phase.inputs : phase.weights, layer));
  if (inputs || !is_experts(task)) return start;
  return start + int64_t{part_of(task).expert} * phase.matrices * phase.width * phase.inner * 2;
}

// Called by a loader (0 weights, 1 inputs) when its stream ends, after `page` pages. It matters after an
// abort: loads may still be in flight, and a block must not end before they complete. So this function waits
// for the `full` barriers of all pages in the ring. Both loaders must arrive at each of these barriers. A
// loader that has processed fewer pages than the other therefore first arrives for the pages that it has
// missed.
template <class P>
MK_FN void settle_loads(P& p, Block<P>& block, int loader, uint32_t page) {
  if (p.lane() == 0) block.passed[loader] = page;
  p.arrive(block.parted);
  if (!p.wait_always(block.parted, 0)) return;
  const uint32_t other = block.passed[1 - loader], last = page > other ? page : other;
  MK_LOOP for (; page < last; ++page) p.arrive(block.full[page_of(page).slot]);
  MK_LOOP for (uint32_t n = last > kPages ? last - kPages : 0; n < last; ++n) {
    const Page at = page_of(n);
    if (!p.wait_always(block.full[at.slot], at.parity)) return;
  }
}

// Runs the weight loader or the input loader. Both go through the same list of pages. The weight loader fills
// pages of weights, and the input loader pages of inputs. For all other pages, a loader only arrives at the
// page's `full` barrier, which needs both loaders.
template <class P>
MK_FN void load(P& p, Block<P>& block, const Params& params) {
  const bool inputs = p.warp() == kInputWarp;
  bool live = true;
  uint32_t page = 0;
  for (uint32_t j = 0;; ++j) {
    Slot<P>& slot = block.slots[slot_of(j)];
    const Task& task = slot.task;
    if (!p.wait_always(slot.fetched, slot_parity(j)) || task.end()) break;
    const char* rows = pieces_of(p, block, params, task, inputs);
    // In dot products, pages of weights come before pages of inputs. For these weight pages, the input loader
    // must also wait until their slots in the ring are empty, and arrive at their barriers. It does so before
    // it waits for the counters of the inputs, because the slots become free earlier.
    bool waits = inputs;
    const auto wait = [&] {
      waits = false;
      live = live && wait_words(p, params, block.dims, task);
      if (task.is(Operation::kNorm)) live = live && wait_rows(p, params, block.dims, block.step, task);
      p.fence_async();
      p.arrive(slot.inputs);
    };
    if (waits && !rows) wait();
    uint64_t begin = 0;
    live = live && for_pages(block.dims, block.step, task, [&](const PageUse& use) {
             if (inputs && use.opens) {
               if (!wait_item(p, params, block.dims, block.step, task, use.item)) return false;
               p.fence_async();
             }
             const Page at = page_of(page);
             if (!p.wait(block.empty[at.slot], at.parity ^ 1, task.where)) return false;
             if (use.pieces && waits && use.fill == Fill::kInputs) {
               wait();
               if (!live) return false;
             }
             const Fill own = inputs ? Fill::kInputs : Fill::kWeights;
             if (kAblation != Ablation::kCopies && use.fill == own) {
               if (begin == 0) begin = p.now();
               fill(p, block, params, task, use, at.slot, rows);
             } else {
               p.arrive(block.full[at.slot]);
             }
             ++page;
             return true;
           });
    if (waits) p.arrive(slot.inputs);  // aborted, or there are no rows
    if (begin && !inputs) p.trace(task.where, Role::LOADER, IntervalKind::LOAD, begin);
    p.arrive(slot.loaded);
    p.arrive(slot.retired);
  }
  settle_loads(p, block, inputs ? 1 : 0, page);
}

}  // namespace mk
