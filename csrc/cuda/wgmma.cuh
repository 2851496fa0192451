// Multiplies matrices with wgmma. The accumulators hold one consumer warp's 16 rows of an output tile of
// [128 rows][256 columns].
#pragma once
#include "tensor_core.h"

namespace mk {

#define MK_ACC_8(v, i)                                                                        \
  "+f"(v[i]), "+f"(v[i + 1]), "+f"(v[i + 2]), "+f"(v[i + 3]), "+f"(v[i + 4]), "+f"(v[i + 5]), \
      "+f"(v[i + 6]), "+f"(v[i + 7])
#define MK_ACC_32(v, i) MK_ACC_8(v, i), MK_ACC_8(v, i + 8), MK_ACC_8(v, i + 16), MK_ACC_8(v, i + 24)
#define MK_ACC_64(v, i) MK_ACC_32(v, i), MK_ACC_32(v, i + 32)

// Starts v += a * transpose(b), where v is [64 rows][128 columns], a [64][16] and b [128][16]. The four warps
// of a warpgroup must call it together. It does not wait for the result.
__device__ __forceinline__ void multiply_128(float* v, uint64_t a, uint64_t b) {
  asm volatile(
      "{ .reg .pred p; setp.eq.u32 p, 0, 0;"
      " wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, 0, 0; }"
      : MK_ACC_64(v, 0)
      : "l"(a), "l"(b));
}

#undef MK_ACC_64
#undef MK_ACC_32
#undef MK_ACC_8

// One lane's part of the results. It has two rows, row(0) and row(1). The 256 columns form 32 blocks of 8
// columns, and the lane has two adjacent columns of each block.
class Accumulators {
 public:
  static constexpr int kRows = 2, kPairs = 1;

  __device__ __forceinline__ explicit Accumulators(int warp) : warp_(warp) {
    // Reads the lane number again, so that the compiler need not keep it in a register (see Device::forget).
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_));
    MK_UNROLL for (int i = 0; i < 128; ++i) v_[i] = 0.0f;
    pin();  // makes the compiler write the zeros before the first wgmma.fence
  }

  __device__ __forceinline__ int row(int h) const { return warp_ * 16 + fragment_row(lane_, h); }
  // The first of the lane's two columns within a block of 8.
  __device__ __forceinline__ int col(int) const { return fragment_col(lane_); }

  // Adds the products of page a [128 rows][64] with page b0 [128 columns][64] and, if kHalves is 2, with page
  // b1, which has the other 128 columns. The tensor cores may read the pages until settle().
  template <int kHalves>
  __device__ __forceinline__ void step(const void* a, const void* b0, const void* b1) {
    const uint64_t at = k_major_descriptor(shared(a) + warp_ / 4 * 64 * kTileRowBytes);
    const uint64_t first = k_major_descriptor(shared(b0));
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    const uint64_t second = kHalves == 2 ? k_major_descriptor(shared(b1)) : 0;
    MK_UNROLL for (int k = 0; k < 4; ++k) {
      multiply_128(v_, at + k * kDescriptorStep, first + k * kDescriptorStep);
      if (kHalves == 2) multiply_128(v_ + 64, at + k * kDescriptorStep, second + k * kDescriptorStep);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }

  // Some of a lane's results: those in kCount neighbouring blocks of 8 columns. blocks(first) returns the
  // blocks first, first + 1 and so on; `first` is a multiple of kCount. It selects them by branches, because
  // registers cannot be indexed at run time.
  template <int kCount>
  struct Blocks {
    float v[4 * kCount];

    __device__ __forceinline__ float low(int block, int h, int) const { return v[4 * block + 2 * h]; }
    __device__ __forceinline__ float high(int block, int h, int) const { return v[4 * block + 2 * h + 1]; }
  };
  template <int kCount>
  __device__ __forceinline__ Blocks<kCount> blocks(int first) const {
    Blocks<kCount> out{};
    MK_UNROLL for (int block = 0; block < 32; block += kCount) {
      if (block == first) {
        MK_UNROLL for (int i = 0; i < 4 * kCount; ++i) out.v[i] = v_[4 * block + i];
      }
    }
    return out;
  }

  // Waits until all calls of step() but the last `kPending` have read their pages. If kPending is 0, the
  // results are complete after the wait.
  template <int kPending>
  __device__ __forceinline__ void settle() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
    if (kPending == 0) pin();
  }

 private:
  __device__ __forceinline__ static uint32_t shared(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
  }

  // Prevents the compiler from moving reads or writes of the accumulators across this point.
  __device__ __forceinline__ void pin() {
    MK_UNROLL for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(v_[i])::"memory");
  }

  float v_[128];
  const int warp_;
  int lane_;
};

}  // namespace mk
