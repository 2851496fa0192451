// For benchmarks that time loads and arithmetic separately. Building the kernel with -DMK_ABLATION set to a
// value of Ablation (params.h) leaves out either the copies or the arithmetic. The results of such a build
// are meaningless, so instructions also do not wait for each other's results.
#pragma once
#include "plan.h"

namespace mk {

#if defined(MK_ABLATION)
constexpr Ablation kAblation = static_cast<Ablation>(MK_ABLATION);
#else
constexpr Ablation kAblation = Ablation::kNone;
#endif

// Replaces an instruction's arithmetic in a build that leaves arithmetic out: waits for each shared-memory
// page that the instruction loads and releases it at once, so that the loader and storer warps work as usual.
template <class Pages>
MK_FN void pass_pages(const Call& c, Pages& pages) {
  int page = 0;
  for_pages(*c.dims, *c.step, *c.task, [&](const PageUse& use) {
    pages.full(page);
    use.fill == Fill::kOutput ? pages.ready(page) : pages.release(page);
    ++page;
    return true;
  });
}

}  // namespace mk
