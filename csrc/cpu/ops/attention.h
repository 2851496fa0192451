// Attention of one work item: rows of one sequence, some KV heads, some KV blocks.
//
// For each query row and head, each absolute KV block gives a fresh (m, l, o): m = max score, l = sum e^(s -
// m), o = sum e^(s - m) v; blocks merge in ascending order. K and V of a block serve up to kQueryRows (row,
// head) pairs: few read the cache itself, many a copy that is widened to float32 once. Everything a pair does
// depends on its own position alone: scores add over elements in order, l over lanes in a fixed tree, o over
// tokens in order up to its own position.
#pragma once
#include <math.h>

#include <type_traits>

#include "store.h"

namespace mk::MK_SIMD {

#if MK_LANES == 4 && !defined(__aarch64__)
constexpr int kDenseRows = 4, kDenseVectors = 2;
#elif MK_LANES == 16
constexpr int kDenseRows = 6, kDenseVectors = 4;
#else
constexpr int kDenseRows = 6, kDenseVectors = 2;
#endif
constexpr int kDirectPairs = 2 * kDenseRows;  // more of them gain from a widened copy

inline int padded_head(const Dims& d) { return (d.head_dim + kPanel - 1) / kPanel * kPanel; }

// A column of vectors, those of successive rows `stride` apart, `now` the first one's address. What lies at
// the same distances from `next` is needed soon, and fetched meanwhile.
template <class T>
struct Strip {
  const T *now, *next;

  Strip right(int columns) const { return {now + columns, next + columns}; }
  Strip down(int rows, int64_t stride) const { return {now + rows * stride, next + rows * stride}; }
  MK_INLINE void fetch(int t, int64_t stride) const { __builtin_prefetch(next + t * stride); }
  MK_INLINE F32 row(int t, int64_t stride, int n, F32) const { return load(now + t * stride, n); }
};

// One in a cache already, of memory that has room for whole vectors and that nobody else writes.
struct NearStrip {
  const float* now;

  NearStrip right(int columns) const { return {now + columns}; }
  NearStrip down(int rows, int64_t stride) const { return {now + rows * stride}; }
  MK_INLINE void fetch(int, int64_t) const {}
  MK_INLINE F32 row(int t, int64_t stride, int, F32) const { return load(now + t * stride); }
};

// Of quantised keys: rows are elements, columns tokens of a page. Blocks of elements lie one after the other,
// each behind the scales of its tokens; `scale` gives those of the block that begins with row t. Products of
// a value and its scale are exact.
struct KeyStrip {
  const int8_t *now, *scales, *next;

  KeyStrip down(int rows, int64_t stride) const {
    const int64_t bytes = at(rows, stride);
    return {now + bytes, scales + bytes, next + bytes};
  }
  MK_INLINE int64_t at(int t, int64_t stride) const { return (t + t / kKvUnit * kKvScale) * stride; }
  MK_INLINE void fetch(int t, int64_t stride) const { __builtin_prefetch(next + at(t, stride)); }
  MK_INLINE F32 scale(int t, int64_t stride, int n) const {
    return load_half(reinterpret_cast<const uint16_t*>(scales + at(t, stride)), n);
  }
  MK_INLINE F32 row(int t, int64_t stride, int n, F32 scale) const {
    return load(now + at(t, stride), n) * scale;
  }
};

// Of quantised values: rows are tokens of a page, columns elements of one block of `width`.
struct ValueStrip {
  const int8_t *now, *next;
  const float* scales;
  int64_t width;

  ValueStrip down(int rows, int64_t) const {
    return {now + rows * width, next + rows * width, scales + rows, width};
  }
  MK_INLINE void fetch(int t, int64_t) const { __builtin_prefetch(next + t * width); }
  MK_INLINE F32 row(int t, int64_t, int n, F32) const { return load(now + t * width, n) * scales[t]; }
};

// The quantised values of a page's tokens from `token` on, whose scales are widened: [block][token].
struct ValuePage {
  const Dims& d;
  const int8_t *now, *next;
  const float* scales;
  int token;

  ValueStrip right(int columns) const {
    const int block = columns / kKvUnit, width = lower_of(d.head_dim - block * kKvUnit, kKvUnit);
    const int64_t at =
        int64_t{block} * kv_block_bytes(d) + kKvScale * d.kv_page + token * width + columns % kKvUnit;
    return {now + at, next + at, scales + block * d.kv_page + token, width};
  }
};

// C[R][V vectors] (+)= A B for k rows of B; of the last vector only `last` lanes are B's.
template <int R, int V, class S>
void dense_block(const float* a, int64_t lda, const S* b, int64_t ldb, int last, int k, float* c, int64_t ldc,
                 bool resume) {
  F32 acc[R][V];
  MK_UNROLL for (int i = 0; i < R; ++i) {
    MK_UNROLL for (int v = 0; v < V; ++v) acc[i][v] = resume ? load(c + i * ldc + v * kLanes) : F32{};
  }
  F32 scale[V] = {};
  for (int t = 0; t < k; ++t) {
    if constexpr (std::is_same_v<S, KeyStrip>) {
      if (t % kKvUnit == 0) {
        MK_UNROLL for (int v = 0; v < V; ++v) scale[v] = b[v].scale(t, ldb, v + 1 < V ? kLanes : last);
      }
    }
    F32 row[V];
    MK_UNROLL for (int v = 0; v < V; ++v) {
      b[v].fetch(t, ldb);
      row[v] = b[v].row(t, ldb, v + 1 < V ? kLanes : last, scale[v]);
    }
    MK_UNROLL for (int i = 0; i < R; ++i) {
      const F32 x = splat(a[i * lda + t]);
      MK_UNROLL for (int v = 0; v < V; ++v) acc[i][v] += x * row[v];
    }
  }
  MK_UNROLL for (int i = 0; i < R; ++i) {
    MK_UNROLL for (int v = 0; v < V; ++v) store(c + i * ldc + v * kLanes, acc[i][v]);
  }
}

template <int V, int R = kDenseRows, class S>
inline void dense_rows(int rows, const float* a, int64_t lda, const S* b, int64_t ldb, int last, int k,
                       float* c, int64_t ldc, bool resume) {
  for (; rows >= R; rows -= R, a += R * lda, c += R * ldc)
    dense_block<R, V>(a, lda, b, ldb, last, k, c, ldc, resume);
  if constexpr (R > 1) dense_rows<V, R - 1>(rows, a, lda, b, ldb, last, k, c, ldc, resume);
}

// C (+)= A B for any number of rows and columns; an output's bits do not depend on either. b(col) is the
// Strip of B's columns [col, col + kLanes), whose rows are ldb apart. C has room for whole vectors.
template <int V = kDenseVectors, class B>
inline void dense(int rows, int cols, const float* a, int64_t lda, const B& b, int64_t ldb, int k, float* c,
                  int64_t ldc, bool resume, int col = 0) {
  // Rows of V vectors that fit half of a first-level cache, for all rows of A to use them in turn.
  constexpr int kDepth = 64;
  static_assert(kDepth % kKvUnit == 0);
  for (; cols - col > (V - 1) * kLanes; col += V * kLanes) {
    decltype(b(0)) strips[V];
    for (int v = 0; v < V; ++v) strips[v] = b(col + v * kLanes);
    const int last = cols - col < V * kLanes ? cols - col - (V - 1) * kLanes : kLanes;
    for (int t = 0; t < k; t += kDepth) {
      dense_rows<V>(rows, a + t, lda, strips, ldb, last, k - t < kDepth ? k - t : kDepth, c + col, ldc,
                    resume || t > 0);
      for (auto& strip : strips) strip = strip.down(kDepth, ldb);
    }
  }
  if constexpr (V > 1) dense<V / 2>(rows, cols, a, lda, b, ldb, k, c, ldc, resume, col);
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

// A row of the output over some query heads, where the O projection reads it.
template <class T>
inline void store_output(const Call& call, int row, QueryHeads heads, const T* values) {
  const Dims& d = *call.dims;
  store_to(call, call.phase->output, d.replicated_o ? residual_ranks(d, row) : own_rank(d),
           int64_t{row} * d.o_cols() + d.o_first() + heads.first * d.head_dim, values,
           heads.count() * d.head_dim);
}

// Keys and values of one KV head in type T, where int8_t is Q8_0. Keys of tokens in one run lie side by side,
// an element key_stride after the one before; values are rows.
template <class T>
struct Cache {
  static constexpr bool kQuantised = std::is_same_v<T, int8_t>;
  const Dims& d;
  const T *keys, *values;
  const int32_t* pages;  // of the sequence
  int head, head_end;    // this one of those that follow each other
  int first, end;        // tokens that are read of each head
  float* scales;         // room for those of a page's values

  int run() const { return d.kv_page; }
  int64_t key_stride() const { return d.kv_page; }
  int64_t value_stride() const { return d.head_dim; }
  auto key(int token) const {
    const Strip<T> strip = this->strip(
        token, [&](int h, int t) { return keys + k_index(d, pages[t / d.kv_page], h, 0) + t % d.kv_page; });
    const int column = token % d.kv_page, behind = kKvScale * d.kv_page;  // behind the scales
    if constexpr (kQuantised)
      return KeyStrip{strip.now + behind, strip.now + (kKvScale - 1) * column, strip.next + behind};
    else
      return strip;
  }
  auto value(int token) const {
    const int row = kQuantised ? 0 : token % d.kv_page;
    const Strip<T> strip =
        this->strip(token, [&](int h, int t) { return values + v_index(d, pages[t / d.kv_page], h, row); });
    if constexpr (kQuantised) {
      const int8_t* block = strip.now;
      const int tokens = lower_of(d.kv_page, end - (token - token % d.kv_page));
      for (int at = 0; at * kKvUnit < d.head_dim * d.kv_page; at += d.kv_page, block += kv_block_bytes(d)) {
        for (int t = 0; t < tokens; t += kLanes)
          store(scales + at + t, load_half(reinterpret_cast<const uint16_t*>(block) + t, tokens - t));
      }
      return ValuePage{d, strip.now, strip.next, scales, token % d.kv_page};
    } else {
      return strip;
    }
  }

  // Needed soon: the same token of the next block, or else of the next head's first block.
  template <class At>
  Strip<T> strip(int token, const At& at) const {
    const T* now = at(head, token);
    if (token + d.kv_block < end) return {now, at(head, token + d.kv_block)};
    return {now, head + 1 < head_end ? at(head + 1, first + token % d.kv_block) : now};
  }
};

// A copy in float32 of a KV block's tokens [0, tokens).
struct Widened {
  const Dims& d;
  const Scratch& scratch;

  int run() const { return d.kv_block; }
  int64_t key_stride() const { return mk::key_stride(d); }
  int64_t value_stride() const { return padded_head(d); }
  NearStrip key(int token) const { return {scratch.keys + token % d.kv_block}; }
  NearStrip value(int token) const { return {scratch.values + token % d.kv_block * value_stride()}; }

  // Of keys beyond the last token, which others may be storing meanwhile, nothing is read.
  template <class T>
  Widened(const Cache<T>& cache, const Scratch& to, int block, int tokens) : d(cache.d), scratch(to) {
    const int start = block * d.kv_block, n = d.head_dim;
    const int64_t from = cache.key_stride(), key_to = key_stride(), value_to = value_stride();
    for (int begin = 0; begin < tokens; begin += d.kv_page) {
      const int rows = tokens - begin < d.kv_page ? tokens - begin : d.kv_page;
      for (int t = 0; t < rows; t += kLanes) {
        const auto column = cache.key(start + begin + t);
        F32 scale{};
        float* out = scratch.keys + begin + t;
        for (int e = 0; e < n; ++e, out += key_to) {
          if constexpr (Cache<T>::kQuantised) {
            if (e % kKvUnit == 0) scale = column.scale(e, from, rows - t);
          }
          store(out, column.row(e, from, rows - t, scale));
        }
      }
      const auto row = cache.value(start + begin);
      float* out = scratch.values + begin * value_to;
      for (int t = 0; t < rows; ++t, out += value_to) {
        for (int e = 0; e < n; e += kLanes)
          store(out + e, row.right(e).row(t, cache.value_stride(), n - e, F32{}));
      }
    }
  }
};

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

// out (+)= probabilities of tokens [begin, end) times their values, in order.
template <class Kv>
inline void add_values(const Dims& d, const Kv& kv, int begin, int end, int pairs, const float* probabilities,
                       float* out, bool resume) {
  for (int token = begin, n; token < end; token += n, probabilities += n, resume = true) {
    n = kv.run() - token % kv.run() < end - token ? kv.run() - token % kv.run() : end - token;
    const auto row = kv.value(token);
    dense(
        pairs, d.head_dim, probabilities, d.kv_block, [&](int element) { return row.right(element); },
        kv.value_stride(), n, out, padded_head(d), resume);
  }
}

// (m, l, o) of one KV block for rows at ascending `positions`, `group` pairs each, which all see some of it.
template <class Kv>
inline void attend_block(const Dims& d, const Kv& kv, int block, const int32_t* positions, int rows,
                         int group, const float* queries, float* scores, float* m, float* l, float* out) {
  const float scale = 1.0f / sqrtf(static_cast<float>(d.head_dim));
  const int start = block * d.kv_block, tokens = visible_tokens(d, positions[rows - 1], block);
  dense(
      rows * group, tokens, queries, d.head_dim, [&](int token) { return kv.key(start + token); },
      kv.key_stride(), d.head_dim, scores, d.kv_block, false);
  for (int j = 0; j < rows * group; ++j)
    softmax_row(scores + int64_t{j} * d.kv_block, visible_tokens(d, positions[j / group], block), scale, m[j],
                l[j]);
  // All rows together up to the first row's end, then each to its own: positions ascend by one.
  const int common = start + visible_tokens(d, positions[0], block);
  add_values(d, kv, start, common, rows * group, scores, out, false);
  for (int i = 1; i < rows; ++i) {
    add_values(d, kv, common, start + visible_tokens(d, positions[i], block), group,
               scores + int64_t{i} * group * d.kv_block + common - start,
               out + int64_t{i} * group * padded_head(d), true);
  }
}

// The rows [first, first + rows) of the item and one KV head, of a cache in type C.
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

  for (int i = 0; i < rows; ++i) {
    const T* q = call.inputs<T>() + int64_t{row + i} * d.q_cols() + heads.first * d.head_dim;
    float* out = scratch.queries + int64_t{i} * group * d.head_dim;
    const int n = group * d.head_dim;
    for (int e = 0; e < n; e += kLanes) store(out + e, load(q + e, n - e), n - e);
  }
  const int begin = s.item_block[item], end = begin + s.item_blocks[item];
  const Cache<C> cache{d,
                       call.at<C>(Buffer::K_CACHE),
                       call.at<C>(Buffer::V_CACHE),
                       s.block_tables + int64_t{s.item_seq[item]} * d.pages_per_seq(),
                       head,
                       s.item_kv_head[item] + s.item_kv_heads[item],
                       begin * d.kv_block,
                       positions[rows - 1] < end * d.kv_block ? positions[rows - 1] + 1 : end * d.kv_block,
                       scratch.scales};
  for (int block = begin; block < end; ++block) {
    if (call.aborted()) return;
    const int tokens = visible_tokens(d, positions[rows - 1], block);
    if (tokens == 0) break;
    int skip = 0;  // rows that end before this block
    while (visible_tokens(d, positions[skip], block) == 0) ++skip;
    const int from = skip * group;
    const auto attend_from = [&](const auto& kv) {
      attend_block(d, kv, block, positions + skip, rows - skip, group, scratch.queries + from * d.head_dim,
                   scratch.scores, block_m + from, block_l + from, scratch.block_out + from * padded);
    };
    if (pairs - from > kDirectPairs)
      attend_from(Widened(cache, scratch, block, tokens));
    else
      attend_from(cache);
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
      (d.quantised_kv ? attend<T, int8_t> : attend<T, T>)(call, first, lower_of(rows - first, step), head);
  }
}

// After the last item of call.item's split: PARTIALS of all its blocks, ascending, to the output.
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
