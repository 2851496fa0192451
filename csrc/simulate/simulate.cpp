// The C interface that scheduler/simulate_native.py loads.
#include "simulate.h"

#include <new>

#include "engine.h"

#define MK_API extern "C" __attribute__((visibility("default")))

using namespace mk::simulate;

// Runs a program. `intervals` gets up to `most` trace records, if not null. 0, or -1 where memory runs out.
MK_API int32_t mk_simulate(const Program* program, const Costs* costs, const Stall* stall,
                           mk::Interval* intervals, int64_t most, Result* result) {
  try {
    *result = Engine(*program, *costs, *stall, intervals, most).run();
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}
