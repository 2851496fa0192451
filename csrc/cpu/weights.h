// Packed weights on their way into the arithmetic: as they are, or widened to float32 in the scratch.
#pragma once
#include "simd.h"

namespace mk::MK_SIMD {

// Bytes between a weight's prefetch and its use: hides DRAM latency where the hardware stops at 4 KiB pages.
constexpr int kPrefetchBytes = 2048;

// A matmul's weights, of which a register block multiplies a few panels at a time.
template <class W>
struct Weights {
  using Element = W;  // as they are multiplied

  const int64_t panel_stride;  // elements from a panel of a block to the next

  explicit Weights(const Call& call)
      : panel_stride(int64_t{call.phase->inner + call.phase->inner % 2} * kPanel),
        packed_(call.weights<W>()) {}

  // How many of `all` k steps one block may have.
  static int steps(int all) { return all; }

  // The block of `panels` panels from `panel`, k steps [begin, begin + steps).
  const W* block(int panel, int /*panels*/, int begin, int /*steps*/) const {
    return packed_ + panel * panel_stride + int64_t{begin} * kPanel;
  }

 private:
  const W* const packed_;
};

template <>
struct Weights<Q8Block> {
  using Element = float;

  static constexpr int64_t panel_stride = int64_t{kWideSteps} * kPanel;

  explicit Weights(const Call& call)
      : blocks_(ceil_div(call.phase->inner, kQ8Steps)),
        packed_(call.weights<Q8Block>()),
        wide_(call.scratch->weights) {}

  static int steps(int) { return kWideSteps; }

  // It lasts until the next one.
  const float* block(int panel, int panels, int begin, int steps) const {
    for (int p = 0; p < panels; ++p) {
      const Q8Block* block = packed_ + int64_t{panel + p} * blocks_ + begin / kQ8Steps;
      float* out = wide_ + p * panel_stride;
      for (int s = 0; s < steps; s += kQ8Steps, ++block, out += kQ8Steps * kPanel) widen(*block, out);
    }
    return wide_;
  }

 private:
  static void widen(const Q8Block& block, float* out) {
    constexpr int kLineSteps = 64 / kPanel;  // k steps of a cache line
    F32 scale[kPanelVectors];
    MK_UNROLL for (int v = 0; v < kPanelVectors; ++v) scale[v] = load_half(block.scales + v * kLanes);
    for (int k = 0; k < kQ8Steps; k += kLineSteps) {
      __builtin_prefetch(reinterpret_cast<const char*>(block.weights[k]) + kPrefetchBytes);
      MK_UNROLL for (int s = 0; s < kLineSteps; ++s) {
        MK_UNROLL for (int v = 0; v < kPanelVectors; ++v) {
          store(out + (k + s) * kPanel + v * kLanes, scale[v] * load(block.weights[k + s] + v * kLanes));
        }
      }
    }
  }

  const int64_t blocks_;  // of a panel
  const Q8Block* const packed_;
  float* const wide_;
};

}  // namespace mk::MK_SIMD
