// Gives a consumer warp access to the shared-memory pages of the instruction that it executes. Page i is the
// i-th page of that instruction, counted from 0.
#pragma once
#include "counters.h"
#include "plan.h"

namespace mk {

template <class P>
class Pages {
 public:
  // `first` is the number of the instruction's first page. Pages are numbered over all instructions of the
  // block.
  MK_FN Pages(P& p, Block<P>& block, const Params& params, const Task& task, uint32_t first)
      : p_(p),
        block_(block),
        params_(params),
        task_(task),
        first_(first),
        next_(first),
        generic_(task.is(Operation::kAttention) || by_dots(block.dims, task)) {}

  // ring() is the address of the block's page ring; offset(i) is the distance of page i from it, in bytes.
  MK_FN const unsigned char* ring() const { return block_.pages[0]; }
  MK_FN int32_t offset(int i) const { return page_of(first_ + i).slot * kPageBytes; }

  // Waits until page i is filled or, if it is an output page, until this warp may write it. Returns its
  // address.
  MK_FN unsigned char* full(int i) {
    const Page page = page_of(first_ + i);
    p_.wait(block_.full[page.slot], page.parity, task_.where);
    return block_.pages[page.slot];
  }
  // Releases pages i to i + n - 1: tells the loaders that this warp no longer needs them. Every consumer warp
  // must release every page, except output pages. The next load of a page writes through the async proxy. If
  // the warp has used ordinary reads (generic proxy), a fence must first order them before that load. Tensor
  // cores read through the async proxy and need no fence.
  MK_FN void release(int i, int n = 1) {
    if (generic_) p_.fence_pages();
    for (const int end = i + n; i < end; ++i) p_.arrive(block_.empty[page_of(first_ + i).slot]);
    next_ += n;
  }

  // Tells the storer that this warp has written its part of output page i.
  MK_FN void ready(int i) {
    p_.fence_pages();
    p_.arrive(block_.ready[page_of(first_ + i).slot]);
    ++next_;
  }

  // These functions access the pages in order: take() waits for the next page that this warp has not
  // released, release() releases that page, and skip() does both for n pages.
  MK_FN const unsigned char* take() { return full(static_cast<int>(next_ - first_)); }
  MK_FN void release() { release(static_cast<int>(next_ - first_)); }
  MK_FN void skip(int n) {
    for (int i = 0; i < n; ++i) {
      take();
      release();
    }
  }

  // Attention only: every consumer warp calls this once it has stored and fenced its part of a work item.
  // When all have called it, the item's output rows, from `row` on, are complete, and one warp adds `count`
  // to their counter.
  MK_FN void done(int row, int count) {
    p_.consumer_sync();
    if (p_.warp() == kConsumerWarp) signal_item(p_, params_, block_.dims, task_, row, count);
  }

  // Returns the number of this warp's next page; after an instruction, the next instruction's first.
  MK_FN uint32_t next() const { return next_; }

 private:
  P& p_;
  Block<P>& block_;
  const Params& params_;
  const Task& task_;
  const uint32_t first_;
  uint32_t next_;  // number of the first page that this warp has not yet released or written
  const bool generic_;
};

}  // namespace mk
