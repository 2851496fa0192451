// Gives a consumer warp access to the shared-memory pages of the instruction that it executes. Page i is the
// i-th page of that instruction, counted from 0.
#pragma once
#include "counters.h"
#include "plan.h"

namespace mk {

template <class P>
class Pages {
 public:
  // `first`, `stage`: numbers of the instruction's first page and stage (block.h), counted since the launch.
  MK_FN Pages(P& p, Block<P>& block, const Params& params, const Task& task, uint32_t first, uint32_t stage)
      : p_(p), block_(block), params_(params), task_(task), first_(first), next_(first), stage_(stage) {}

  // ring() is the address of the block's page ring; offset(i) is the distance of page i from it, in bytes.
  MK_FN unsigned char* ring() const { return block_.pages[0]; }
  MK_FN int32_t offset(int i) const { return page_of(first_ + i).slot * kPageBytes; }

  // Waits until page i is filled. Returns its address.
  MK_FN unsigned char* full(int i) {
    const Page page = page_of(first_ + i);
    p_.wait(block_.full[page.slot], page.parity, task_.where);
    return block_.pages[page.slot];
  }
  // Releases pages i to i + n - 1: tells the loaders that this warp no longer needs them. Every consumer warp
  // must release every page. A fence orders the warp's reads (generic proxy) before the next load of a page,
  // which writes through the async proxy.
  MK_FN void release(int i, int n = 1) {
    p_.fence_pages();
    for (const int end = i + n; i < end; ++i) p_.arrive(block_.empty[page_of(first_ + i).slot]);
    next_ += n;
  }

  // Matmuls on tensor cores go through stages in order. filled(n) returns whether this lane sees that the
  // n-th stage after the current one is filled. wait_stage() waits until the current stage is filled or, if
  // it is for results, until this warp may write it.
  MK_FN bool filled(int n) {
    const Page at = stage_of(stage_ + n);
    auto& full = block_.stages[at.slot].full;
    return p_.test(full[0], at.parity) & p_.test(full[1], at.parity);
  }
  MK_FN bool all(bool held) { return p_.all(held); }
  MK_FN void wait_stage() {
    const Page at = stage_of(stage_);
    MK_LOOP for (auto& full : block_.stages[at.slot].full) p_.wait(full, at.parity, task_.where);
  }
  MK_FN void advance() { ++stage_; }
  // Releases the n-th stage before the current one if `held` is 1, and nothing if it is 0. No fence is
  // needed, because tensor cores read through the async proxy, as loads write.
  MK_FN void release_stage(int n, int held) {
    p_.arrive(block_.stages[stage_of(stage_ - n).slot].empty, held);
  }
  // Tells the storer that this warp has written its results to the current stage, and goes to the next.
  MK_FN void ready() {
    p_.fence_pages();
    p_.arrive(block_.stages[stage_of(stage_++).slot].ready);
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

  // Attention only: every consumer warp calls this once it has stored and fenced its results for a work
  // item. When all warps have called it, the item's output rows, from `row` on, are complete. Then one
  // warp adds `count` to the counter of these rows.
  MK_FN void done(int row, int count) {
    p_.consumer_sync();
    if (p_.warp() == kConsumerWarp) signal_item(p_, params_, block_.dims, task_, row, count);
  }

  // Return the numbers of this warp's next page and current stage. At the end of an instruction, these
  // are the first page and stage of the next instruction.
  MK_FN uint32_t next() const { return next_; }
  MK_FN uint32_t stage() const { return stage_; }

 private:
  P& p_;
  Block<P>& block_;
  const Params& params_;
  const Task& task_;
  const uint32_t first_;
  uint32_t next_;   // number of the first page that this warp has not yet released
  uint32_t stage_;  // number of the current stage
};

}  // namespace mk
