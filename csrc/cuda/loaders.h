// The two loader warps, which copy data to pages in shared memory. The weight loader runs ahead to later
// instructions as long as pages are free, because weights do not depend on other instructions. The input
// loader first waits for each instruction's counters, because other instructions write its inputs.
#pragma once
#include "counters.h"
#include "plan.h"

namespace mk {

// Whether the weight loader prefetches weights into the L2 cache, and limits its loads in flight
// (Asked::window). It does neither in builds for tensor cores, which need more bytes in flight.
MK_FN bool windowed(const Sizes& d) { return uses_dots(d) && kAblation != Ablation::kCopies; }

// Loads a whole page of weights for dot products, or prefetches it into the L2 cache if `page` is null.
// Such pages come in pairs, and use.member (0 or 1) says which page of the pair this is. With two
// matrices, each page has the same columns of a different matrix. With one matrix, page 0 has the even
// columns of the pair and page 1 the odd ones.
template <class P>
MK_FN void fetch_columns(P& p, const Params& params, Block<P>& block, const PageUse& use, unsigned char* page,
                         typename P::Barrier& full) {
  const bool two = use.step == 1;
  const int32_t piece = use.x / kPieceInner, a = two ? use.y : use.member, b = two ? use.member : use.y / 2;
  const TensorMap& map = map_of(params, block.rank, use.buffer, true);
  if (page)
    p.load_columns(page, map, piece, a, b, use.z, full);
  else
    p.prefetch_columns(map, piece, a, b, use.z);
}

// Prefetches weights, also of later instructions, while the weight loader waits for room in the ring.
// Nothing reports the end of a prefetch, so the loader prefetches one page per kAheadNs, the rate at
// which memory can serve every SM. It stays at most kAheadPages pages ahead of the ring.
template <class P>
MK_FN void prefetch_ahead(P& p, Block<P>& block, const Params& params) {
  BlockAhead& at = block.ahead;
  if (p.lane() != 0 || at.pages >= kAheadPages || !p.passed(at.since, kAheadNs)) return;
  MK_LOOP for (;; ++at.j, at.page = 0) {
    Slot<P>& slot = block.slots[slot_of(at.j)];
    if (!p.test(slot.fetched, slot_parity(at.j)) || slot.task.end() || is_experts(slot.task)) return;
    const Matmul m = matmul_of(slot.task);
    if (!slot.task.is(Operation::kMatmul) || at.page >= dot_weight_pages(m)) continue;
    const int32_t page = at.page++, pieces = ceil_div(m.phase.inner, kPiece), unit = page / 2 / pieces;
    const PageUse use = weight_page(block.dims, slot.task, page & 1, (page / 2 - unit * pieces) * kPiece,
                                    unit * unit_cols(m));
    ++at.pages;
    if (use.whole) fetch_columns(p, params, block, use, nullptr, block.full[0]);
    return;
  }
}

// Starts the loads of a page of tiles. One lane calls it.
template <class P>
MK_FN void load_tiles(P& p, const Params& params, const Block<P>& block, const PageUse& use,
                      unsigned char* page, typename P::Barrier& full) {
  const TensorMap& map = map_of(params, block.rank, use.buffer, use.whole);
  if (use.whole) return p.load_tile(page, map, use.x, use.y, use.z, full);
  use.for_boxes(0, 1, [&](const Box& box) { p.load_tile(page + box.at, map, box.x, box.y, use.z, full); });
}

// Starts to load a page into slot `slot` of the ring. `rows` is the start of its pieces' buffer.
template <class P>
MK_FN void fill(P& p, Block<P>& block, const Params& params, const Task& task, const PageUse& use, int slot,
                const char* rows) {
  unsigned char* page = block.pages[slot];
  typename P::Barrier& full = block.full[slot];
  p.expect(full, use.bytes());
  if (use.pieces && !use.whole) {
    use.for_boxes(p.lane(), P::kLanes, [&](const Box& box) {
      int64_t row = box.y;
      if (is_experts(task) && use.fill == Fill::kInputs) row = Routes(params, block.dims).input(task, box.y);
      const int64_t element = row * use.inner + box.x;
      p.load_bytes(page + box.at, rows + element * 2, box.bytes, full);
    });
  } else if (p.lane() == 0) {
    if ((kHasExperts || uses_dots(block.dims)) && use.pieces) {
      fetch_columns(p, params, block, use, page, full);
    } else {
      load_tiles(p, params, block, use, page, full);
    }
  }
  p.sync_warp();
}

// For a matmul on tensor cores, fills this loader's pages of each stage: inputs if `inputs` is set,
// otherwise weights. `next` is the number of the next stage. Returns false after an abort.
template <class P>
MK_FN bool fill_stages(P& p, Block<P>& block, const Params& params, const Task& task, bool inputs,
                       uint32_t& next) {
  return for_chunks(block.dims, task, [&](const Chunk& chunk) {
    PageUse first = chunk.operand(inputs ? 0 : 1), second = chunk.operand(2);
    const bool both = !inputs && chunk.operands() == 3;
    const uint32_t bytes = first.bytes() + (both ? second.bytes() : 0);
    const int32_t steps = chunk.steps(), end = steps + ceil_div(chunk.outputs(), kStepPages);
    MK_LOOP for (; first.x < end * kTileInner; first.x = second.x += kTileInner, ++next) {
      const Page at = stage_of(next);
      StageMemory<typename P::Barrier>& stage = block.stages[at.slot];
      if (!p.wait(stage.empty, at.parity ^ 1, task.where)) return false;
      const bool loads = first.x < steps * kTileInner && kAblation != Ablation::kCopies;
      p.expect(stage.full[inputs], loads ? bytes : 0);
      if (!loads || p.lane() != 0) continue;
      unsigned char* page = block.pages[at.slot * kStepPages + !inputs];
      load_tiles(p, params, block, first, page, stage.full[inputs]);
      if (both) load_tiles(p, params, block, second, page + kPageBytes, stage.full[inputs]);
    }
    return true;
  });
}

// For a matmul that is computed as dot products, returns where the rows begin that a loader copies in
// pieces. The rows are inputs if `inputs` is set, otherwise the instruction's weights. Returns null if
// the loader copies no pieces for this task.
template <class P>
MK_FN const char* pieces_of(P&, const Block<P>& block, const Params& params, const Task& task, bool inputs) {
  if (!is_experts(task) && !(uses_dots(block.dims) && task.is(Operation::kMatmul))) return nullptr;
  if (inputs && (kOneRow || matmul_of(task).normed())) return nullptr;
  const Phase& phase = task.phase;
  const int32_t layer = inputs ? 0 : layer_of_weights(block.dims, task);
  const auto* start =
      static_cast<const char*>(params.at(block.rank, inputs ? phase.inputs : phase.weights, layer));
  if (inputs || !is_experts(task)) return start;
  return start + int64_t{part_of(task).expert} * phase.matrices * phase.width * phase.inner * 2;
}

// Which of the last kRing pages were filled by this loader. Their data may still be on its way.
template <class P>
class Asked {
 public:
  // Counts one more page of the ring. `filled` says whether this loader filled it.
  MK_FN void count(bool filled) { filled_ = (filled_ << 1 | filled) & ((1u << kRing) - 1); }

  // Waits while kWindowPages or more of this loader's pages may be on their way, because other accesses
  // to memory would wait behind them. `next` is the number of the next page.
  MK_FN bool window(P& p, Block<P>& block, uint32_t next, const Where& where) const {
    uint32_t late = filled_;
    MK_UNROLL for (int i = 1; i < kWindowPages; ++i) late &= late - 1;
    if (late == 0) return true;
    const Page at = page_of(next - count_bits((late & -late) * 2 - 1));
    return p.wait(block.full[at.slot], at.parity, where, [&] { return left(p, block, at); });
  }
  // Waits until all of this loader's pages have arrived. A block must not end while its loads are in
  // flight, as they may be after an abort.
  MK_FN void settle(P& p, Block<P>& block, uint32_t next) const {
    MK_LOOP for (uint32_t n = 1; filled_ >> (n - 1); ++n) {
      const Page at = page_of(next - n);
      if (!(filled_ >> (n - 1) & 1)) continue;
      if (!p.wait_always(block.full[at.slot], at.parity, between(), [&] { return left(p, block, at); }))
        return;
    }
  }

 private:
  // Whether the page has been released. If so, its data has arrived, but a wait for `full` might miss
  // this. Once the other loader has filled the slot again, `full` has its earlier parity again.
  MK_FN static bool left(P& p, Block<P>& block, const Page& at) {
    return p.test(block.empty[at.slot], at.parity);
  }

  uint32_t filled_ = 0;  // bit n: whether this loader filled the page that is n before the last one
};

// Runs the weight loader or the input loader. Both go through the same list of pages. The weight loader fills
// pages of weights, and the input loader pages of inputs. The loader that does not fill a page only
// arrives at the page's `empty` barrier.
template <class P>
MK_FN void load(P& p, Block<P>& block, const Params& params) {
  const bool inputs = p.warp() == kInputWarp;
  bool live = true, staged = false;  // staged: the loader last filled stages, not pages
  uint32_t page = 0, stage = 0;
  Asked<P> asked;
  for (uint32_t j = 0;; ++j) {
    Slot<P>& slot = block.slots[slot_of(j)];
    const Task& task = slot.task;
    if (!p.wait_always(slot.fetched, slot_parity(j)) || task.end()) break;
    const char* rows = pieces_of(p, block, params, task, inputs);
    // In dot products, pages of weights come before pages of inputs. The input loader skips these weight
    // pages, but must wait until their slots in the ring are empty. It does so before it waits for the
    // counters of the inputs, because the slots become free earlier.
    bool waits = inputs, norm = task.is(Operation::kNorm);
    const auto wait = [&] {
      waits = false;
      live = live && wait_words(p, params, block.dims, task);
      if (norm) live = live && wait_rows(p, params, block.dims, block.step, task);
      if (!kOneRow) p.fence_async();  // for one row, `use.opens` fences, and other pages need no fence
      p.arrive(slot.inputs);
    };
    if (waits && !rows) wait();
    if (windowed(block.dims) && !inputs && p.lane() == 0 && block.ahead.pages == 0)
      block.ahead.j = j, block.ahead.page = 0;
    [[maybe_unused]] uint64_t& begin = block.ahead.begin;  // in shared memory, because registers are short
    if constexpr (P::kTrace) {
      if (!inputs && p.lane() == 0) begin = in_stages(block.dims, task) ? p.now() : 0;
    }
    if (staged ? task.is(Operation::kAttention) || is_experts(task) : in_stages(block.dims, task)) {
      // The ring changes between pages and stages, so the previous instruction must have ended.
      live = live && p.wait(block.slots[slot_of(j - 1)].retired, slot_parity(j - 1), task.where);
      staged = !staged;
    }
    live = live && fill_stages(p, block, params, task, inputs, stage);
    live = live && for_pages(block.dims, block.step, task, [&](const PageUse& use) {
             if (inputs && use.opens) {
               if (!wait_item(p, params, block.dims, block.step, task, use.item)) return false;
               p.fence_async();
             }
             const Page at = page_of(page);
             if (!p.wait(block.empty[at.slot], at.parity ^ 1, task.where, [&] {
                   if (windowed(block.dims) && !inputs) prefetch_ahead(p, block, params);
                   return false;
                 }))
               return false;
             if (use.pieces && waits && use.fill == Fill::kInputs) {
               wait();
               if (!live) return false;
             }
             const bool own = inputs == (use.fill != Fill::kWeights);
             if (!own) {
               p.arrive(block.empty[at.slot]);
             } else if (kAblation == Ablation::kCopies) {
               p.arrive(block.full[at.slot]);
             } else {
               if (windowed(block.dims) && !inputs) {
                 if (!asked.window(p, block, page, task.where)) return false;
                 if (p.lane() == 0) block.ahead.pages > 0 ? --block.ahead.pages : ++block.ahead.page;
               }
               if constexpr (P::kTrace) {
                 if (!inputs && p.lane() == 0 && begin == 0) begin = p.now();
               }
               fill(p, block, params, task, use, at.slot, rows);
             }
             asked.count(own);
             ++page;
             return true;
           });
    if (waits) p.arrive(slot.inputs);  // aborted, or there are no rows
    if constexpr (P::kTrace) {
      if (!inputs && p.lane() == 0 && begin) p.trace(task.where, Role::LOADER, IntervalKind::LOAD, begin);
    }
    p.arrive(slot.loaded);
    p.arrive(slot.retired);
  }
  asked.settle(p, block, page);
  MK_LOOP for (uint32_t n = stage; n-- > 0 && stage - n <= kStages;) {
    const Page at = stage_of(n);
    if (!p.wait_always(block.stages[at.slot].full[inputs], at.parity)) return;
  }
}

}  // namespace mk
