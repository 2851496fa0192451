// Attention's arithmetic of one warp on the tensor cores: 16 query rows against a KV block. Keys lie as
// [element][token], values as [token][element]: both are B matrices whose columns are contiguous, which
// ldmatrix.trans reads.
#pragma once
#include "../tensor_core.h"
#include "memory.h"
#include "softmax.h"

namespace mk {

// c += a b, [16][16] x [16][8].
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rows [row, row + 16) and columns [col, col + 16) of a swizzled tile: words 0 and 1 of the first eight
// columns, then of the others.
__device__ __forceinline__ void load_b(uint32_t (&b)[4], uint32_t tile, int lane, int row, int col) {
  const int matrix = ldmatrix_matrix(lane);
  const uint32_t at =
      tile + tile_offset(row + matrix % 2 * 8 + ldmatrix_row(lane), (col + matrix / 2 * 8) * 2);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(at)
               : "memory");
}

// A lane holds parts of two rows: lane / 4 and 8 more. kHead is 64 or 128, head_dim at most that and a
// multiple of 8.
template <class P, int kHead>
class AttentionTile {
 public:
  __device__ AttentionTile(P& p, int head_dim) : lane_(p.lane()), head_dim_(head_dim) {}

  // row(i): where the elements of query row i lie, null where there is none. Forgets what was before.
  template <class Row>
  __device__ void start(Row row) {
    MK_UNROLL for (int k = 0; k < kHead / 16; ++k) {
      MK_UNROLL for (int w = 0; w < 4; ++w) {
        const uint16_t* from = row(a_row(lane_, w));
        const int element = 16 * k + a_k(lane_, w);
        query_[k][w] = from && element < head_dim_ ? load_word(from + element) : 0;
      }
    }
    MK_UNROLL for (int n = 0; n < kHead / 8; ++n) { MK_UNROLL for (int e = 0; e < 4; ++e) out_[n][e] = 0.0f; }
    sums_[0] = sums_[1] = Softmax{};
  }

  // Scores of half of the block's tokens; keys: a tile [element][64 tokens].
  template <int kHalf>
  __device__ void scores(const unsigned char* keys) {
    const uint32_t tile = static_cast<uint32_t>(__cvta_generic_to_shared(keys));
    MK_UNROLL for (int n = 0; n < 8; ++n) {
      MK_UNROLL for (int e = 0; e < 4; ++e) score_[8 * kHalf + n][e] = 0.0f;
    }
    MK_UNROLL for (int k = 0; k < kHead / 16; ++k) {
      if (16 * k >= head_dim_) break;
      MK_UNROLL for (int n = 0; n < 8; n += 2) {
        uint32_t b[4];
        load_b(b, tile, lane_, 16 * k, 8 * n);
        mma_16x8x16(score_[8 * kHalf + n], query_[k], b[0], b[1]);
        mma_16x8x16(score_[8 * kHalf + n + 1], query_[k], b[2], b[3]);
      }
    }
  }

  // Scores become probabilities, rounded to bf16, and the block's m and l; visible(i): tokens that row i
  // sees.
  template <class Visible>
  __device__ void softmax(float scale, Visible visible) {
    MK_UNROLL for (int half = 0; half < 2; ++half) {
      const int tokens = visible(fragment_row(lane_, half)) - fragment_col(lane_);
      float m = minus_infinity();
      MK_UNROLL for (int n = 0; n < 16; ++n) {
        MK_UNROLL for (int e = 0; e < 2; ++e) {
          float& s = score_[n][2 * half + e];
          s = 8 * n + e < tokens ? s * scale : minus_infinity();
          m = fmaxf(m, s);
        }
      }
      m = fmaxf(m, shuffle_xor(m, 1));
      m = fmaxf(m, shuffle_xor(m, 2));
      const float base = m == minus_infinity() ? 0.0f : m;
      float l = 0.0f;
      MK_UNROLL for (int n = 0; n < 16; ++n) {
        MK_UNROLL for (int e = 0; e < 2; ++e) {
          float& s = score_[n][2 * half + e];
          s = exp_fast(s - base);
          l += s;
        }
      }
      l += shuffle_xor(l, 1);
      block_l_[half] = l + shuffle_xor(l, 2);
      block_m_[half] = m;
    }
    // The accumulators of 16 tokens are the A fragment of those tokens.
    MK_UNROLL for (int k = 0; k < 8; ++k) {
      MK_UNROLL for (int w = 0; w < 4; ++w) {
        const float* pair = &score_[2 * k + w / 2][w % 2 * 2];
        probability_[k][w] = pack_bf16(pair[0], pair[1]);
      }
    }
  }

  // The block's o of 64 elements, [element0, element0 + 64); values: a tile [token][64 elements].
  __device__ void values(const unsigned char* values, int element0) {
    const uint32_t tile = static_cast<uint32_t>(__cvta_generic_to_shared(values));
    MK_UNROLL for (int n = 0; n < 8; ++n) { MK_UNROLL for (int e = 0; e < 4; ++e) block_out_[n][e] = 0.0f; }
    MK_UNROLL for (int k = 0; k < 8; ++k) {
      MK_UNROLL for (int n = 0; n < 8; n += 2) {
        if (element0 + 8 * n >= head_dim_) break;
        uint32_t b[4];
        load_b(b, tile, lane_, 16 * k, 8 * n);
        mma_16x8x16(block_out_[n], probability_[k], b[0], b[1]);
        mma_16x8x16(block_out_[n + 1], probability_[k], b[2], b[3]);
      }
    }
  }

  // Adds the block's m and l to those of the blocks before, for rows that see it; then its o, of elements 64
  // * kHalf ..
  template <class Visible>
  __device__ void merge(Visible visible) {
    MK_UNROLL for (int half = 0; half < 2; ++half) {
      seen_[half] = visible(fragment_row(lane_, half)) > 0;
      if (seen_[half]) sums_[half].merge(block_m_[half], block_l_[half]);
    }
  }
  template <int kHalf>
  __device__ void merge_values() {
    MK_UNROLL for (int half = 0; half < 2; ++half) {
      if (!seen_[half]) continue;
      MK_UNROLL for (int n = 0; n < 8; ++n) {
        MK_UNROLL for (int e = 2 * half; e < 2 * half + 2; ++e) {
          out_[8 * kHalf + n][e] = sums_[half].merged(out_[8 * kHalf + n][e], block_out_[n][e]);
        }
      }
    }
  }

  // f(row, m, l) of the block.
  template <class F>
  __device__ void block_sums(F f) const {
    MK_UNROLL for (int half = 0; half < 2; ++half) {
      if (lane_ % 4 == 0) f(fragment_row(lane_, half), block_m_[half], block_l_[half]);
    }
  }
  // f(row, element, value, next element's value) of the block's o, elements counted from 0 of the 64.
  template <class F>
  __device__ void block_values(F f) const {
    MK_UNROLL for (int n = 0; n < 8; ++n) {
      MK_UNROLL for (int half = 0; half < 2; ++half) {
        f(fragment_row(lane_, half), 8 * n + fragment_col(lane_), block_out_[n][2 * half],
          block_out_[n][2 * half + 1]);
      }
    }
  }
  // f(row, element, value, next element's value) of all blocks, divided by l.
  template <class F>
  __device__ void results(F f) const {
    MK_UNROLL for (int half = 0; half < 2; ++half) {
      const float l = sums_[half].l;
      MK_UNROLL for (int n = 0; n < kHead / 8; ++n) {
        f(fragment_row(lane_, half), 8 * n + fragment_col(lane_), out_[n][2 * half] / l,
          out_[n][2 * half + 1] / l);
      }
    }
  }

 private:
  const int lane_, head_dim_;
  uint32_t query_[kHead / 16][4];
  float out_[kHead / 8][4];
  Softmax sums_[2];
  float score_[16][4], block_out_[8][4], block_m_[2], block_l_[2];
  uint32_t probability_[8][4];
  bool seen_[2];
};

}  // namespace mk
