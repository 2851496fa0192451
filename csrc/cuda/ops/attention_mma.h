// Attention's arithmetic on the tensor cores: 16 query rows attend to a KV block. Normally one warp does
// this. In builds for one row, the consumer warps divide the work. Each computes the scores of 16
// tokens, exchanges probabilities with the others, and computes 16 elements of the head. Both ways add
// in the same order. Keys are stored as [element][token] and values as [token][element], so
// ldmatrix.trans loads both as the B matrix of mma.
#pragma once
#include "../tensor_core.h"
#include "memory.h"
#include "softmax.h"

namespace mk {

// Computes c += a * b on the tensor cores. `a` is [16][16], `b` is [16][8]. Each lane passes its
// elements.
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Loads four 8 x 8 matrices of 16-bit elements from shared memory and transposes them. Each lane passes the
// shared-memory address of one row of one matrix.
__device__ __forceinline__ void load_matrices(uint32_t (&b)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(row)
               : "memory");
}

// Returns the address that a lane passes to ldmatrix to load rows and columns [0, 16) of a swizzled tile. Of
// the words that the lane receives, 0 and 1 belong to the first eight columns, 2 and 3 to the other eight.
__device__ __forceinline__ uint32_t own_matrix_row(const unsigned char* tile, int lane) {
  const int matrix = ldmatrix_matrix(lane);
  return static_cast<uint32_t>(__cvta_generic_to_shared(tile)) +
         tile_offset(matrix % 2 * 8 + ldmatrix_row(lane), matrix / 2 * 16);
}

// Loads a 16 x 16 part of a swizzled tile, from row `row` and column `col` on, as the B operand of mma. `own`
// is the lane's address for row 0 and column 0 (own_matrix_row). The swizzle repeats every eight rows and
// permutes chunks of eight columns, so an XOR and an addition give the address of any other part.
__device__ __forceinline__ void load_b(uint32_t (&b)[4], uint32_t own, int row, int col) {
  load_matrices(b, (own ^ col * 2) + row * kTileRowBytes);
}

// Sets `out` to words[k]. A run-time index would force the whole array into memory.
template <int kCount>
__device__ __forceinline__ void pick(uint32_t (&out)[4], const uint32_t (&words)[kCount][4], int k) {
  MK_UNROLL for (int i = 0; i < kCount; ++i) {
    MK_UNROLL for (int w = 0; w < 4; ++w) out[w] = i == k ? words[i][w] : out[w];
  }
}

// 16 query rows and their attention results, in the registers of one warp. A lane holds parts of two rows:
// row lane / 4 and row lane / 4 + 8. Groups of eight columns are never partly outside the head, because
// head_dim is a multiple of 8.
class AttentionTile {
 public:
  // d.head_dim is a multiple of 8, and a tile has at most kHeadPart elements of a head. The constructor
  // sets every member that start() sets. This saves registers: the compiler need not keep the members of
  // the previous tile alive.
  template <class P>
  __device__ AttentionTile(P& p, const Sizes& d) : lane_(p.lane()), warp_(p.warp() - kConsumerWarp), d_(d) {
    MK_UNROLL for (int half = 0; half < 2; ++half) position_[half] = -1;
    MK_UNROLL for (int k = 0; k < kHeadPart / 16; ++k) {
      MK_UNROLL for (int w = 0; w < 4; ++w) query_[k][w] = 0;
    }
    MK_UNROLL for (int n = 0; n < kOutputs; ++n) { MK_UNROLL for (int e = 0; e < 4; ++e) out_[n][e] = 0.0f; }
  }

  // Loads the lane's elements of the queries, and the positions of the lane's rows. row(i) returns the
  // address of query row i, or null if the tile has no row i; position(i) returns the position of the token
  // of row i.
  template <class Row, class Position>
  __device__ void start(Row row, Position position) {
    const int lane = here(lane_), head_dim = size();
    MK_UNROLL for (int half = 0; half < kHalves; ++half) {
      const uint16_t* from = row(fragment_row(lane, half));
      if (from) position_[half] = position(fragment_row(lane, half));
      const uint16_t* own = here(from + fragment_col(lane));
      MK_UNROLL for (int k = 0; k < kHeadPart / 16; ++k) {
        MK_UNROLL for (int w = half; w < 4; w += 2) {
          const int first = 16 * k + a_k(0, w);
          if constexpr (kWide) query_[k][w] = 0;  // so that the last part's words need no registers
          if (from && first < head_dim) query_[k][w] = load_word(own + first);
        }
      }
    }
  }

  // Sets all scores to zero. Builds for wide heads call this before the first scores() of a KV block, and
  // each scores() then adds the products of one part of the head.
  __device__ void clear() {
    MK_UNROLL for (int n = 0; n < kScores; ++n) { MK_UNROLL for (int e = 0; e < 4; ++e) score_[n][e] = 0.0f; }
  }

  // Computes the scores of half kHalf (0 or 1) of a KV block's tokens; `keys` is a tile [element][64 tokens].
  template <int kHalf>
  __device__ void scores(const unsigned char* keys) {
    constexpr int kFirst = kTogether ? 0 : 8 * kHalf, kEnd = kFirst + lower_of(kScores, 8);
    const uint32_t own = own_matrix_row(keys, here(lane_)) ^ own_column() * 2;
    const int head_dim = size();
    MK_UNROLL for (int n = kFirst; n < kEnd; ++n) {
      MK_UNROLL for (int e = 0; e < 4; ++e) score_[n][e] = kWide ? score_[n][e] : 0.0f;
    }
    MK_UNROLL for (int k = 0; k < kHeadPart / 16; ++k) {
      if (16 * k + 16 > head_dim) break;
      MK_UNROLL for (int n = kFirst; n < kEnd; n += 2) {
        uint32_t b[4];
        load_b(b, own, 16 * k, 8 * (n - kFirst));
        mma_16x8x16(score_[n], query_[k], b[0], b[1]);
        mma_16x8x16(score_[n + 1], query_[k], b[2], b[3]);
      }
    }
    // If head_dim is an odd multiple of 8, eight elements of the head remain, half of an mma fragment. The
    // other half of the query fragment is zero, because the following rows of `keys` do not belong to this
    // head.
    if (head_dim % 16 == 0) return;
    uint32_t query[4] = {};
    pick(query, query_, head_dim / 16);
    MK_UNROLL for (int n = kFirst; n < kEnd; n += 2) {
      uint32_t b[4];
      load_b(b, own, head_dim - 8, 8 * (n - kFirst));
      mma_16x8x16(score_[n], query, b[0], 0);
      mma_16x8x16(score_[n + 1], query, b[2], 0);
    }
  }

  // Computes the softmax of KV block number `block`: turns the scores into e^(score - m), rounded to
  // bf16. Here, m is the row's maximum score in the block. A row sees the last `span` tokens up to its
  // own; for other tokens the result is 0. Also computes l, the row's sum of e^(score - m) before
  // rounding: a lane adds within each 16 tokens, then adds these sums in ascending order. Scores are
  // first multiplied by `scale`, and limited by `cap` if it is not 0.
  template <class P>
  __device__ void softmax(P& p, Scratch& shared, float scale, float cap, int block, int span) {
    if (kWide && cap != 0.0f) {
      const float inside = scale * one_over_root(cap * cap);
      MK_UNROLL for (int n = 0; n < kScores; ++n) {
        MK_UNROLL for (int e = 0; e < 4; ++e) score_[n][e] = tanh_fast(score_[n][e] * inside);
      }
      scale = cap;
    }
    MK_UNROLL for (int half = 0; half < kHalves; ++half) {
      const int seen = position_[half] + 1 - block * kKvBlock;
      // The row sees the token in column c of this lane if 0 <= offset + c < span. With unsigned numbers, one
      // comparison tests both limits.
      const unsigned offset = first() + fragment_col(here(lane_)) + span - seen;
      float m = minus_infinity();
      MK_UNROLL for (int n = 0; n < kScores; ++n) {
        MK_UNROLL for (int e = 2 * half; e < 2 * half + 2; ++e) {
          score_[n][e] = offset + (8 * n + e % 2) < static_cast<unsigned>(span) ? score_[n][e] * scale
                                                                                : minus_infinity();
          m = fmaxf(m, score_[n][e]);
        }
      }
      m = fmaxf(m, shuffle_xor(m, 1));
      m = fmaxf(m, shuffle_xor(m, 2));
      if constexpr (kTogether) {
        const int row = fragment_row(here(lane_), half);
        Most& most = *reinterpret_cast<Most*>(shared.rows + kMostAt);
        if (lane_ % 4 == 0) most[warp_][row] = m;
        p.consumer_sync();
        MK_UNROLL for (int w = 0; w < kConsumerWarps; ++w) m = fmaxf(m, most[w][row]);
      }
      const float base = m == minus_infinity() ? 0.0f : m;
      float l = 0.0f;
      // The accumulators of 16 tokens already have the register layout of the next mma's A fragment.
      MK_UNROLL for (int k = 0; k < kScores / 2; ++k) {
        float sum = 0.0f;
        MK_UNROLL for (int n = 0; n < 2; ++n) {
          const float* pair = &score_[2 * k + n][2 * half];
          const float first = exp_fast(pair[0] - base), second = exp_fast(pair[1] - base);
          sum += first;
          sum += second;
          probability_[k][2 * n + half] = pack_bf16(first, second);
        }
        l += sum;
      }
      if constexpr (kTogether) {
        Shared& all = *reinterpret_cast<Shared*>(shared.rows);
        all.sum[warp_][half][lane_] = l;
        MK_UNROLL for (int w = half; w < 4; w += 2) all.probability[warp_][w][lane_] = probability_[0][w];
        p.consumer_sync();
        l = 0.0f;
        MK_UNROLL for (int w = 0; w < kConsumerWarps; ++w) l += all.sum[w][half][lane_];
      }
      l += shuffle_xor(l, 1);
      block_[half] = {m, l + shuffle_xor(l, 2)};
      seen_[half] = seen > 0 && seen - span < kKvBlock;
    }
  }

  // Merges the block's softmax maximum m and sum l (softmax.h) into those of earlier blocks, for the rows
  // that see the block. values() merges o, the block's weighted sum of values.
  __device__ void merge() {
    MK_UNROLL for (int half = 0; half < kHalves; ++half) {
      const Rescale scale = seen_[half] ? sums_[half].merge(block_[half].a, block_[half].b) : Rescale{};
      block_[half] = {scale.keep, scale.add};
    }
  }

  // Computes o, the sum of the KV block's values weighted by their probabilities, for head elements [64 *
  // kHalf, 64 * kHalf + 64). `values` is a tile [token][64 elements]. Normally merges o into the result of
  // the earlier KV blocks. If `alone` is set, replaces that result, because the caller stores each block's o
  // separately. To save registers, processes four accumulator fragments at a time.
  template <int kHalf>
  __device__ void values(const Scratch& shared, const unsigned char* values, bool alone) {
    constexpr int kAtOnce = lower_of(kOutputs, 4), kFirst = kTogether ? 0 : 8 * kHalf;
    const uint32_t own = own_matrix_row(values, here(lane_)) ^ own_column() * 2;
    MK_UNROLL for (int first = 0; first < lower_of(kOutputs, 8); first += kAtOnce) {
      float o[kAtOnce][4] = {};
      MK_UNROLL for (int k = 0; k < 8; ++k) {
        uint32_t of_others[4] = {};
        if constexpr (kTogether) {
          const Shared& all = *reinterpret_cast<const Shared*>(shared.rows);
          MK_UNROLL for (int w = 0; w < 4; ++w) {
            if (w % 2 < kHalves) of_others[w] = all.probability[k][w][lane_];
          }
        }
        const uint32_t (&probability)[4] = kTogether ? of_others : probability_[k % (kScores / 2)];
        MK_UNROLL for (int n = 0; n < kAtOnce; n += 2) {
          uint32_t b[4];
          load_b(b, own, 16 * k, 8 * (first + n));
          mma_16x8x16(o[n], probability, b[0], b[1]);
          mma_16x8x16(o[n + 1], probability, b[2], b[3]);
        }
      }
      MK_UNROLL for (int half = 0; half < kHalves; ++half) {
        if (!seen_[half]) continue;
        const Rescale scale{block_[half].a, block_[half].b};
        MK_UNROLL for (int n = 0; n < kAtOnce; ++n) {
          MK_UNROLL for (int e = 0; e < 2; ++e) {
            float &out = out_[kFirst + first + n][2 * half + e], &block_o = o[n][2 * half + e];
            out = alone ? block_o : scale.merged(out, block_o);
          }
        }
      }
    }
  }

  // Merges value(i), the sink of row i's head, into each row i. A sink is a score that counts only in l.
  template <class Value>
  __device__ void add_sinks(Value value) {
    MK_UNROLL for (int half = 0; half < kHalves; ++half) {
      const float keep = sums_[half].merge(value(fragment_row(here(lane_), half)), 1.0f).keep;
      MK_UNROLL for (int n = 0; n < kOutputs; ++n) {
        MK_UNROLL for (int e = 0; e < 2; ++e) out_[n][2 * half + e] *= keep;
      }
    }
  }

  // Stores a single KV block's softmax maximum m, sum l and output o at to(i), for each row i that sees
  // it. If several warps compute parts of the same head, only the first of them stores m and l.
  template <class To>
  __device__ void store_block(To to, int part) const {
    const int lane = here(lane_), head_dim = size();
    const int skipped = part * kHeadPart + first();
    MK_UNROLL for (int half = 0; half < kHalves; ++half) {
      if (!seen_[half]) continue;
      float *out = to(fragment_row(lane, half)), *own = here(out + 2 + skipped + fragment_col(lane));
      if (lane % 4 == 0 && skipped == 0) store_pair(out, block_[half]);
      MK_UNROLL for (int n = 0; n < kOutputs; ++n) {
        if (first() + 8 * n < head_dim) store_pair(own + 8 * n, {out_[n][2 * half], out_[n][2 * half + 1]});
      }
    }
  }

  // Stores the output of each row i, o / l (the weighted sum of values divided by the sum of weights),
  // rounded to bf16, at to(i); skips the row if to(i) is null.
  template <class To>
  __device__ void store_results(To to) const {
    const int lane = here(lane_), head_dim = size();
    MK_UNROLL for (int half = 0; half < kHalves; ++half) {
      uint16_t *out = to(fragment_row(lane, half)), *own = here(out + first() + fragment_col(lane));
      const float share = 1.0f / sums_[half].l;
      if (!out) continue;
      MK_UNROLL for (int n = 0; n < kOutputs; ++n) {
        if (first() + 8 * n < head_dim)
          store_word(own + 8 * n, pack_bf16(out_[n][2 * half] * share, out_[n][2 * half + 1] * share));
      }
    }
  }

 private:
  // kScores, kOutputs: how many groups of eight tokens, and of eight elements of the head, this warp
  // computes. kHalves: how many of the tile's two groups of eight rows can contain query rows.
  static constexpr int kScores = kTogether ? 2 : kKvBlock / 8, kOutputs = kTogether ? 2 : kHeadPart / 8,
                       kHalves = kMostGroup > 8 ? 2 : 1;
  // Data that the warps exchange about a KV block: each warp's sums and its part of the probabilities.
  struct Shared {
    float sum[kConsumerWarps][2][32];
    uint32_t probability[kConsumerWarps][4][32];
  };
  // Each warp's maximum score of each query row. The array lies where no other instruction writes.
  using Most = float[kConsumerWarps][kQueryTile];
  static constexpr int kMostAt = kRowBytes - sizeof(Most);
  static_assert(!kTogether || (sizeof(Shared) <= kCopyBytes && kCopyBytes <= kMostAt));

  // Returns the number of this warp's first token in a KV block, which is also the number of its first
  // element of the head. own_column() returns that token's or element's column in a 64-column tile.
  __device__ int first() const { return kTogether ? 16 * warp_ : 0; }
  __device__ int own_column() const { return first() % 64; }

  // Returns how many elements of the head the tile has.
  __device__ int size() const { return kWide ? lower_of(d_.head_dim, kHeadPart) : d_.head_dim; }

  const int lane_, warp_;
  const Sizes& d_;  // loaded where it is needed, which costs no register elsewhere
  int position_[2];
  uint32_t query_[kHeadPart / 16][4];
  float out_[kOutputs][4];
  Softmax sums_[2];
  float score_[kScores][4];
  uint32_t probability_[kScores / 2][4];
  Pair block_[2];  // the KV block's softmax maximum and sum; after merge(), factors for old and new outputs
  bool seen_[2];
};

}  // namespace mk
