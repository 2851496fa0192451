// Every body compiled for the device alone, a kernel each: what ptxas says of one kernel is about one body.
#include "ops/attention.h"
#include "ops/embed.h"
#include "ops/norm.h"
#include "ops/reduce.h"
#include "ops/rope.h"
#include "ops/sample.h"

namespace {

using namespace mk;

struct Warp {
  static constexpr int kLanes = 32;

  __device__ int lane() const { return threadIdx.x % 32; }
  __device__ void consumer_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
  __device__ int32_t arrive_acq_rel(int32_t* at) {
    int32_t before = 0;
    if (lane() == 0)
      asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(at) : "memory");
    return __shfl_sync(0xFFFFFFFFu, before, 0);
  }
  __device__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
};

extern __shared__ __align__(1024) unsigned char pages_of_block[];

struct AnyPages {
  int taken;
  __device__ const unsigned char* take() {
    asm volatile("" : "+r"(taken)::"memory");
    return pages_of_block + taken % kPages * kPageBytes;
  }
  __device__ void release() { ++taken; }
  __device__ void skip(int n) { taken += n; }
  __device__ void done(int) {}
};

struct Arguments {
  Params params;
  const Sizes* sizes;
  const StepView* step;
  Where where;
};

__device__ Call make_call(const Arguments& a) {
  __shared__ Scratch scratch;
  return {&a.params,
          a.sizes,
          a.step,
          &scratch,
          static_cast<int32_t>(blockIdx.x),
          &a.where,
          static_cast<int32_t>(threadIdx.x / 32) - 4};
}

}  // namespace

// As in the megakernel: four warps give registers to eight, which run the body.
#define BODY(name, Operands, ...)                                                                    \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)                                          \
      name##_body(const __grid_constant__ Arguments a, Opcode opcode, Operands op, AnyPages pages) { \
    if (threadIdx.x / 32 < 4) {                                                                      \
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");                                           \
    } else {                                                                                         \
      asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");                                          \
      Warp p;                                                                                        \
      name(p, make_call(a), ##__VA_ARGS__);                                                          \
    }                                                                                                \
  }

BODY(embed, Embed, op)
BODY(rope, Rope, op)
BODY(norm, FinalNorm, opcode, op)
BODY(reduce, OReduce, opcode, op)
BODY(sample, Sample, op)
BODY(attention, Attention, op, pages)
