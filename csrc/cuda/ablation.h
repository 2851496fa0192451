// Builds that leave a part of the work out, for benchmarks: -DMK_ABLATION is an Ablation. They show how fast
// the other part is alone. Results are meaningless, so only launches that do not synchronise are of use.
#pragma once
#include "plan.h"

namespace mk {

#if defined(MK_ABLATION)
constexpr Ablation kAblation = static_cast<Ablation>(MK_ABLATION);
#else
constexpr Ablation kAblation = Ablation::kNone;
#endif

// In place of an instruction's work: every page is taken and given back.
template <class Pages>
MK_FN void pass_pages(const Call& c, Pages& pages) {
  int page = 0;
  for_pages(*c.dims, *c.step, *c.task, [&](const PageUse& use) {
    if (use.fill == Fill::kOutput) {
      pages.writable(page);
      pages.ready(page);
    } else {
      pages.full(page);
      pages.release(page);
    }
    ++page;
    return true;
  });
}

}  // namespace mk
