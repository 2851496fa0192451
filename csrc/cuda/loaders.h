// The two loaders, which load pages into shared memory. The weight loader never waits for data of this
// launch. It therefore runs ahead, beyond the current instruction, as far as there are empty pages. The input
// loader waits for each instruction's counters before it loads the inputs.
#pragma once
#include "ablation.h"
#include "counters.h"

namespace mk {

// Notes how many bytes of weights for both SMs of the worker are loaded into a slot of the ring; negative if
// the other SM loads them. Only the weight loader calls this.
template <class P>
MK_FN void note_shared(P& p, Block<P>& block, int slot, int32_t bytes) {
  if (p.lane() == 0) block.shared[slot] = bytes;
}

// Starts the loads of a page, as one copy or as several copies that the lanes divide among themselves. `rows`
// is the address that `pieces_of` returned. The two SMs of a worker take turns: one loads a page of weights
// for both. If a single copy loads a page of weights for dot products, the function also prefetches a later
// page, which does not fit into the ring yet, into the L2 cache. So memory stays busy while workers wait for
// one another.
template <class P>
MK_FN void fill(P& p, Block<P>& block, const Params& params, const Task& task, const PageUse& use, int slot,
                const char* rows) {
  unsigned char* page = block.pages[slot];
  typename P::Barrier& full = block.full[slot];
  const uint32_t bytes = use.bytes();
  p.expect(full, bytes);
  const bool shared = kSms > 1 && use.fill == Fill::kWeights;
  if (shared) {
    const bool turn = use.turn % kSms == sm_of(block);
    note_shared(p, block, slot, turn ? static_cast<int32_t>(bytes) : -static_cast<int32_t>(bytes));
    if (!turn) return;
  }
  const TensorMap& map = map_of(params, block.rank, use.buffer, use.whole);
  const auto load_tile = [&](void* to, int32_t x, int32_t y) {
    if (shared) {
      p.load_tile_for_all(to, map, x, y, use.z, full);
    } else {
      p.load_tile(to, map, x, y, use.z, full);
    }
  };
  if (use.whole) {
    if (p.lane() == 0) {
      if (use.pieces) {
        // Two pages form a pair (members 0 and 1) and are loaded for the same range of columns. If there are
        // two matrices, each page has this range of one matrix. If there is one matrix, each page has every
        // second column of the range.
        const bool two = use.step == 1;
        const int32_t piece = use.x / kPieceInner;
        p.load_columns(page, map, piece, two ? use.y : use.member, two ? use.member : use.y / 2, use.z, full);
        const Matmul m = matmul_of(task);
        const int32_t ahead = ahead_cols(m), y = use.y + ahead;
        if (ahead > 0 && y + unit_cols(m) <= m.tile.col + m.tile.cols)
          p.prefetch_columns(map, piece, two ? y : use.member, two ? use.member : y / 2, use.z);
      } else {
        load_tile(page, use.x, use.y);
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
    use.for_boxes(p.lane(), P::kLanes, [&](const Box& box) { load_tile(page + box.at, box.x, box.y); });
  }
  p.sync_warp();
}

// For a matmul that is computed as dot products: returns the address of the matrix whose rows a loader
// copies, in pieces of at most kPiece elements. The address is the start of a buffer, or of the instruction's
// weights in that buffer. Returns null if the loader copies no such pieces.
template <class P>
MK_FN const char* pieces_of(P&, const Block<P>& block, const Params& params, const Task& task, bool inputs) {
  if (!is_experts(task) && !(uses_dots(block.dims) && task.is(Operation::kMatmul))) return nullptr;
  if (inputs && matmul_of(task).normed()) return nullptr;
  const Phase& phase = task.phase;
  const auto* start =
      static_cast<const char*>(params.at(block.rank, inputs ? phase.inputs : phase.weights, 0));
  if (inputs) return start;
  return start + int64_t{first_matrix(block.dims, task, 1)} * phase.matrices * phase.width * phase.inner * 2;
}

// Called at the end of the stream by loader 0 (weights) or 1 (inputs), which has arrived at the `full`
// barriers of `page` pages. After an abort, loads may still be in flight, and a block must not end before
// they have completed. This function therefore waits for the `full` barriers of all pages in the ring.
// Before that, a loader that has processed fewer pages than another loader arrives at the barriers of the
// missing pages, because otherwise these barriers would never complete. The wait skips a page if the other SM
// should have requested the page's weights but has not.
template <class P>
MK_FN void settle_loads(P& p, Block<P>& block, int loader, uint32_t page) {
  const int own = sm_of(block), other = kSms - 1 - own;
  MK_UNROLL for (int sm = 0; sm < kSms; ++sm) {
    if (p.lane() == 0) p.at_sm(sm, block).passed[own][loader] = page;
    p.hand_over_at(sm, block.parted);
  }
  if (!p.wait_always(block.parted, 0)) return;
  uint32_t last = page;
  const auto include = [&](uint32_t passed) { last = passed > last ? passed : last; };
  include(block.passed[own][1 - loader]);
  if constexpr (kSms > 1) {
    include(block.passed[other][0]);
    include(block.passed[other][1]);
  }
  const uint32_t asked = block.passed[own][0], asked_there = block.passed[other][0];
  MK_LOOP for (; page < last; ++page) {
    const int slot = page_of(page).slot;
    int32_t bytes = 0;
    if (kSms > 1 && loader == 0 && page < asked_there) bytes = p.at_sm(other, block).shared[slot];
    if (bytes > 0) {
      p.expect(block.full[slot], bytes);
    } else {
      p.arrive(block.full[slot]);
    }
  }
  MK_LOOP for (uint32_t n = last > kPages ? last - kPages : 0; n < last; ++n) {
    const Page at = page_of(n);
    if (kSms > 1 && n >= asked_there && n < asked && block.shared[at.slot] < 0) continue;
    if (!p.wait_always(block.full[at.slot], at.parity)) return;
  }
}

// Runs the weight loader or the input loader. Both process the same list of pages. Each loader fills the
// pages of its own kind (weights or inputs), and for every other page only arrives at the page's `full`
// barrier.
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
    // For dot products, the ring is filled with weight pages and then with pages of input rows. The input
    // loader arrives at the barriers of the weight pages too, and must first wait until their slots are
    // empty. It waits for these slots before it waits for the counters, because the slots, which earlier
    // instructions may still use, become free first.
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
               // In builds for workers of two SMs, no register is left for `begin`.
               if (kSms == 1 && begin == 0) begin = p.now();
               fill(p, block, params, task, use, at.slot, rows);
             } else {
               if (kSms > 1 && !inputs) note_shared(p, block, at.slot, 0);
               p.arrive(block.full[at.slot]);
             }
             ++page;
             return true;
           });
    if (waits) p.arrive(slot.inputs);  // aborted, or there are no rows
    if (begin && !inputs) p.trace(task.where, Role::LOADER, IntervalKind::LOAD, begin);
    p.arrive_at(0, slot.loaded);
    p.arrive_at(0, slot.retired);
  }
  settle_loads(p, block, inputs ? 1 : 0, page);
}

}  // namespace mk
