// Attention of one work item: query rows of one sequence, for some KV heads and some KV blocks.
//
// KV blocks start at multiples of kv_block tokens, wherever an item starts. For each (query row, head) pair,
// each block is computed on its own. Its result is (m, l, o): m is the maximum score, l = sum e^(s - m), and
// o = sum e^(s - m) v, over the scores s and values v of the block. The results of a pair's blocks are then
// merged in ascending order. Up to kQueryRows pairs share one pass over the K and V of a block. If there are
// at most kDirectPairs pairs, they read the KV cache directly. If there are more, they read a copy of the
// block that is converted to float32 only once.
//
// The bits of a pair's result do not depend on the other pairs that are computed with it, because every sum
// has a fixed order. A score adds the elements of the head in order, l adds the vector lanes in a fixed tree,
// and o adds the tokens in order up to the pair's position.
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
// The maximum number of (row, head) pairs that read the KV cache directly. With more pairs, a float32 copy is
// faster.
constexpr int kDirectPairs = 2 * kDenseRows;

inline int padded_head(const Dims& d) { return (d.head_dim + kPanel - 1) / kPanel * kPanel; }

// A column of SIMD vectors within a matrix, one vector per row. `now` is the address of the first vector, and
// each further row is `stride` elements later. `next` is the address of a column that will be read soon;
// `fetch` prefetches one of its vectors.
template <class T>
struct Strip {
  const T *now, *next;

  Strip right(int columns) const { return {now + columns, next + columns}; }
  Strip down(int rows, int64_t stride) const { return {now + rows * stride, next + rows * stride}; }
  MK_INLINE void fetch(int t, int64_t stride) const { __builtin_prefetch(next + t * stride); }
  MK_INLINE F32 row(int t, int64_t stride, int n, F32) const { return load(now + t * stride, n); }
};

// Like Strip, a column of SIMD vectors, but it needs no prefetch because it is in the CPU's cache already.
// `row` may always load a full vector: the rows are padded to full vectors, and no other thread writes them.
struct NearStrip {
  const float* now;

  NearStrip right(int columns) const { return {now + columns}; }
  NearStrip down(int rows, int64_t stride) const { return {now + rows * stride}; }
  MK_INLINE void fetch(int, int64_t) const {}
  MK_INLINE F32 row(int t, int64_t stride, int, F32) const { return load(now + t * stride); }
};

// A column of SIMD vectors of quantised keys. Each row of the matrix is an element of the head, and each
// column is a token of a KV page. In each column, groups of kKvUnit rows share a float16 scale. In memory,
// the scales of a group, one per token, precede the values of the group. `scale` loads the scales of the
// group that begins at row t. A product of value and scale is exact in float32.
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

// A column of SIMD vectors of quantised values. Each row of the matrix is a token of a KV page, and each
// column is an element of a quantisation block of `width` elements. `scales` points to one float32 scale per
// token.
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

// The quantised values of a KV page, from the page's token number `token` on. `scales` points to that token's
// scale in the array [quantisation block][token of the KV block] of float32 scales.
struct ValuePage {
  const Dims& d;
  const int8_t *now, *next;
  const float* scales;
  int token;

  ValueStrip right(int columns) const {
    const int block = columns / kKvUnit, width = lower_of(d.head_dim - block * kKvUnit, kKvUnit);
    const int64_t at =
        int64_t{block} * kv_block_bytes(d) + kKvScale * d.kv_page + token * width + columns % kKvUnit;
    return {now + at, next + at, scales + block * d.kv_block, width};
  }
};

// Presents the keys of a KV block, [element of the head][token], as the matrix B of `dense`.
template <class Kv>
struct Keys {
  const Kv& kv;

  auto at(int row, int column) const { return kv.key(column).down(row, stride()); }
  int64_t stride() const { return kv.key_stride(); }
  int run_end(int, int end) const { return end; }
};

// Presents the values of a KV block, [token][element of the head], from token `first` on, as the matrix B of
// `dense`.
template <class Kv>
struct TokenValues {
  const Kv& kv;
  int first;

  auto at(int row, int column) const { return kv.value(first + row).right(column); }
  int64_t stride() const { return kv.value_stride(); }
  int run_end(int row, int end) const {
    const int token = first + row;
    return lower_of(end, row + kv.run() - token % kv.run());
  }
};

// Computes C = A B, or C += A B with `resume`, for R rows and V SIMD vectors of columns of C. The columns are
// those of B from `column` on; only the first `last` lanes of the last vector are columns of B. The products
// use the columns [k, end) of A, and so the same rows of B.
//
// B gives one strip for each vector of columns. A strip reaches only to the end of a run, a range of rows of
// B that lie evenly in memory, for example the tokens of a KV page. The next run needs other strips.
template <int R, int V, class B>
void dense_block(const float* a, int64_t lda, const B& b, int column, int last, int k, int end, float* c,
                 int64_t ldc, bool resume) {
  using BStrip = decltype(b.at(0, 0));
  F32 acc[R][V];
  MK_UNROLL for (int i = 0; i < R; ++i) {
    MK_UNROLL for (int v = 0; v < V; ++v) acc[i][v] = resume ? load(c + i * ldc + v * kLanes) : F32{};
  }
  const int64_t ldb = b.stride();
  while (k < end) {
    BStrip strips[V];
    MK_UNROLL for (int v = 0; v < V; ++v) strips[v] = b.at(k, column + v * kLanes);
    F32 scale[V] = {};
    const int run_end = b.run_end(k, end);
    for (int row = 0; k < run_end; ++row, ++k) {  // `row` counts from the beginning of the strips
      if constexpr (std::is_same_v<BStrip, KeyStrip>) {
        if (row % kKvUnit == 0) {  // a group of quantised keys begins
          MK_UNROLL for (int v = 0; v < V; ++v) scale[v] =
              strips[v].scale(row, ldb, v + 1 < V ? kLanes : last);
        }
      }
      F32 values[V];
      MK_UNROLL for (int v = 0; v < V; ++v) {
        strips[v].fetch(row, ldb);
        values[v] = strips[v].row(row, ldb, v + 1 < V ? kLanes : last, scale[v]);
      }
      MK_UNROLL for (int i = 0; i < R; ++i) {
        const F32 x = splat(a[i * lda + k]);
        MK_UNROLL for (int v = 0; v < V; ++v) acc[i][v] += x * values[v];
      }
    }
  }
  MK_UNROLL for (int i = 0; i < R; ++i) {
    MK_UNROLL for (int v = 0; v < V; ++v) store(c + i * ldc + v * kLanes, acc[i][v]);
  }
}

template <int V, int R = kDenseRows, class B>
inline void dense_rows(int rows, const float* a, int64_t lda, const B& b, int column, int last, int t,
                       int end, float* c, int64_t ldc, bool resume) {
  for (; rows >= R; rows -= R, a += R * lda, c += R * ldc)
    dense_block<R, V>(a, lda, b, column, last, t, end, c, ldc, resume);
  if constexpr (R > 1) dense_rows<V, R - 1>(rows, a, lda, b, column, last, t, end, c, ldc, resume);
}

// Computes C = A B for any number of rows and columns. With `resume`, adds the products to C instead. The
// number of rows and columns does not change the bits of an output. The rows of C must be padded to full SIMD
// vectors.
template <int V = kDenseVectors, class B>
inline void dense(int rows, int cols, const float* a, int64_t lda, const B& b, int k, float* c, int64_t ldc,
                  bool resume, int column = 0) {
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

inline float exp_scalar(float x) { return exp(splat(x))[0]; }

// Merges the softmax state (m, l, o) of one KV block into that of the blocks before it. The function is not
// inlined, because attention must run the same machine instructions, and so produce the same bits, whether or
// not its KV blocks are divided among several items.
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

// Adds a head's sink, if the phase has sinks, to its softmax state. A sink is a score without a value, so it
// is merged as one more KV block, whose o is zero.
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

// The keys and values of one KV head in a sequence's KV pages. T is their type; int8_t means Q8_0.
template <class T>
struct Cache {
  const Dims& d;
  const T *keys, *values;  // addresses in page 0
  int64_t page, head;      // elements from one page to the next, and from one KV head to the next
  const int32_t* pages;    // the sequence's page numbers
  int end;                 // the position after the last token that is read

  // The numbers of the pages that the next KV head reads first and that can be prefetched. Null for the last
  // head.
  const int32_t* after;
  float* scales;  // buffer for the scales of a KV block's values

  // Presents the keys and values of the KV head `kv_head`. The work item covers several consecutive KV heads,
  // of which the last is head_end - 1, and reads tokens [first, last) of each. `table` has the page numbers
  // of the sequence. `room` is a buffer for scales.
  Cache(const Call& call, const int32_t* table, int kv_head, int head_end, int first, int last, float* room)
      : d(*call.dims),
        keys(call.at<T>(Buffer::K_CACHE) + k_index(d, 0, kv_head, 0)),
        values(call.at<T>(Buffer::V_CACHE) + v_index(d, 0, kv_head, 0)),
        page(k_index(d, 1, 0, 0)),
        head(k_index(d, 0, 1, 0)),
        pages(table),
        end(last),
        after(kv_head + 1 < head_end ? table + first / d.kv_page : nullptr),
        scales(room) {}
};

// Reads one KV block directly from the KV cache. `run` is the number of tokens that lie together in memory:
// those of a KV page. In a page, keys are stored as [element of the head][token], with a stride of
// `key_stride`, and values as [token][element].
template <class T>
class CachedBlock {
  static constexpr bool kQuantised = std::is_same_v<T, int8_t>;

 public:
  CachedBlock(const Cache<T>& cache, int block, int tokens)
      : cache_(cache), d_(cache.d), first_(block * d_.kv_block), pages_(cache.pages + first_ / d_.kv_page) {
    if constexpr (kQuantised) {
      for (int begin = 0; begin < tokens; begin += d_.kv_page) {
        const int8_t* scales = cache.values + pages_[begin / d_.kv_page] * cache.page;
        const int n = lower_of(d_.kv_page, tokens - begin);
        for (int at = begin; at < ceil_div(d_.head_dim, kKvUnit) * d_.kv_block; at += d_.kv_block) {
          for (int t = 0; t < n; t += kLanes)
            store(cache.scales + at + t, load_half(reinterpret_cast<const uint16_t*>(scales) + t, n - t));
          scales += kv_block_bytes(d_);
        }
      }
    }
  }

  int run() const { return d_.kv_page; }
  int64_t key_stride() const { return d_.kv_page; }
  int64_t value_stride() const { return d_.head_dim; }
  auto key(int token) const {
    const int page = token / d_.kv_page, column = token - page * d_.kv_page;
    const Strip<T> strip = this->strip(cache_.keys, page);
    const int behind = kKvScale * d_.kv_page;  // the keys follow the scales, which have this many bytes
    if constexpr (kQuantised)
      return KeyStrip{strip.now + behind + column, strip.now + kKvScale * column,
                      strip.next + behind + column};
    else
      return strip.right(column);
  }
  auto value(int token) const {
    const int page = token / d_.kv_page, row = token - page * d_.kv_page;
    const Strip<T> strip = this->strip(cache_.values, page);
    if constexpr (kQuantised)
      return ValuePage{d_, strip.now, strip.next, cache_.scales + token, row};
    else
      return strip.down(row, d_.head_dim);
  }

 private:
  // Returns the addresses of page i of this KV block and of the page to prefetch. The latter is page i of the
  // next block or, after the last block, page i of the next KV head's first block.
  Strip<T> strip(const T* page_0, int i) const {
    const T* now = page_0 + pages_[i] * cache_.page;
    const int later = i * d_.kv_page + d_.kv_block;
    if (first_ + later < cache_.end) return {now, page_0 + pages_[later / d_.kv_page] * cache_.page};
    return {now, cache_.after ? page_0 + cache_.head + cache_.after[i] * cache_.page : now};
  }

  const Cache<T>& cache_;
  const Dims& d_;
  const int first_;             // the position of the block's first token
  const int32_t* const pages_;  // the block's page numbers
};

// A float32 copy of the keys and values of tokens [first, tokens) of a KV block, in scratch memory.
struct Widened {
  const Dims& d;
  const Scratch& scratch;

  int run() const { return d.kv_block; }
  int64_t key_stride() const { return mk::key_stride(d); }
  int64_t value_stride() const { return padded_head(d); }
  NearStrip key(int token) const { return {scratch.keys + token}; }
  NearStrip value(int token) const { return {scratch.values + token * value_stride()}; }

  // Copies the tokens from the page of token `first` on. Does not read keys after token `tokens`, because
  // other threads may be storing them.
  template <class T>
  Widened(const Dims& dims, const CachedBlock<T>& from, const Scratch& to, int first, int tokens)
      : d(dims), scratch(to) {
    const int n = d.head_dim;
    for (int begin = first / d.kv_page * d.kv_page; begin < tokens; begin += d.kv_page) {
      const int rows = lower_of(tokens - begin, d.kv_page);
      for (int t = 0; t < rows; t += kLanes) {
        const auto column = from.key(begin + t);
        F32 scale{};
        float* out = scratch.keys + begin + t;
        for (int e = 0; e < n; ++e, out += key_stride()) {
          if constexpr (std::is_same_v<T, int8_t>) {
            if (e % kKvUnit == 0) scale = column.scale(e, from.key_stride(), rows - t);
          }
          store(out, column.row(e, from.key_stride(), rows - t, scale));
        }
      }
      const auto row = from.value(begin);
      float* out = scratch.values + begin * value_stride();
      for (int t = 0; t < rows; ++t, out += value_stride()) {
        for (int e = 0; e < n; e += kLanes)
          store(out + e, row.right(e).row(t, from.value_stride(), n - e, F32{}));
      }
    }
  }
};

// Turns the scores of one (row, head) pair into unnormalised softmax weights: each score, multiplied by
// `scale`, is a value s, which becomes e^(s - m). Also computes the maximum m of the values s, and the sum l
// of the weights. There are `tokens` scores; the rest of the last SIMD vector becomes zero.
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

// Returns the first token of a KV block that the query at `position` sees, in a layer with the given span.
inline int first_token(const Dims& d, int span, int position, int block) {
  return higher_of(position + 1 - span - block * d.kv_block, 0);
}

// Computes the softmax state (m, l, o) of one KV block for query rows at ascending `positions`. Each row has
// `group` query heads and attends to the last `span` tokens up to its own, at least one of them in the block.
template <class Kv>
inline void attend_block(const Dims& d, const Kv& kv, int block, const int32_t* positions, int rows,
                         int group, int span, const float* queries, float* scores, float* m, float* l,
                         float* out) {
  const float scale = 1.0f / sqrtf(static_cast<float>(d.head_dim));
  const int tokens = visible_tokens(d, positions[rows - 1], block), padded = padded_head(d);
  // No row sees the tokens before `oldest`. Scores are computed from the beginning of its SIMD vector on, and
  // those that a row does not see get the weight 0.
  const int oldest = first_token(d, span, positions[0], block), begin = oldest / kLanes * kLanes;
  dense(rows * group, tokens, queries, d.head_dim, Keys<Kv>{kv}, d.head_dim, scores, d.kv_block, false,
        begin);
  for (int j = 0; j < rows * group; ++j) {
    float* own = scores + int64_t{j} * d.kv_block;
    const int first = first_token(d, span, positions[j / group], block);
    for (int t = begin; t < first; ++t) own[t] = -INFINITY;
    softmax_row(own + begin, visible_tokens(d, positions[j / group], block) - begin, scale, m[j], l[j]);
  }
  // The values of the tokens that all rows attend to are multiplied for all rows together. Then each row's
  // remaining tokens are multiplied, row by row. They are few, because the rows have consecutive positions.
  const int common = visible_tokens(d, positions[0], block);
  dense(rows * group, d.head_dim, scores + oldest, d.kv_block, TokenValues<Kv>{kv, oldest}, common - oldest,
        out, padded, false);
  for (int i = 1; i < rows; ++i) {
    const int64_t first = int64_t{i} * group;
    dense(group, d.head_dim, scores + first * d.kv_block + common, d.kv_block, TokenValues<Kv>{kv, common},
          visible_tokens(d, positions[i], block) - common, out + first * padded, padded, true);
  }
}

// Computes attention for the item's query rows [first, first + rows) and one of its KV heads. C is the type
// of the KV cache.
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
    const auto attend_from = [&](const auto& kv) {
      attend_block(d, kv, block, positions + skip, stop - skip, group, span,
                   scratch.queries + from * d.head_dim, scratch.scores, block_m + from, block_l + from,
                   scratch.block_out + from * padded);
    };
    const int tokens = visible_tokens(d, positions[stop - 1], block);
    const CachedBlock<C> cached(cache, block, tokens);
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

// Computes the output of one work item, call.item. If several items divide the KV blocks of its rows, stores
// the softmax state (m, l, o) of each block in PARTIALS instead, and attention_merge computes the output.
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

// Computes the output of rows whose KV blocks were divided among several items, of which call.item is the
// last to run. Merges the softmax states of all blocks, which the items have stored in PARTIALS, in ascending
// order of the blocks.
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
