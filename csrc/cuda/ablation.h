// For benchmarks that time loads and arithmetic separately. Building the kernel with -DMK_ABLATION set to a
// value of Ablation (params.h) leaves out either the copies or the arithmetic. The results of such a build
// are meaningless, so instructions also do not wait for each other's results.
#pragma once
#include "gemm.h"

namespace mk {

#if defined(MK_ABLATION)
constexpr Ablation kAblation = static_cast<Ablation>(MK_ABLATION);
#else
constexpr Ablation kAblation = Ablation::kNone;
#endif

// Replaces an instruction's arithmetic in a build that leaves arithmetic out: waits for each page or stage
// that the instruction loads and releases it at once, so that the loader and storer warps work as usual.
template <class Pages>
MK_FN void pass_pages(const Call& c, Pages& pages) {
  pass_over(c, pages);
  for_pages(*c.dims, *c.step, *c.task, [&](const PageUse&) {
    pages.skip(1);
    return true;
  });
}

}  // namespace mk
