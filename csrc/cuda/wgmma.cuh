// Multiplies matrices with wgmma. The accumulators hold one consumer warp's 16 rows of an output tile of
// [128 rows][256 columns].
#pragma once
#include "params.h"
#include "tensor_core.h"

namespace mk {

#define MK_ACC_8(v, i)                                                                        \
  "+f"(v[i]), "+f"(v[i + 1]), "+f"(v[i + 2]), "+f"(v[i + 3]), "+f"(v[i + 4]), "+f"(v[i + 5]), \
      "+f"(v[i + 6]), "+f"(v[i + 7])
#define MK_ACC_32(v, i) MK_ACC_8(v, i), MK_ACC_8(v, i + 8), MK_ACC_8(v, i + 16), MK_ACC_8(v, i + 24)
#define MK_ACC_64(v, i) MK_ACC_32(v, i), MK_ACC_32(v, i + 32)

#define MK_10(tens)                                                                                    \
  "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens "6, %" #tens \
  "7, %" #tens "8, %" #tens "9, "
#define MK_60 MK_10() MK_10(1) MK_10(2) MK_10(3) MK_10(4) MK_10(5)
#define MK_120 MK_60 MK_10(6) MK_10(7) MK_10(8) MK_10(9) MK_10(10) MK_10(11)
#define MK_WGMMA(columns, results, operands)                                        \
  "{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" #columns \
  "k16.f32.bf16.bf16 {" results "}, " operands ", p, 1, 1, 0, 0; }"

// Starts v += a * transpose(b), where v is [64 rows][128 * kHalves columns], a [64][16] and b [128 *
// kHalves][16]. The four warps of a warpgroup must call it together. It does not wait for the result.
template <int kHalves>
__device__ __forceinline__ void start_wgmma(float* v, uint64_t a, uint64_t b) {
  if (kHalves == 1) {
    asm volatile(MK_WGMMA(128, MK_60 "%60, %61, %62, %63", "%64, %65") : MK_ACC_64(v, 0) : "l"(a), "l"(b));
  } else {
    asm volatile(MK_WGMMA(256, MK_120 "%120, %121, %122, %123, %124, %125, %126, %127", "%128, %129")
                 : MK_ACC_64(v, 0), MK_ACC_64(v, 64)
                 : "l"(a), "l"(b));
  }
}

// One lane's results: those of two rows, row(0) and row(1). The 256 columns form 32 blocks of 8 columns,
// and the lane has two adjacent columns of each block.
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

  // Adds the products of the inputs [128 rows][64] and the weights [128 * kHalves columns][64] of a stage
  // of the ring. The tensor cores may read the stage until settle().
  template <int kHalves>
  __device__ __forceinline__ void step(const void* ring, int stage) {
    constexpr int kStage = kStepPages * kPageBytes / 16, kHalf = 64 * kTileRowBytes / 16;
    constexpr uint64_t kUpper = k_major_descriptor(0) >> 32 << 32;  // only the lower half differs
    const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(ring));
    const int first = static_cast<int>(k_major_descriptor(at)) + stage * kStage,
              a = here(first + warp_ / 4 * kHalf), b = here(first + 2 * kHalf);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    MK_UNROLL for (int k = 0; k < 4; ++k) {
      start_wgmma<kHalves>(v_, kUpper | static_cast<uint32_t>(a + k * kDescriptorStep),
                           kUpper | static_cast<uint32_t>(b + k * kDescriptorStep));
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }

  // A lane's results in kCount neighbouring blocks of 8 columns. blocks(first) returns the results of
  // blocks first, first + 1 and so on; `first` is a multiple of kCount. The function uses branches,
  // because registers cannot be indexed at run time.
  template <int kCount>
  struct Blocks {
    float v[4 * kCount];

    __device__ __forceinline__ float low(int block, int h, int) const { return v[4 * block + 2 * h]; }
    __device__ __forceinline__ float high(int block, int h, int) const { return v[4 * block + 2 * h + 1]; }
  };
  template <int kCount, int kBegin = 0, int kEnd = 32>
  __device__ __forceinline__ Blocks<kCount> blocks(int first) const {
    constexpr int kMiddle = (kBegin + kEnd) / 2;
    if constexpr (kEnd - kBegin > kCount) {
      return first < kMiddle ? blocks<kCount, kBegin, kMiddle>(first) : blocks<kCount, kMiddle, kEnd>(first);
    } else {
      Blocks<kCount> out;
      MK_UNROLL for (int i = 0; i < 4 * kCount; ++i) out.v[i] = v_[4 * kBegin + i];
      asm volatile("" ::: "memory");  // so that the compiler does not replace the branches by selections
      return out;
    }
  }

  // Waits until all calls of step() but the last `kPending` have read their stages. If kPending is 0, the
  // results are complete after the wait.
  template <int kPending>
  __device__ __forceinline__ void settle() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
    if (kPending == 0) pin();
  }

 private:
  // Prevents the compiler from moving reads or writes of the accumulators across this point.
  __device__ __forceinline__ void pin() {
    MK_UNROLL for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(v_[i])::"memory");
  }

  float v_[128];
  const int warp_;
  int lane_;
};

}  // namespace mk
