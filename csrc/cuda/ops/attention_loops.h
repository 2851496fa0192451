// Attention's arithmetic of one warp of the host: what attention_mma.h does, on the same pages, in plain
// loops.
#pragma once
#include "../tensor_core.h"
#include "memory.h"
#include "softmax.h"

namespace mk {

template <class P, int kHead>
class AttentionTile {
 public:
  AttentionTile(P&, int head_dim) : head_dim_(head_dim) {}

  template <class Row>
  void start(Row row) {
    for (rows_ = 0; rows_ < kQueryTile && row(rows_); ++rows_) {
      for (int e = 0; e < head_dim_; ++e) query_[rows_][e] = from_bf16(row(rows_)[e]);
      for (int e = 0; e < kHead; ++e) out_[rows_][e] = 0.0f;
      sums_[rows_] = Softmax{};
    }
  }

  template <int kHalf>
  void scores(const unsigned char* keys) {
    for (int i = 0; i < rows_; ++i) {
      for (int t = 0; t < 64; ++t) {
        float sum = 0.0f;
        for (int e = 0; e < head_dim_; ++e) sum += query_[i][e] * element(keys, e, t);
        score_[i][64 * kHalf + t] = sum;
      }
    }
  }

  template <class Visible>
  void softmax(float scale, Visible visible) {
    for (int i = 0; i < rows_; ++i) {
      const int tokens = visible(i);
      float m = minus_infinity(), l = 0.0f;
      for (int t = 0; t < kKvBlock; ++t) {
        score_[i][t] = t < tokens ? score_[i][t] * scale : minus_infinity();
        m = fmaxf(m, score_[i][t]);
      }
      const float base = m == minus_infinity() ? 0.0f : m;
      for (int t = 0; t < kKvBlock; ++t) {
        const float probability = exp_fast(score_[i][t] - base);
        l += probability;
        score_[i][t] = from_bf16(to_bf16(probability));
      }
      block_m_[i] = m;
      block_l_[i] = l;
    }
  }

  void values(const unsigned char* values, int element0) {
    for (int i = 0; i < rows_; ++i) {
      for (int e = 0; e < 64; ++e) {
        float sum = 0.0f;
        for (int t = 0; t < kKvBlock && element0 + e < head_dim_; ++t)
          sum += score_[i][t] * element(values, t, e);
        block_out_[i][e] = sum;
      }
    }
  }

  template <class Visible>
  void merge(Visible visible) {
    for (int i = 0; i < rows_; ++i) {
      seen_[i] = visible(i) > 0;
      if (seen_[i]) sums_[i].merge(block_m_[i], block_l_[i]);
    }
  }
  template <int kHalf>
  void merge_values() {
    for (int i = 0; i < rows_; ++i) {
      for (int e = 0; seen_[i] && e < 64; ++e) {
        float& out = out_[i][64 * kHalf + e];
        out = sums_[i].merged(out, block_out_[i][e]);
      }
    }
  }

  template <class F>
  void block_sums(F f) const {
    for (int i = 0; i < rows_; ++i) f(i, block_m_[i], block_l_[i]);
  }
  template <class F>
  void block_values(F f) const {
    for (int i = 0; i < rows_; ++i) {
      for (int e = 0; e < 64; e += 2) f(i, e, block_out_[i][e], block_out_[i][e + 1]);
    }
  }
  template <class F>
  void results(F f) const {
    for (int i = 0; i < rows_; ++i) {
      for (int e = 0; e < kHead; e += 2) f(i, e, out_[i][e] / sums_[i].l, out_[i][e + 1] / sums_[i].l);
    }
  }

 private:
  static float element(const unsigned char* tile, int row, int col) {
    uint16_t bits;
    memcpy(&bits, tile + tile_offset(row, 2 * col), sizeof bits);
    return from_bf16(bits);
  }

  const int head_dim_;
  int rows_ = 0;  // those that there are come first
  float query_[kQueryTile][kHead], out_[kQueryTile][kHead];
  Softmax sums_[kQueryTile];
  float score_[kQueryTile][kKvBlock], block_out_[kQueryTile][64], block_m_[kQueryTile], block_l_[kQueryTile];
  bool seen_[kQueryTile];
};

}  // namespace mk
