// The pages of the present instruction, for a consumer warp; index i counts from the instruction's first
// page.
#pragma once
#include "counters.h"
#include "plan.h"

namespace mk {

template <class P>
class Pages {
 public:
  // `first` is the number of the instruction's first page, counted over all pages of the block.
  MK_FN Pages(P& p, Block<P>& block, const Params& params, const Task& task, uint32_t first)
      : p_(p),
        block_(block),
        params_(params),
        task_(task),
        first_(first),
        next_(first),
        generic_(task.is(Operation::kAttention) || uses_dots(block.dims)) {}

  // The start of the block's ring, and the offset of page i from it.
  MK_FN const unsigned char* ring() const { return block_.pages[0]; }
  MK_FN int32_t offset(int i) const { return page_of(first_ + i).slot * kPageBytes; }

  // Waits until page i is filled.
  MK_FN const unsigned char* full(int i) {
    const Page page = page_of(first_ + i);
    p_.wait(block_.full[page.slot], page.parity, task_.where);
    p_.reads(block_.pages[page.slot], generic_);
    return block_.pages[page.slot];
  }
  // Called after full(i), when this warp no longer needs page i and the n - 1 pages behind it.
  // Every warp releases every page that is not an output. Tensor cores read pages through the
  // asynchronous proxy, which also fills them. Reads by the warp itself are generic, so a fence
  // must order them before the next fill.
  MK_FN void release(int i, int n = 1) {
    if (generic_) p_.fence_pages();
    for (const int end = i + n; i < end; ++i) release_page(p_, block_, page_of(first_ + i).slot);
    next_ += n;
  }

  // For output pages: writable() waits until the page may be written, and ready() says that this warp has
  // written its part.
  MK_FN unsigned char* writable(int i) {
    const Page page = page_of(first_ + i);
    p_.wait(block_.full[page.slot], page.parity, task_.where);
    p_.writes(block_.pages[page.slot]);
    return block_.pages[page.slot];
  }
  MK_FN void ready(int i) {
    p_.fence_pages();
    p_.arrive(block_.ready[page_of(first_ + i).slot]);
    ++next_;
  }

  // Takes one page after another.
  MK_FN const unsigned char* take() { return full(static_cast<int>(next_ - first_)); }
  MK_FN void release() { release(static_cast<int>(next_ - first_)); }
  MK_FN void skip(int n) {
    for (int i = 0; i < n; ++i) {
      take();
      release();
    }
  }

  // Called in attention by every warp when it has stored and fenced its part of an item. When all have called
  // it, the item's rows are final.
  MK_FN void done(int item) {
    p_.consumer_sync();
    if (p_.warp() == kConsumerWarp) signal_item(p_, params_, block_.dims, block_.step, task_, item);
  }

  MK_FN uint32_t next() const { return next_; }  // at the end, the first page of the next instruction

 private:
  P& p_;
  Block<P>& block_;
  const Params& params_;
  const Task& task_;
  const uint32_t first_;
  uint32_t next_;  // the page after those that this warp has released or written
  const bool generic_;
};

}  // namespace mk
