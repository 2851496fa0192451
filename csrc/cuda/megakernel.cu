// The megakernel: each SM runs one block, which executes its worker's instruction stream from the first to
// the last instruction. Compile this file, the only one with device code, for sm_90a. With -DMK_TRACE=1,
// the kernel records a trace; platform.h explains the other options.
#include "bodies.h"
#include "device.cuh"
#include "roles.h"

namespace mk {

static_assert(sizeof(Block<Device>) <= kSharedBytes, "a block's shared memory must not exceed kSharedBytes");
constexpr int kAlignment = 1024;

// Registers per thread, after setmaxnreg has moved some from the warps that move data (service warps) to the
// warps that compute (consumers). If the total exceeded what the launch provides, a warp would wait forever.
#define MK_SERVICE_REGISTERS 56
#define MK_CONSUMER_REGISTERS 224
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
static_assert(MK_SERVICE_REGISTERS * kConsumerWarp + MK_CONSUMER_REGISTERS * kConsumerWarps <=
                  kLaunchRegisters * kWarps,
              "the warps must not request more registers than the launch provides");

// Reads the SM's clock and the wall clock at the same moment, so that times in a trace can be converted
// to wall time. The wall clock advances in steps, so the function first waits for its next step.
// `number` is 0 at the block's begin and 1 at its end.
MK_DEVICE void stamp(Device& p, const Params& params, int number) {
  if (!Device::kTrace || threadIdx.x != 0) return;
  uint64_t* to = params.clocks + static_cast<int64_t>(blockIdx.x) * kClockStamps + 2 * number;
  const uint64_t before = wall_ns();
  uint64_t wall = before;
  while (wall == before) wall = wall_ns();
  to[0] = p.now();
  to[1] = wall;
}

}  // namespace mk

extern "C" __global__ void __launch_bounds__(mk::kThreads, 1)
    megakernel(const __grid_constant__ mk::Params params) {
  using namespace mk;
  extern __shared__ __align__(kAlignment) unsigned char memory[];
  if (static_cast<int32_t>(blockIdx.x) >= params.ranks * params.workers) return;
  // `here` hides the address from the compiler, which would otherwise hoist all address computations.
  Block<Device>& block = *reinterpret_cast<Block<Device>*>(memory + here(0));
  Device p(params, block);
  stamp(p, params, 0);
  set_up(p, block, params, static_cast<int32_t>(blockIdx.x));
  if (p.warp() < kConsumerWarp) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(MK_SERVICE_REGISTERS));
    serve(p, block, params);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MK_CONSUMER_REGISTERS));
    consume<Device, Bodies>(p, block, params);
  }
  Device last(params, block);  // a new object: keeping `p` until here would cost registers
  report(last, block, params);
  if constexpr (!Device::kTrace) return;
  p.sync_block();
  if (threadIdx.x == 0) params.trace_counts[blockIdx.x] = block.traced;
  stamp(p, params, 1);
}
