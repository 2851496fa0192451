// The host version of attention_mma.h. It does the attention arithmetic of one warp on the same pages as
// attention_mma.h, but in plain loops.
#pragma once
#include <algorithm>
#include <iterator>

#include "../../../csrc/cuda/ops/memory.h"
#include "../../../csrc/cuda/ops/softmax.h"
#include "../../../csrc/cuda/tensor_core.h"

namespace mk {

class HostAttentionTile {
 public:
  HostAttentionTile(auto&, const Sizes& d) : size_(lower_of(d.head_dim, kHeadPart)) {}

  template <class Row, class Position>
  void start(Row row, Position position) {
    for (rows_ = 0; rows_ < kQueryTile && row(rows_); ++rows_) {
      for (int e = 0; e < size_; ++e) query_[rows_][e] = from_bf16(row(rows_)[e]);
      position_[rows_] = position(rows_);
    }
  }

  void clear() {
    for (auto& row : score_) std::fill(std::begin(row), std::end(row), 0.0f);
  }

  template <int kHalf>
  void scores(const unsigned char* keys) {
    for (int i = 0; i < rows_; ++i) {
      for (int t = 0; t < 64; ++t) {
        float sum = kWide ? score_[i][64 * kHalf + t] : 0.0f;
        for (int e = 0; e < size_; ++e) sum += query_[i][e] * tile_element(keys, e, t);
        score_[i][64 * kHalf + t] = sum;
      }
    }
  }

  template <class P>
  void softmax(P&, Scratch&, float scale, float cap, int block, int span) {
    for (int i = 0; i < rows_; ++i) {
      const int tokens = position_[i] + 1 - block * kKvBlock, before = tokens - span;
      float m = minus_infinity(), l = 0.0f;
      for (int t = 0; t < kKvBlock; ++t) {
        score_[i][t] = t >= before && t < tokens ? (cap == 0.0f ? score_[i][t] * scale
                                                                : cap * tanh_fast(score_[i][t] * scale / cap))
                                                 : minus_infinity();
        m = fmaxf(m, score_[i][t]);
      }
      const float base = m == minus_infinity() ? 0.0f : m;
      for (float& score : score_[i]) {
        const float probability = exp_fast(score - base);
        l += probability;
        score = from_bf16(to_bf16(probability));
      }
      block_[i] = {m, l};
      seen_[i] = tokens > 0 && before < kKvBlock;
    }
  }

  void merge() {
    for (int i = 0; i < rows_; ++i) {
      if (seen_[i]) scale_[i] = sums_[i].merge(block_[i].a, block_[i].b);
    }
  }

  template <int kHalf>
  void values(const Scratch&, const unsigned char* values, bool alone) {
    for (int i = 0; i < rows_; ++i) {
      if (!seen_[i]) continue;
      for (int e = 64 * kHalf; e < lower_of(64 * kHalf + 64, size_); ++e) {
        float o = 0.0f;
        for (int t = 0; t < kKvBlock; ++t) o += score_[i][t] * tile_element(values, t, e % 64);
        out_[i][e] = alone ? o : scale_[i].merged(out_[i][e], o);
      }
    }
  }

  template <class Value>
  void add_sinks(Value value) {
    for (int i = 0; i < rows_; ++i) {
      const float keep = sums_[i].merge(value(i), 1.0f).keep;
      for (float& out : out_[i]) out *= keep;
    }
  }

  template <class To>
  void store_block(To to, int part) const {
    for (int i = 0; i < rows_; ++i) {
      if (!seen_[i]) continue;
      float* out = to(i);
      if (part == 0) store_pair(out, block_[i]);
      for (int e = 0; e < size_; ++e) out[2 + part * kHeadPart + e] = out_[i][e];
    }
  }

  template <class To>
  void store_results(To to) const {
    for (int i = 0; i < rows_; ++i) {
      uint16_t* out = to(i);
      for (int e = 0; e < size_; ++e) out[e] = to_bf16(out_[i][e] * (1.0f / sums_[i].l));
    }
  }

 private:
  const int size_;  // how many elements of the head the tile has
  int rows_ = 0;    // number of rows that the tile has
  int position_[kQueryTile];
  float query_[kQueryTile][kHeadPart], out_[kQueryTile][kHeadPart] = {};
  Softmax sums_[kQueryTile];
  float score_[kQueryTile][kKvBlock];
  Pair block_[kQueryTile];  // m, l
  Rescale scale_[kQueryTile];
  bool seen_[kQueryTile];
};

}  // namespace mk
