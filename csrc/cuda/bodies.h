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
  // router. In builds for one token row, also reads what the instruction needs from the step table.
  template <class P>
  MK_FN static void prepare(P& p, Call& c) {
    Early& early = c.early;
    early.operation = c.phase().operation;
    early.normed = early.operation == Operation::kNorm || (uses_dots(*c.dims) && matmul_of(*c.task).normed());
    early.result = c.phase().result;
    if (kOneRow) early.input = c.at<void>(c.phase().inputs);
    if (kOneRow && early.operation == Operation::kMatmul) {
      p.consumer_sync();  // all warps have ended the previous instruction, so this one may use Scratch
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
      // Only waits for each stage or page and releases it, so that the other roles work as usual.
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
    // Matmuls and attention are tested first. `here` hides the operation from the compiler, which would
    // otherwise make a slow jump table. CUDA cores (`dots`) and tensor cores (`gemm`) round differently,
    // so two programs compute the same bits only if both use the same kind of cores.
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
