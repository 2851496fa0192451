// Calls the function that does an instruction's work, according to its operation.
#pragma once
#include "ablation.h"
#include "matmul.h"
#include "ops/attention.h"
#include "ops/combine.h"
#include "ops/gather.h"
#include "ops/norm.h"
#include "ops/reduce.h"
#include "ops/rope.h"
#include "ops/route.h"
#include "ops/sample.h"

namespace mk {

struct Bodies {
  // Whether the instruction normalises rows: a norm does, and so may a matmul on the CUDA cores (dots.h).
  MK_FN static bool normed(const Call& c) {
    return c.task->is(Operation::kNorm) || (uses_dots(*c.dims) && c.phase().norm != Buffer::kNone);
  }

  // Does what an instruction can do before its inputs are written: prefetches the weights of a norm or a
  // router and, in builds for one row, looks up step tables.
  template <class P>
  MK_FN static void prepare(P& p, const Call& c) {
    if (kOneRow && c.task->is(Operation::kMatmul)) {
      p.consumer_sync();  // all warps have left the previous instruction, so this one may use Scratch
      if (c.phase().result == Result::kHeads && c.warp == 0 && p.lane() == 0) {
        c.shared->position = c.step->positions[0];
        c.shared->page = page_of_row(c, 0);
      }
    }
    if constexpr (kTogether) {
      if (c.task->is(Operation::kAttention)) look_up_items(p, c);
    }
    if (normed(c)) prefetch_norm(p, c);
    if (kHasExperts && c.task->is(Operation::kRoute)) prefetch_router(p, c);
  }

  template <class P, class Pages>
  MK_FN static void run(P& p, const Call& c, Pages& pages) {
    if constexpr (kAblation == Ablation::kCompute) {
      pass_pages(c, pages);
    } else {
      work(p, c, pages);
    }
  }

 private:
  template <class P, class Pages>
  MK_FN static void work(P& p, const Call& c, Pages& pages) {
    const int32_t* record = c.task->record;
    if (normed(c)) {
      norm(p, c);  // the only call, so that the code of `norm` exists only once
    } else if (kOneRow && c.task->is(Operation::kMatmul)) {
      copy_row(p, c);
    }
    switch (c.phase().operation) {
      case Operation::kGather:
        return gather(p, c, operands<Run>(record));
      case Operation::kRope:
        return rope(p, c, operands<Run>(record));
      case Operation::kExperts:
        if constexpr (!kHasExperts) return;
        [[fallthrough]];
      case Operation::kMatmul:
        return matmul(p, c, pages);
      case Operation::kAttention:
        return attention(p, c, pages);
      case Operation::kReduce:
        return reduce(p, c, operands<Tile>(record));
      case Operation::kSample:
        return sample(p, c, operands<Run>(record));
      case Operation::kRoute:
        // In builds without waits (ablation.h), `route` would change ROUTES while other blocks read it.
        if constexpr (kHasExperts && kAblation == Ablation::kNone) route(p, c, operands<Run>(record));
        return;
      case Operation::kCombine:
        if constexpr (kHasExperts) combine(p, c, operands<Run>(record));
        return;
      case Operation::kNorm:
      case Operation::kJoin:
      case Operation::kDrain:
        return;
    }
  }
};

}  // namespace mk
