// Presents the keys and values of a KV head as matrices to attention. They lie in the KV cache or in a
// float32 copy.
#pragma once
#include <type_traits>

#include "../../common/index.h"
#include "../simd/integers.h"
#include "../simd/kernels.h"

namespace mk::MK_SIMD {

inline int padded_head(const Dims& d) { return (d.head_dim + kPanel - 1) / kPanel * kPanel; }

// A strip is a column of a matrix, as wide as one SIMD vector. `now` is the address of its first row;
// rows are `stride` elements apart. right() and down() return the strip that begins further right or
// further down. `next` is the address of data that is needed soon; `fetch` prefetches one row of it.
template <class T>
struct Strip {
  const T *now, *next;

  Strip right(int columns) const { return {now + columns, next + columns}; }
  Strip down(int rows, int64_t stride) const { return {now + rows * stride, next + rows * stride}; }
  MK_INLINE void fetch(int t, int64_t stride) const { __builtin_prefetch(next + t * stride); }
  MK_INLINE F32 row(int t, int64_t stride, int n) const { return load(now + t * stride, n); }
};

// Like Strip, but for data that is in the CPU's cache already, so it prefetches nothing. `row` may always
// load a full vector, because the rows are padded to full vectors and no other thread writes to them.
struct NearStrip {
  const float* now;

  NearStrip right(int columns) const { return {now + columns}; }
  NearStrip down(int rows, int64_t stride) const { return {now + rows * stride}; }
  MK_INLINE void fetch(int, int64_t) const {}
  MK_INLINE F32 row(int t, int64_t stride, int) const { return load(now + t * stride); }
};

// Quantised keys of kLanes tokens in one KV page; the first is the page's token number `token`. Each unit of
// kKvUnit elements has one float16 scale per token. In memory, a unit consists of the scales of all tokens,
// followed by the values as [word of four elements][token].
struct KeyWords {
  const Dims& d;
  const int8_t *now, *next;  // the head's part of the page, and of a page that will be read soon
  int token;

  // Loads the scales of the first n tokens for one unit (kKvUnit elements of the head).
  MK_INLINE F32 scale(int unit, int n) const {
    return load_half(reinterpret_cast<const uint16_t*>(now + unit * kv_block_bytes(d)) + token, n);
  }
  // Loads word j (four elements) of a unit, for the first n tokens.
  MK_INLINE U32 words(int unit, int j, int n) const {
    const int64_t at = int64_t{unit} * kv_block_bytes(d) + (kKvScale + 4 * j) * d.kv_page + 4 * token;
    __builtin_prefetch(next + at);
    const uint32_t* const from = reinterpret_cast<const uint32_t*>(now + at);
    return load_words(n >= kLanes ? from : part(from, n).lanes);
  }
};

// Reads the quantised values (V) of one quantisation block, token by token, one SIMD vector at a time. Each
// row is a token of a KV page, and has the block's `width` elements. `scales` points to the tokens' float32
// scales, one per token.
struct ValueStrip {
  const int8_t *now, *next;
  const float* scales;
  int64_t width;

  ValueStrip down(int rows, int64_t) const {
    return {now + rows * width, next + rows * width, scales + rows, width};
  }
  MK_INLINE void fetch(int t, int64_t) const { __builtin_prefetch(next + t * width); }
  MK_INLINE F32 row(int t, int64_t, int n) const { return load(now + t * width, n) * scales[t]; }
};

// The quantised values (V) of a KV page, from token number `token` on. In each token's row, kKvUnit elements
// (a unit) share a scale. `scales` points to the float32 scale of that token and unit 0. The scales of the
// next unit follow d.kv_block entries later.
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

// The matrix B that `dense` (attention.h) multiplies. Its rows are read by strips of type S. `find` is
// virtual, so that `dense` is compiled only once for each S. One call of `find` serves many rows.
template <class S>
struct Matrix {
  const int64_t stride;  // between rows, in elements

  explicit Matrix(int64_t rows_apart) : stride(rows_apart) {}
  // Finds one strip for each of `count` successive SIMD vectors; the first one begins in row `row` and
  // column `column`. Returns the row, at most `end`, at which the strips end.
  virtual int find(int row, int column, int end, int count, S* strips) const = 0;
};

// The keys of a KV block (kv_block tokens) as a matrix [element of the head][token].
template <class Kv, class S>
struct Keys final : Matrix<S> {
  const Kv& kv;

  explicit Keys(const Kv& block) : Matrix<S>(block.key_stride()), kv(block) {}
  int find(int row, int column, int end, int count, S* strips) const override {
    for (int v = 0; v < count; ++v) strips[v] = kv.key(column + v * kLanes).down(row, this->stride);
    return end;
  }
};
template <class Kv>
Keys(const Kv& block) -> Keys<Kv, decltype(block.key(0))>;

// The values (V) of a KV block, from its token `first` on, as a matrix [token][element of the head].
template <class Kv, class S>
struct TokenValues final : Matrix<S> {
  const Kv& kv;
  const int first;

  TokenValues(const Kv& block, int token) : Matrix<S>(block.value_stride()), kv(block), first(token) {}
  int find(int row, int column, int end, int count, S* strips) const override {
    const int token = first + row;
    const auto values = kv.value(token);
    for (int v = 0; v < count; ++v) strips[v] = values.right(column + v * kLanes);
    return lower_of(end, row + kv.run() - token % kv.run());
  }
};
template <class Kv>
TokenValues(const Kv& block, int) -> TokenValues<Kv, decltype(block.value(0).right(0))>;

// The keys and values of one KV head in a sequence's KV pages. T is their type; int8_t means Q8_0.
template <class T>
struct Cache {
  const Dims& d;
  const T *keys, *values;  // addresses in page 0
  int64_t page, head;      // elements from one page to the next, and from one KV head to the next
  const int32_t* pages;    // the sequence's page numbers
  int end;                 // the position after the last token that is read
  const int32_t* after;    // numbers of the KV pages to prefetch for the next KV head; null: last head
  float* scales;           // buffer for the scales of a KV block's values

  // `table` lists the sequence's KV pages. `kv_head` is the KV head to read. The caller reads tokens [first,
  // last) of several KV heads in turn, up to head_end - 1, so the data of the next head can be prefetched.
  // `room` is memory for `scales`.
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

// Reads a KV block (kv_block tokens, in one or more KV pages) directly from the KV cache. `run` is the number
// of tokens that are contiguous in memory, those of one page. In a page, keys are stored as [element of the
// head][token], with rows `key_stride` apart, and values as [token][element]. If quantised, each group of
// kKvUnit elements begins with its scales, and keys are [word of four elements][token] (KeyWords).
template <class T>
class CachedBlock {
 public:
  static constexpr bool kQuantised = std::is_same_v<T, int8_t>;

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
    if constexpr (kQuantised)
      return KeyWords{d_, strip.now, strip.next, column};
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
  // Returns two addresses: of KV page i of this KV block, and of the page to prefetch meanwhile. That is
  // page i of the next KV block or, after the last one, of the next KV head's first block.
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

// A float32 copy of the keys and values of tokens [first, tokens) of a KV block, in scratch memory. Quantised
// keys are not copied, because they are multiplied in integers.
struct Widened {
  const Dims& d;
  const Scratch& scratch;

  int run() const { return d.kv_block; }
  int64_t key_stride() const { return mk::key_stride(d); }
  int64_t value_stride() const { return padded_head(d); }
  NearStrip key(int token) const { return {scratch.keys + token}; }
  NearStrip value(int token) const { return {scratch.values + token * value_stride()}; }

  // Copies keys and values, beginning with the page that has token `first`. Reads no key from token
  // `tokens` on, because other threads may be storing it.
  template <class T>
  Widened(const Dims& dims, const CachedBlock<T>& from, const Scratch& to, int first, int tokens)
      : d(dims), scratch(to) {
    const int n = d.head_dim;
    for (int begin = first / d.kv_page * d.kv_page; begin < tokens; begin += d.kv_page) {
      const int rows = lower_of(tokens - begin, d.kv_page);
      if constexpr (!CachedBlock<T>::kQuantised) {
        for (int t = 0; t < rows; t += kLanes) {
          const auto column = from.key(begin + t);
          float* out = scratch.keys + begin + t;
          for (int e = 0; e < n; ++e, out += key_stride())
            store(out, column.row(e, from.key_stride(), rows - t));
        }
      }
      const auto row = from.value(begin);
      float* out = scratch.values + begin * value_stride();
      for (int t = 0; t < rows; ++t, out += value_stride()) {
        for (int e = 0; e < n; e += kLanes) store(out + e, row.right(e).row(t, from.value_stride(), n - e));
      }
    }
  }
};

}  // namespace mk::MK_SIMD
