// Attention of one work item: rows of one sequence, some KV heads, some KV blocks.
//
// For each query row and head, each absolute KV block gives a fresh (m, l, o): m = max score, l = sum e^(s -
// m), o = sum e^(s - m) v; blocks merge in ascending order. K and V of a block are widened to float32 once
// and serve up to kQueryRows (row, head) pairs. Everything a pair does depends on its own position alone:
// scores add over elements in order, l over lanes in a fixed tree, o over tokens in order up to its own
// position.
#pragma once
#include <math.h>

#include "store.h"

namespace mk::MK_SIMD {

#if MK_LANES == 4 && !defined(__aarch64__)
constexpr int kDenseRows = 4, kDenseVectors = 2;
#elif MK_LANES == 16
constexpr int kDenseRows = 6, kDenseVectors = 4;
#else
constexpr int kDenseRows = 6, kDenseVectors = 2;
#endif

// C[R][V vectors] (+)= A B for k rows of B.
template <int R, int V>
void dense_block(const float* a, int64_t lda, const float* b, int64_t ldb, int k, float* c, int64_t ldc,
                 bool resume) {
  F32 acc[R][V];
  MK_UNROLL for (int i = 0; i < R; ++i) {
    MK_UNROLL for (int v = 0; v < V; ++v) acc[i][v] = resume ? load(c + i * ldc + v * kLanes) : F32{};
  }
  for (int t = 0; t < k; ++t, b += ldb) {
    F32 row[V];
    MK_UNROLL for (int v = 0; v < V; ++v) row[v] = load(b + v * kLanes);
    MK_UNROLL for (int i = 0; i < R; ++i) {
      const F32 x = splat(a[i * lda + t]);
      MK_UNROLL for (int v = 0; v < V; ++v) acc[i][v] += x * row[v];
    }
  }
  MK_UNROLL for (int i = 0; i < R; ++i) {
    MK_UNROLL for (int v = 0; v < V; ++v) store(c + i * ldc + v * kLanes, acc[i][v]);
  }
}

template <int V, int R = kDenseRows>
inline void dense_rows(int rows, const float* a, int64_t lda, const float* b, int64_t ldb, int k, float* c,
                       int64_t ldc, bool resume) {
  for (; rows >= R; rows -= R, a += R * lda, c += R * ldc)
    dense_block<R, V>(a, lda, b, ldb, k, c, ldc, resume);
  if constexpr (R > 1) dense_rows<V, R - 1>(rows, a, lda, b, ldb, k, c, ldc, resume);
}

template <int V = kDenseVectors>
inline void dense_vectors(int rows, int vectors, const float* a, int64_t lda, const float* b, int64_t ldb,
                          int k, float* c, int64_t ldc, bool resume) {
  for (; vectors >= V; vectors -= V, b += V * kLanes, c += V * kLanes)
    dense_rows<V>(rows, a, lda, b, ldb, k, c, ldc, resume);
  if constexpr (V > 1) dense_vectors<V / 2>(rows, vectors, a, lda, b, ldb, k, c, ldc, resume);
}

// The same for any number of rows and vectors; an output's bits do not depend on either. A part of B that all
// rows use in turn (kDepth rows of the vectors of a block) fits half of a first-level cache.
inline void dense(int rows, int vectors, const float* a, int64_t lda, const float* b, int64_t ldb, int k,
                  float* c, int64_t ldc, bool resume) {
  constexpr int kDepth = 64;
  for (int t = 0; t < k; t += kDepth) {
    dense_vectors(rows, vectors, a + t, lda, b + t * ldb, ldb, k - t < kDepth ? k - t : kDepth, c, ldc,
                  resume || t > 0);
  }
}

inline float exp_scalar(float x) { return exp(splat(x))[0]; }

// (m, l, o) += one block's. Not inlined: split and unsplit attention must run the same instructions.
__attribute__((noinline)) inline void merge_block(float& m, float& l, float* o, float block_m, float block_l,
                                                  const float* block_o, int head_dim) {
  const float top = block_m > m ? block_m : m;
  const float keep = exp_scalar(m - top), add = exp_scalar(block_m - top);
  m = top;
  l = l * keep + block_l * add;
  for (int e = 0; e < head_dim; e += kLanes) {
    const int n = head_dim - e;
    store(o + e, load(o + e, n) * keep + load(block_o + e, n) * add, n);
  }
}

// The rank's query heads [first, end) that use one of its KV heads.
struct QueryHeads {
  int first, end;
  int count() const { return end - first; }
};

inline QueryHeads query_heads(const Dims& d, int kv_head) {
  return {d.query_head(kv_head), d.query_head_end(kv_head)};
}

template <class T>
inline void divide(T* out, const float* o, float l, int head_dim) {
  for (int e = 0; e < head_dim; e += kLanes) store(out + e, load(o + e, head_dim - e) / l, head_dim - e);
}

// A row of ATTN over some query heads, where the O projection reads it.
template <class T>
inline void store_output(const Call& call, int row, QueryHeads heads, const T* values) {
  const Dims& d = *call.dims;
  store_to(call, Buffer::ATTN, d.replicated_o ? residual_ranks(d, row) : own_rank(d),
           int64_t{row} * d.o_cols() + d.o_first() + heads.first * d.head_dim, values,
           heads.count() * d.head_dim);
}

// Tokens [0, tokens) of a KV block as float32: keys [element][key_stride], values [token][padded]. Keys come
// as whole pages: others may be storing those of later tokens meanwhile, whose scores softmax_row masks.
template <class T>
inline void load_block(const Call& call, int32_t seq, int head, int block, int tokens, int padded) {
  const Dims& d = *call.dims;
  const int32_t* table =
      call.step->block_tables + int64_t{seq} * d.pages_per_seq() + block * (d.kv_block / d.page);
  const T* k_cache = call.at<T>(Buffer::K_CACHE);
  const T* v_cache = call.at<T>(Buffer::V_CACHE);
  for (int begin = 0; begin < tokens; begin += d.page) {
    const int32_t page = table[begin / d.page];
    const T* k = k_cache + k_index(d, page, head, 0);
    for (int e = 0; e < d.head_dim; ++e, k += d.page) {
      float* out = call.scratch->keys + e * key_stride(d) + begin;
      for (int t = 0; t < d.page; t += kLanes) store(out + t, load(k + t, d.page - t), d.page - t);
    }
    const int rows = tokens - begin < d.page ? tokens - begin : d.page;
    const T* v = v_cache + v_index(d, page, head, 0);
    for (int t = 0; t < rows; ++t, v += d.head_dim) {
      float* out = call.scratch->values + int64_t{begin + t} * padded;
      for (int e = 0; e < d.head_dim; e += kLanes) store(out + e, load(v + e, d.head_dim - e));
    }
  }
}

// Scores of one pair become probabilities (zero beyond its tokens); gives m and l.
inline void softmax_row(float* scores, int tokens, float scale, float& m, float& l) {
  const I32 lane = lane_index();
  F32 top = splat(-INFINITY);
  for (int t = 0; t < tokens; t += kLanes) {
    const F32 s = select(lane < tokens - t, load(scores + t) * scale, splat(-INFINITY));
    top = select(s > top, s, top);
    store(scores + t, s);
  }
  m = max(top);
  F32 total{};
  for (int t = 0; t < tokens; t += kLanes) {
    const F32 p = exp(load(scores + t) - m);
    total += p;
    store(scores + t, p);
  }
  l = sum(total);
}

// The rows [first, first + rows) of the item and one KV head.
template <class T>
inline void attend(const Call& call, int first, int rows, int kv_head) {
  const Dims& d = *call.dims;
  const StepView& s = *call.step;
  const Scratch& scratch = *call.scratch;
  const int item = call.item, row = s.item_row[item] + first, head = s.item_kv_head[item] + kv_head;
  const QueryHeads heads = query_heads(d, head);
  const int group = heads.count(), pairs = rows * group;
  const int padded = (d.head_dim + kPanel - 1) / kPanel * kPanel;
  const int vectors = padded / kLanes;
  const float scale = 1.0f / sqrtf(static_cast<float>(d.head_dim));
  const int32_t* positions = s.positions + row;
  float *block_m = scratch.stats, *block_l = block_m + pairs, *m = block_l + pairs, *l = m + pairs;

  for (int i = 0; i < rows; ++i) {
    const T* q = call.at<T>(Buffer::Q) + int64_t{row + i} * d.q_cols() + heads.first * d.head_dim;
    float* out = scratch.queries + int64_t{i} * group * d.head_dim;
    const int n = group * d.head_dim;
    for (int e = 0; e < n; e += kLanes) store(out + e, load(q + e, n - e), n - e);
  }
  const int begin = s.item_block[item], end = begin + s.item_blocks[item];
  for (int block = begin; block < end; ++block) {
    if (call.aborted()) return;
    const int tokens = visible_tokens(d, positions[rows - 1], block);
    if (tokens == 0) break;
    int skip = 0;  // rows that end before this block
    while (visible_tokens(d, positions[skip], block) == 0) ++skip;
    load_block<T>(call, s.item_seq[item], head, block, tokens, padded);
    const int from = skip * group;
    float* scores = scratch.scores + int64_t{from} * d.kv_block;
    float* out = scratch.block_out + int64_t{from} * padded;
    dense(pairs - from, (tokens + kLanes - 1) / kLanes, scratch.queries + int64_t{from} * d.head_dim,
          d.head_dim, scratch.keys, key_stride(d), d.head_dim, scores, d.kv_block, false);
    for (int i = skip; i < rows; ++i) {
      for (int j = i * group; j < (i + 1) * group; ++j) {
        softmax_row(scratch.scores + int64_t{j} * d.kv_block, visible_tokens(d, positions[i], block), scale,
                    block_m[j], block_l[j]);
      }
    }
    // All rows together up to the first row's end, then each to its own: positions ascend by one.
    const int common = visible_tokens(d, positions[skip], block);
    dense(pairs - from, vectors, scores, d.kv_block, scratch.values, padded, common, out, padded, false);
    for (int i = skip; i < rows; ++i) {
      const int own = visible_tokens(d, positions[i], block) - common;
      if (own == 0) continue;
      dense(group, vectors, scratch.scores + int64_t{i} * group * d.kv_block + common, d.kv_block,
            scratch.values + int64_t{common} * padded, padded, own,
            scratch.block_out + int64_t{i} * group * padded, padded, true);
    }
    for (int j = from; j < pairs; ++j) {
      const float* o = scratch.block_out + int64_t{j} * padded;
      if (s.item_split[item] >= 0) {
        const int64_t entry = partial_index(s, item, first + j / group, kv_head) + block;
        float* partial =
            call.at<float>(Buffer::PARTIALS) + (entry * d.group_size() + j % group) * (d.head_dim + 2);
        partial[0] = block_m[j];
        partial[1] = block_l[j];
        memcpy(partial + 2, o, d.head_dim * sizeof(float));
      } else if (block == begin) {
        m[j] = block_m[j];
        l[j] = block_l[j];
        memcpy(scratch.merged_out + int64_t{j} * padded, o, d.head_dim * sizeof(float));
      } else {
        merge_block(m[j], l[j], scratch.merged_out + int64_t{j} * padded, block_m[j], block_l[j], o,
                    d.head_dim);
      }
    }
  }
  if (s.item_split[item] >= 0) return;
  T* out = reinterpret_cast<T*>(scratch.block_out);
  for (int i = 0; i < rows; ++i) {
    for (int g = 0, j = i * group; g < group; ++g, ++j)
      divide(out + g * d.head_dim, scratch.merged_out + int64_t{j} * padded, l[j], d.head_dim);
    store_output(call, row + i, heads, out);
  }
}

// One item (call.item). Of a split's item it leaves the blocks' (m, l, o) in PARTIALS.
template <class T>
void attention(const Call& call, const Attention&) {
  const Dims& d = *call.dims;
  const StepView& s = *call.step;
  const int item = call.item, rows = s.item_rows[item], heads = s.item_kv_heads[item];
  if (s.item_seq[item] < 0) {
    T* zeros = reinterpret_cast<T*>(call.scratch->block_out);
    memset(zeros, 0, int64_t{d.group_size()} * d.head_dim * sizeof(T));
    for (int r = 0; r < rows; ++r) {
      for (int head = 0; head < heads; ++head)
        store_output(call, s.item_row[item] + r, query_heads(d, s.item_kv_head[item] + head), zeros);
    }
    return;
  }
  const int step = kQueryRows / d.group_size() > 0 ? kQueryRows / d.group_size() : 1;
  for (int head = 0; head < heads; ++head) {
    for (int first = 0; first < rows; first += step)
      attend<T>(call, first, rows - first < step ? rows - first : step, head);
  }
}

// After the last item of call.item's split: PARTIALS of all its blocks, ascending, to ATTN.
template <class T>
void attention_merge(const Call& call, const int32_t*) {
  const Dims& d = *call.dims;
  const StepView& s = *call.step;
  const int item = call.item, stride = d.head_dim + 2;
  float* o = call.scratch->merged_out;
  T* out = reinterpret_cast<T*>(call.scratch->block_out);
  for (int r = 0; r < s.item_rows[item]; ++r) {
    const int row = s.item_row[item] + r;
    for (int head = 0; head < s.item_kv_heads[item]; ++head) {
      const QueryHeads heads = query_heads(d, s.item_kv_head[item] + head);
      for (int g = 0; g < heads.count(); ++g) {
        const float* partial = call.at<float>(Buffer::PARTIALS) +
                               (partial_index(s, item, r, head) * d.group_size() + g) * stride;
        float m = partial[0], l = partial[1];
        memcpy(o, partial + 2, d.head_dim * sizeof(float));
        for (int block = 1; visible_tokens(d, s.positions[row], block) > 0; ++block) {
          partial += int64_t{d.group_size()} * stride;
          merge_block(m, l, o, partial[0], partial[1], partial + 2, d.head_dim);
        }
        divide(out + g * d.head_dim, o, l, d.head_dim);
      }
      store_output(call, row, heads, out);
    }
  }
}

}  // namespace mk::MK_SIMD
