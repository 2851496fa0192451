// Attention of one work item: query rows of one sequence, for some KV heads and some KV blocks.
//
// A KV block is kv_block successive tokens, and begins at a multiple of kv_block, wherever the item
// starts. For each (query row, head) pair and each block, the result is (m, l, o): the maximum score m,
// the sum l of e^(s - m) and the sum o of e^(s - m) v, over the scores s and values v of the block. The
// results of a pair's blocks are then merged in ascending order. Up to kQueryRows pairs share one pass
// over the K and V of a block. With at most kDirectPairs pairs, the pass reads the KV cache directly.
// With more, it reads a float32 copy of the block, so that the conversion is done only once. Quantised
// keys are not copied, but multiplied in integers.
//
// A pair's result has the same bits whichever other pairs are computed with it, because every sum has a
// fixed order. A score is summed over the head's elements in order; with quantised keys, over groups of
// kKvUnit elements, each an exact integer sum. l is summed over the vector lanes in a fixed tree. o is
// summed over the tokens in order, up to the pair's position.
#pragma once
#include <math.h>

#include "kv.h"
#include "store.h"

namespace mk::MK_SIMD {

#if MK_LANES == 4 && !defined(__aarch64__)
constexpr int kDenseRows = 4, kDenseVectors = 2;
#elif MK_LANES == 16
constexpr int kDenseRows = 6, kDenseVectors = 4;
#else
constexpr int kDenseRows = 6, kDenseVectors = 2;
#endif
// The maximum number of (row, head) pairs that read the KV cache directly. With more pairs, a float32 copy is
// faster.
constexpr int kDirectPairs = 2 * kDenseRows;

// Multiplies matrices: computes R rows and V SIMD vectors of columns of C = A B. `column` is the first of
// these columns in B; `c` already points to it. Uses only the columns [k, end) of A and the same rows of B.
// With `resume`, adds to C instead of replacing C. Only the first `last` lanes of the last vector are used.
//
// The rows of B may be tokens of several KV pages, so B need not be contiguous. B is read in runs: rows that
// are evenly spaced in memory, such as the tokens of one KV page. For each run, b.find() finds one
// strip per vector of columns. A strip is a pointer that moves from row to row.
template <int R, int V, class S>
void dense_block(const float* a, int64_t lda, const Matrix<S>& b, int column, int last, int k, int end,
                 float* c, int64_t ldc, bool resume) {
  F32 acc[R][1][V];
  load_block(acc, c, ldc, 0, resume);
  const int64_t ldb = b.stride;
  while (k < end) {
    S strips[V];
    const int run_end = b.find(k, column, end, V, strips);
    for (int row = 0; k < run_end; ++row, ++k) {  // `row` counts from the beginning of the strips
      F32 values[V];
      MK_UNROLL for (int v = 0; v < V; ++v) {
        strips[v].fetch(row, ldb);
        values[v] = strips[v].row(row, ldb, v + 1 < V ? kLanes : last);
      }
      MK_UNROLL for (int i = 0; i < R; ++i) {
        const F32 x = splat(a[i * lda + k]);
        MK_UNROLL for (int v = 0; v < V; ++v) acc[i][0][v] += x * values[v];
      }
    }
  }
  store_block(acc, c, ldc, 0);
}

template <int V, int R = kDenseRows, class S>
inline void dense_rows(int rows, const float* a, int64_t lda, const Matrix<S>& b, int column, int last, int t,
                       int end, float* c, int64_t ldc, bool resume) {
  for (; rows >= R; rows -= R, a += R * lda, c += R * ldc)
    dense_block<R, V>(a, lda, b, column, last, t, end, c, ldc, resume);
  if constexpr (R > 1) dense_rows<V, R - 1>(rows, a, lda, b, column, last, t, end, c, ldc, resume);
}

// Computes C = A B for any number of rows and columns. With `resume`, adds to C instead. An output has the
// same bits whatever the number of rows and columns. The rows of C must be padded to full SIMD vectors.
template <int V = kDenseVectors, class S>
inline void dense(int rows, int cols, const float* a, int64_t lda, const Matrix<S>& b, int k, float* c,
                  int64_t ldc, bool resume, int column = 0) {
  // B is processed in parts of `depth` rows and V vectors. A part fits in half of an L1 cache, so it stays
  // there while it is multiplied with all rows of A.
  const int depth = rows > kDenseRows ? 64 : k;
  for (; cols - column > (V - 1) * kLanes; column += V * kLanes) {
    const int last = lower_of(cols - column - (V - 1) * kLanes, kLanes);
    for (int t = 0; t < k; t += depth)
      dense_rows<V>(rows, a, lda, b, column, last, t, lower_of(t + depth, k), c + column, ldc,
                    resume || t > 0);
  }
  if constexpr (V > 1) dense<V / 2>(rows, cols, a, lda, b, k, c, ldc, resume, column);
}

// Computes the attention scores of R queries, which have been rounded to integers, for the first n (at
// most kLanes) tokens of the quantised `keys`. A head has `units` quantisation blocks. Each gives an
// exact integer sum of products, which is multiplied by the scales of the key and the query. The results
// of the quantisation blocks are added in order (megakernel/isa/integers.py).
template <int R>
MK_INLINE void score_tokens(const Dims& d, const Rounded* queries, int units, const KeyWords& keys, int n,
                            float* scores) {
  F32 acc[R] = {};
  for (int u = 0; u < units; ++u) {
    const F32 scale = keys.scale(u, n);
    const int elements = d.head_dim - u * kKvUnit;
    ByteSums<8> sums[R];
    MK_UNROLL for (int i = 0; i < R; ++i) {
      const Rounded& query = queries[i * units + u];
      MK_UNROLL for (int e = 0; e < kWideWords; ++e) {
        const int j = query.places[e];  // padding is 0 and may be multiplied with any word
        sums[i].add_high(e, keys.words(u, 4 * j < elements ? j : 0, n), query.high[e]);
      }
    }
    MK_UNROLL_STEPS for (int j = 0; j < kKvUnit / 4; ++j) {
      if (4 * j >= elements) break;
      const U32 words = keys.words(u, j, n);
      MK_UNROLL for (int i = 0; i < R; ++i) sums[i].add(j, words, queries[i * units + u].words[j]);
    }
    MK_UNROLL for (int i = 0; i < R; ++i) {
      const Rounded& query = queries[i * units + u];
      const I32 products = sums[i].value(0, query.halves[0] + query.halves[1]);
      acc[i] = acc[i] + __builtin_convertvector(products, F32) * (scale * query.scale);
    }
  }
  MK_UNROLL for (int i = 0; i < R; ++i) store(scores + int64_t{i} * d.kv_block, acc[i]);
}

// Computes the scores of `rows` queries, R at a time, for the tokens [begin, tokens) of a KV block.
template <int R = kIntegerRows>
void score_rows(const Dims& d, const Rounded* queries, int rows, const CachedBlock<int8_t>& cached, int begin,
                int tokens, float* scores) {
  const int units = ceil_div(d.head_dim, kKvUnit);
  for (; rows >= R; rows -= R, queries += R * units, scores += int64_t{R} * d.kv_block) {
    int t = begin;
    for (; t + kLanes <= tokens; t += kLanes)
      score_tokens<R>(d, queries, units, cached.key(t), kLanes, scores + t);
    if (t < tokens) score_tokens<R>(d, queries, units, cached.key(t), tokens - t, scores + t);
  }
  if constexpr (R > 1) score_rows<R - 1>(d, queries, rows, cached, begin, tokens, scores);
}

inline float exp_scalar(float x) { return exp(splat(x))[0]; }

// Merges the softmax state (m, l, o) of one KV block (kv_block tokens) into that of all earlier blocks. Must
// not be inlined: attention must give the same bits whether or not its KV blocks are divided among several
// work items, so both cases must run the same machine code.
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

// Adds a query head's sink, if the phase has sinks, to the head's softmax state. A sink is a score
// without a value, so it is merged as one more KV block, whose o is zero.
inline void merge_sink(const Call& call, int head, float& m, float& l, float* o) {
  static constexpr float kNothing[kMostHeadDim] = {};
  if (call.phase->weights == Buffer::kNone) return;
  merge_block(m, l, o, call.weights<float>()[head], 1.0f, kNothing, call.dims->head_dim);
}

// The query heads [first, end) of this rank that attend to one KV head.
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

// Stores the attention output of one row and some query heads into the buffer that the O projection reads.
template <class T>
inline void store_output(const Call& call, int row, QueryHeads heads, const T* values) {
  const Dims& d = *call.dims;
  store_to(call, call.phase->output, d.replicated_o ? residual_ranks(d, row) : own_rank(d),
           int64_t{row} * d.o_cols() + d.o_first() + heads.first * d.head_dim, values,
           heads.count() * d.head_dim);
}

// Computes the softmax of one (row, head) pair over `tokens` scores, without the final division. Replaces
// each score by its weight e^(s - m), where s is the score times `scale`, limited by the cap `d.score_cap`,
// and m is the maximum s. Also returns m, and the sum l of the weights. The rest of the last SIMD vector
// becomes zero.
inline void softmax_row(const Dims& d, float* scores, int tokens, float scale, float& m, float& l) {
  const I32 lane = lane_index();
  F32 top = splat(-INFINITY);
  for (int t = 0; t < tokens; t += kLanes) {
    const F32 own = capped(load(scores + t) * scale, d.score_cap);
    const F32 s = select(lane < tokens - t, own, splat(-INFINITY));
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

// Returns the first token that the query at `position` sees, counted from the start of KV block `block`.
// The query sees at most the last `span` tokens.
inline int first_token(const Dims& d, int span, int position, int block) {
  return higher_of(position + 1 - span - block * d.kv_block, 0);
}

// Computes the softmax state (m, l, o) of several query rows over one KV block. `positions` are the positions
// of the rows, in ascending order. Each row has `group` query heads, and sees the last `span` tokens up to
// its own position. At least one of these tokens must be in the block.
template <class T, class Kv, class Query>
inline void attend_block(const Dims& d, const CachedBlock<T>& cached, const Kv& kv, int block,
                         const int32_t* positions, int rows, int group, int span, const Query* queries,
                         float* scores, float* m, float* l, float* out) {
  const float scale = 1.0f / sqrtf(static_cast<float>(d.head_dim));
  const int tokens = visible_tokens(d, positions[rows - 1], block), padded = padded_head(d);
  // No row sees the tokens before `oldest`. Scores are computed from the start of the SIMD vector that
  // contains `oldest`. Tokens that a row does not see get the weight 0.
  const int oldest = first_token(d, span, positions[0], block), begin = oldest / kLanes * kLanes;
  if constexpr (CachedBlock<T>::kQuantised)
    score_rows(d, queries, rows * group, cached, begin, tokens, scores);
  else
    dense(rows * group, tokens, queries, d.head_dim, Keys(kv), d.head_dim, scores, d.kv_block, false, begin);
  for (int j = 0; j < rows * group; ++j) {
    float* own = scores + int64_t{j} * d.kv_block;
    const int first = first_token(d, span, positions[j / group], block);
    for (int t = begin; t < first; ++t) own[t] = -INFINITY;
    softmax_row(d, own + begin, visible_tokens(d, positions[j / group], block) - begin, scale, m[j], l[j]);
  }
  // Tokens that every row sees come first: their values are multiplied for all rows together. The later
  // tokens follow, row by row. These are few, because the rows have consecutive positions.
  const int common = visible_tokens(d, positions[0], block);
  dense(rows * group, d.head_dim, scores + oldest, d.kv_block, TokenValues(kv, oldest), common - oldest, out,
        padded, false);
  for (int i = 1; i < rows; ++i) {
    const int64_t first = int64_t{i} * group;
    dense(group, d.head_dim, scores + first * d.kv_block + common, d.kv_block, TokenValues(kv, common),
          visible_tokens(d, positions[i], block) - common, out + first * padded, padded, true);
  }
}

template <class T>
inline void load_query(const T* q, int n, float* out) {
  for (int e = 0; e < n; e += kLanes) store(out + e, load(q + e, n - e), n - e);
}

// Rounds a query of `n` elements to integers. Zeros fill the last group of kUnit elements.
template <class T>
inline void load_query(const T* q, int n, Rounded* out) {
  for (int e = 0; e < n; e += kUnit, ++out) {
    float unit[kUnit] = {};
    load_query(q + e, lower_of(n - e, kUnit), unit);
    round_row(unit, 1, out);
  }
}

// Computes attention for the item's query rows [first, first + rows) and one of its KV heads. C is the
// type of the KV cache's elements; int8_t means Q8_0.
template <class T, class C>
inline void attend(const Call& call, int first, int rows, int kv_head) {
  const Dims& d = *call.dims;
  const StepView& s = *call.step;
  const Scratch& scratch = *call.scratch;
  const int item = call.item, row = s.item_row[item] + first, head = s.item_kv_head[item] + kv_head;
  const QueryHeads heads = query_heads(d, head);
  const int group = heads.count(), pairs = rows * group;
  const int padded = padded_head(d);
  const int32_t* positions = s.positions + row;
  float *block_m = scratch.stats, *block_l = block_m + pairs, *m = block_l + pairs, *l = m + pairs;

  // Quantised keys are multiplied in integers, so the queries are rounded to integers.
  using Query = std::conditional_t<CachedBlock<C>::kQuantised, Rounded, float>;
  Query* const queries = reinterpret_cast<Query*>(scratch.queries);
  const int width = CachedBlock<C>::kQuantised ? ceil_div(d.head_dim, kKvUnit) : d.head_dim;
  for (int j = 0; j < pairs; ++j) {
    const T* q =
        call.inputs<T>() + int64_t{row + j / group} * d.q_cols() + (heads.first + j % group) * d.head_dim;
    load_query(q, d.head_dim, queries + j * width);
  }
  const int span = d.span(call.layer), end = s.item_block[item] + s.item_blocks[item];
  // The first of the item's KV blocks that row i sees.
  const auto opening = [&](int i) {
    return higher_of(s.item_block[item], first_token(d, span, positions[i], 0) / d.kv_block);
  };
  const int begin = lower_of(opening(0), end);
  const Cache<C> cache(call, s.block_tables + int64_t{s.item_seq[item]} * d.pages_per_seq(), head,
                       s.item_kv_head[item] + s.item_kv_heads[item], begin * d.kv_block,
                       lower_of(positions[rows - 1] + 1, end * d.kv_block), scratch.scales);
  for (int block = begin; block < end; ++block) {
    if (call.aborted()) return;
    if (visible_tokens(d, positions[rows - 1], block) == 0) break;
    int skip = 0, stop = rows;  // rows [skip, stop) see this block
    while (visible_tokens(d, positions[skip], block) == 0) ++skip;
    while (opening(stop - 1) > block) --stop;
    const int from = skip * group, to = stop * group;
    const int tokens = visible_tokens(d, positions[stop - 1], block);
    const CachedBlock<C> cached(cache, block, tokens);
    const auto attend_from = [&](const auto& kv) {
      attend_block(d, cached, kv, block, positions + skip, stop - skip, group, span, queries + from * width,
                   scratch.scores, block_m + from, block_l + from, scratch.block_out + from * padded);
    };
    if (to - from > kDirectPairs)
      attend_from(Widened(d, cached, scratch, first_token(d, span, positions[skip], block), tokens));
    else
      attend_from(cached);
    for (int j = from; j < to; ++j) {
      const float* o = scratch.block_out + int64_t{j} * padded;
      if (s.item_split[item] >= 0) {
        const int64_t entry = partial_index(s, item, first + j / group, kv_head) + block;
        float* partial =
            call.at<float>(Buffer::PARTIALS) + (entry * d.group_size() + j % group) * (d.head_dim + 2);
        partial[0] = block_m[j];
        partial[1] = block_l[j];
        memcpy(partial + 2, o, d.head_dim * sizeof(float));
      } else if (block == opening(j / group)) {
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
    for (int g = 0, j = i * group; g < group; ++g, ++j) {
      float* o = scratch.merged_out + int64_t{j} * padded;
      merge_sink(call, heads.first + g, m[j], l[j], o);
      divide(out + g * d.head_dim, o, l[j], d.head_dim);
    }
    store_output(call, row + i, heads, out);
  }
}

// Runs attention for work item number call.item. Normally computes the final output. For a long context,
// several work items divide the KV blocks of the same rows. Each then only stores the softmax state (m, l, o)
// of its blocks in the buffer PARTIALS, and attention_merge computes the output.
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
      (d.quantised_kv ? attend<T, int8_t> : attend<T, T>)(call, first, lower_of(rows - first, step), head);
  }
}

// Computes the final attention output if several work items have divided the KV blocks (ranges of tokens) of
// the same rows. The last of the items to finish, call.item, calls this. It merges the softmax states that
// all the items have stored in PARTIALS, in ascending order of the blocks.
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
        int block = first_visible(d.span(call.layer), s.positions[row]) / d.kv_block;
        const float* partial = call.at<float>(Buffer::PARTIALS) +
                               ((partial_index(s, item, r, head) + block) * d.group_size() + g) * stride;
        float m = partial[0], l = partial[1];
        memcpy(o, partial + 2, d.head_dim * sizeof(float));
        while (visible_tokens(d, s.positions[row], ++block) > 0) {
          partial += int64_t{d.group_size()} * stride;
          merge_block(m, l, o, partial[0], partial[1], partial + 2, d.head_dim);
        }
        merge_sink(call, heads.first + g, m, l, o);
        divide(out + g * d.head_dim, o, l, d.head_dim);
      }
      store_output(call, row, heads, out);
    }
  }
}

}  // namespace mk::MK_SIMD
