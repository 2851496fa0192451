// The C interface that scheduler/verify/native.py loads. Functions return -1 if memory or threads run out.
// All numbers in their arguments come from a program that megakernel/program/checks.py has checked.
#include <algorithm>
#include <exception>

#include "reach.h"
#include "walk.h"

#define MK_API extern "C" __attribute__((visibility("default")))

using namespace mk::verify;

// Calls topological_order (reach.h), which describes the arguments.
MK_API int32_t mk_verify_order(const Graph* graph, int32_t* missing, int32_t* order) {
  try {
    return topological_order(*graph, missing, order);
  } catch (const std::exception&) {
    return -1;
  }
}

// Checks the order of all accesses to data. Writes up to `most` violations into `found`, and returns how many
// there are. `order` is a topological order of the graph's nodes (rows). With several ranks, no stream may
// end before the work of all ranks has ended. To check this, each row in `lasts` must come after all rows in
// `ends`. For each stream, `lasts` has its last row, and `ends` its last row that does work or is waited for.
MK_API int64_t mk_verify_data(const Graph* graph, const int32_t* order, const Step* step, int64_t n_ends,
                              const int32_t* ends, int64_t n_lasts, const int32_t* lasts, int64_t most,
                              Found* found) {
  try {
    Walk walk(*graph, *step);
    if (walk.found.empty()) {
      const size_t data = walk.pairs.size();
      for (int64_t i = 0; i < n_ends; i++)
        for (int64_t k = 0; k < n_lasts; k++)
          if (ends[i] != lasts[k]) walk.pairs.push_back({ends[i], lasts[k]});
      for (int64_t i : Reach(*graph, order).unordered(walk.pairs)) {
        const auto [earlier, later] = walk.pairs[i];
        const Found overtakes = {What::overtakes, earlier, later, -1, -1, 0, 0, 0, 0, 0};
        walk.found.push_back(static_cast<size_t>(i) < data ? walk.about[i] : overtakes);
        if (static_cast<int64_t>(walk.found.size()) == most) break;
      }
    }
    const int64_t count = std::min<int64_t>(most, static_cast<int64_t>(walk.found.size()));
    std::copy_n(walk.found.begin(), count, found);
    return count;
  } catch (const std::exception&) {
    return -1;
  }
}
