// Calls the function that does an instruction's work, according to its operation.
#pragma once
#include "dots.h"
#include "gemm.h"
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
  // Does what an instruction can do before its inputs are written: prefetches the weights of a norm or a
  // router and, in builds for one row, looks up step tables.
  template <class P>
  MK_FN static void prepare(P& p, Call& c) {
    Early& early = c.early;
    early.operation = c.phase().operation;
    early.normed = early.operation == Operation::kNorm || (uses_dots(*c.dims) && matmul_of(*c.task).normed());
    early.result = c.phase().result;
    if (kOneRow && early.operation == Operation::kMatmul) {
      p.consumer_sync();  // all warps have left the previous instruction, so this one may use Scratch
      early.output = c.at<void>(c.phase().output);
      if (early.result == Result::kHeads) {
        early.position = c.step->positions[0];
        early.page = page_of_row(c, 0);
      }
    }
    if (kTogether && early.operation == Operation::kAttention) look_up_items(c);
    if (early.normed) prefetch_norm(p, c);
    if (kHasExperts && c.task->is(Operation::kRoute)) prefetch_router(p, c);
  }

  template <class P, class Pages>
  MK_FN static void run(P& p, const Call& c, Pages& pages) {
    if constexpr (kAblation == Ablation::kCompute) {
      // Waits for each stage or page and releases it at once, so that loaders and storer work as usual.
      pass_over(c, pages);
      for_pages(*c.dims, *c.step, *c.task, [&](const PageUse&) {
        pages.skip(1);
        return true;
      });
    } else {
      work(p, c, pages);
    }
  }

 private:
  template <class P, class Pages>
  MK_FN static void work(P& p, const Call& c, Pages& pages) {
    const int32_t* record = c.task->record;
    const Operation operation = c.early.operation;
    if (c.early.normed) {
      norm(p, c);  // the only call, so that the code of `norm` exists only once
    } else if (kOneRow && operation == Operation::kMatmul) {
      copy_row(p, c);
    }
    // Matmuls and attention are tested first. `here` keeps the compiler from making a slow jump table. The
    // two kinds of units round differently, so programs compute the same bits only if they have the same
    // units.
    if (operation == Operation::kMatmul || (kHasExperts && operation == Operation::kExperts)) {
      const Matmul m = matmul_of(*c.task);
      return by_dots(*c.dims, *c.task) ? dots(p, c, m, pages) : gemm<P>(c, m, pages);
    }
    if (operation == Operation::kAttention) return attention(p, c, pages);
    switch (static_cast<Operation>(here(static_cast<int32_t>(operation)))) {
      case Operation::kGather:
        return gather(p, c, operands<Run>(record));
      case Operation::kRope:
        return rope(p, c, operands<Run>(record));
      case Operation::kReduce:
        return reduce(p, c, operands<Tile>(record));
      case Operation::kSample:
        return sample(p, c, operands<Run>(record));
      case Operation::kRoute:
        // In builds without waits (kAblation), `route` would change ROUTES while other blocks read it.
        if constexpr (kHasExperts && kAblation == Ablation::kNone) route(p, c, operands<Run>(record));
        return;
      case Operation::kCombine:
        if constexpr (kHasExperts) combine(p, c, operands<Run>(record));
        return;
      case Operation::kMatmul:
      case Operation::kExperts:
      case Operation::kAttention:
      case Operation::kNorm:
      case Operation::kJoin:
      case Operation::kDrain:
        return;
    }
  }
};

}  // namespace mk
