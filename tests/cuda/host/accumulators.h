// The host's replacement for wgmma. It computes a consumer warp's 16 rows of a tile from shared-memory pages,
// which have the same layout as on the device.
#pragma once
#include "../../../csrc/cuda/tensor_core.h"

namespace mk {

class HostAccumulators {
 public:
  static constexpr int kRows = 16, kPairs = 4;

  explicit HostAccumulators(int warp) : warp_(warp) {}

  int row(int h) const { return warp_ * kRows + h; }
  int col(int e) const { return 2 * e; }

  template <int kHalves>
  void step(const unsigned char* a, const unsigned char* b0, const unsigned char* b1) {
    for (int h = 0; h < kRows; ++h) {
      for (int c = 0; c < kHalves * 128; ++c) {
        float sum = sum_[h][c];
        for (int k = 0; k < 64; ++k)
          sum += tile_element(a, row(h), k) * tile_element(c < 128 ? b0 : b1, c % 128, k);
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
