// To time loads and arithmetic separately, a benchmark builds the kernel with -DMK_ABLATION set to a value of
// Ablation (params.h), which omits either the copies or the arithmetic. The results of such a build are
// meaningless, so its instructions do not wait for each other.
#pragma once
#include "plan.h"

namespace mk {

#if defined(MK_ABLATION)
constexpr Ablation kAblation = static_cast<Ablation>(MK_ABLATION);
#else
constexpr Ablation kAblation = Ablation::kNone;
#endif

// Takes the place of an instruction's arithmetic in a build that omits arithmetic: waits for each
// shared-memory page that the instruction uses and releases it, so that the other warps proceed as usual.
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
