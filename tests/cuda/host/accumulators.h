// The host's replacement for wgmma. It computes a consumer warp's 16 rows of a tile from shared-memory pages,
// which have the same layout as on the device.
#pragma once
#include "../../../csrc/cuda/params.h"
#include "../../../csrc/cuda/tensor_core.h"

namespace mk {

class HostAccumulators {
 public:
  static constexpr int kRows = 16, kPairs = 4, kDepth = 64;

  explicit HostAccumulators(int warp) : warp_(warp) {}

  int row(int h) const { return warp_ * kRows + h; }
  int col(int e) const { return 2 * e; }

  template <int kHalves>
  void step(const unsigned char* ring, int stage) {
    const unsigned char* a = ring + stage * (kStepPages * kPageBytes);
    // Elements are read from the pages once, because finding them takes longer than multiplying them. The
    // arrays are static, because a fibre's stack is small.
    static float left[kRows][kDepth], right[2 * 128][kDepth];
    for (int k = 0; k < kDepth; ++k) {
      for (int h = 0; h < kRows; ++h) left[h][k] = tile_element(a, row(h), k);
      for (int c = 0; c < kHalves * 128; ++c) right[c][k] = tile_element(a, 128 + c, k);
    }
    for (int h = 0; h < kRows; ++h) {
      for (int c = 0; c < kHalves * 128; ++c) {
        float sum = sum_[h][c];
        for (int k = 0; k < kDepth; ++k) sum += left[h][k] * right[c][k];
        sum_[h][c] = sum;
      }
    }
  }

  template <int kPending>
  void settle() {}

  struct Blocks {
    const HostAccumulators& all;
    int first;

    float low(int block, int h, int e) const { return all.sum_[h][8 * (first + block) + 2 * e]; }
    float high(int block, int h, int e) const { return all.sum_[h][8 * (first + block) + 2 * e + 1]; }
  };
  template <int>
  Blocks blocks(int first) const {
    return {*this, first};
  }

 private:
  const int warp_;
  float sum_[kRows][256] = {};
};

}  // namespace mk
