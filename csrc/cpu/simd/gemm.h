// Computes tiles of C = A W^T from packed weights (packed.h), accumulated in float32.
//
// A row's result has the same bits however many rows are computed together and however the work is divided
// into tiles: each output has one accumulator, and its products are added in ascending order of k, each with
// one fused multiply-add if the processor has this instruction. Quantised weights are either converted to
// float32 first, or multiplied in integers (integers.h).
#pragma once
#include <initializer_list>

#include "formats.h"
#include "integers.h"
#include "rms_norm.h"

namespace mk::MK_SIMD {

// The inner loop of C = A W^T keeps a small block of C in SIMD registers. These constants limit the block's
// size. kMicroRows: the most rows. kAccumulators: the most vectors of results. kWithScales: the most vectors
// of results and scales, if quantised weights are converted in registers. A test disassembles the code to
// check that no register is spilled.
#if MK_LANES == 16
constexpr int kAccumulators = 24, kWithScales = 18, kMicroRows = 12;
#elif MK_LANES == 8
constexpr int kAccumulators = 10, kWithScales = 8, kMicroRows = 5;
#elif defined(__aarch64__)
constexpr int kAccumulators = 24, kWithScales = 24, kMicroRows = 6;
#else
constexpr int kAccumulators = 8, kWithScales = 8, kMicroRows = 2;
#endif
static_assert(kMicroRows <= kMaxMicroRows);
// The maximum number of rows that one pass over a tile's weights multiplies.
constexpr int kPassRows = kTileRows / kMicroRows * kMicroRows;

// Returns log2 of the number of weight panels (kPanel columns each) for which the results of `rows` rows can
// be accumulated in registers together.
template <class W>
constexpr int panel_log2(int rows) {
  constexpr bool kScaled = !kPlain<W> && !std::is_same_v<W, Half>;
  int log2 = rows == 1 && kStreams < 4 ? 1 : 2;
  const int vectors = (kScaled ? rows + 1 : rows) * kPanelVectors;
  while (log2 > 0 && vectors << log2 > (kScaled ? kWithScales : kAccumulators)) --log2;
  return log2;
}
static_assert(1 << panel_log2<float>(1) <= kWidePanels);

// The largest number of rows that are multiplied with weights of type W directly. For more rows, quantised
// and float16 weights are converted to float32 once, into a buffer.
template <class W>
constexpr int kDirectRows = kPlain<W> ? kMicroRows : 1;

// How many indices along K one 32-bit word of the inputs A covers. A word is either one float32 value, or a
// pair of bfloat16 values with the first one in the upper half.
template <class W>
constexpr int kWordSteps = kInPairs<W> ? 2 : 1;

// Returns sum + x * w. If W is multiplied in pairs, each word of x and w has two values, at successive
// indices along K. Their products are added in order.
template <class W>
MK_INLINE F32 add_products(F32 sum, F32 x, F32 w) {
#if MK_LANES == 16
  if constexpr (kInPairs<W>) {
    // The instruction adds the product of the upper halves first and that of the lower halves second. It
    // rounds after each addition.
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
  }
#endif
  return sum + x * w;
}

// The inner loop of a matmul: computes C = A W^T for R rows and P panels (16 rows of W each), over indices
// [begin, begin + steps) along K. `begin` and `steps` are multiples of kUnit. Panel p is
// panels[p * apart]. With `resume`, adds to C instead of replacing C. A is stored in
// pieces of kChunk indices along K: pieces are chunk_stride floats apart, and the rows in a piece are
// kChunkStride floats apart. A range that begins in the middle of a piece must end in the same piece.
template <int R, int P, class W>
void micro(const float* a, int64_t chunk_stride, const Panel* panels, int apart, int begin, int steps,
           float* c, int64_t ldc, bool resume) {
  F32 acc[R][P][kPanelVectors];
  load_block(acc, c, ldc, apart * kPanel, resume);
  const char* data[P];
  MK_UNROLL for (int p = 0; p < P; ++p) data[p] = panels[p * apart].data;
  for (int done = 0; done < steps; a += chunk_stride) {
    const int end = lower_of(done + kChunk, steps);
    for (const float* x = a; done < end; done += kUnit) {
      Reader<W> readers[P];
      MK_UNROLL for (int p = 0; p < P; ++p) readers[p].open(data[p], begin + done);
      for (int run = 0; run < kRuns; ++run, x += kRunSteps / kWordSteps<W>) {
        MK_UNROLL for (int p = 0; p < P; ++p) readers[p].turn_to(run);
        MK_UNROLL for (int s = 0; s < kRunSteps / kWordSteps<W>; ++s) {
          F32 w[P][kPanelVectors];
          MK_UNROLL for (int p = 0; p < P; ++p) {
            MK_UNROLL for (int v = 0; v < kPanelVectors; ++v) w[p][v] = readers[p].weight(s, v);
          }
          MK_UNROLL for (int i = 0; i < R; ++i) {
            const F32 word = splat(x[i * kChunkStride + s]);
            MK_UNROLL for (int p = 0; p < P; ++p) {
              MK_UNROLL for (int v = 0; v < kPanelVectors; ++v) acc[i][p][v] =
                  add_products<W>(acc[i][p][v], word, w[p][v]);
            }
          }
        }
      }
    }
  }
  store_block(acc, c, ldc, apart * kPanel);
}

using Micro = void (*)(const float*, int64_t, const Panel*, int, int, int, float*, int64_t, bool);

// Returns log2 of the fewest panels for which `micro` is compiled, given `rows` rows. With several rows,
// a single panel, which is rare, is passed twice. This saves a quarter of the instances.
template <class W>
constexpr int least_log2(int rows) {
  return rows > 1 && panel_log2<W>(rows) > 0 ? 1 : 0;
}

// A table of the instances of `micro`: entry[rows][log2] is micro<rows, 1 << log2, W>.
template <class W>
struct MicroTable {
  Micro entry[kDirectRows<W> + 1][3] = {};

  template <int R = kDirectRows<W>, int L = 2>
  constexpr void fill() {
    if constexpr (least_log2<W>(R) <= L && L <= panel_log2<W>(R)) entry[R][L] = micro<R, (1 << L), W>;
    if constexpr (R > 1 || L > 0) fill<L ? R : R - 1, L ? L - 1 : 2>();
  }
  constexpr MicroTable() { fill(); }
};

template <class W>
constexpr MicroTable<W> kMicro{};

inline bool same_type(const Panel* panels, int count) {
  for (int i = 1; i < count; ++i)
    if (panels[i].dtype != panels->dtype) return false;
  return true;
}

// The input rows A and the output C of a matmul. `block_rows` rows are computed at a time, with panels
// that are `apart` entries apart in the list of panels. `x` has the rows of A, cut into pieces of kChunk
// indices along K. The rows of the results `c` are `ldc` floats apart.
struct RowBlocks {
  const float* x;
  int64_t chunk_stride;
  float* c;
  int64_t ldc;
  int rows, block_rows, apart;

  template <class W>
  void multiply(const Panel* panels, int log2, int begin, int skip, int steps, bool resume) const {
    const float* block_x = x + skip / kChunk * chunk_stride + skip % kChunk;
    for (int i = 0; i < rows; i += block_rows) {
      const int n = lower_of(rows - i, block_rows), least = least_log2<W>(n);
      kMicro<W>.entry[n][higher_of(log2, least)](block_x + int64_t{i} * kChunkStride, chunk_stride, panels,
                                                 log2 >= least ? apart : 0, begin, steps, c + i * ldc, ldc,
                                                 resume);
    }
  }
};

// Computes c = x W^T for 1 << log2 panels (groups of columns) of one weight type, over [begin, begin +
// steps) along K. With `resume`, adds to c instead. For one row, quantised and float16 weights are
// converted in registers. For more rows, they are converted once, to float32 in the buffer `wide`.
template <class W>
void multiply(const RowBlocks& rows, const Panel* panels, int log2, int begin, int steps, float* wide,
              bool resume) {
  if constexpr (kPlain<W>) return rows.multiply<W>(panels, log2, begin, 0, steps, resume);
  if (rows.rows == 1) return rows.multiply<W>(panels, log2, begin, 0, steps, resume);
  for (int done = 0, part; done < steps; done += part) {
    part = lower_of(steps - done, kWideSteps);
    Panel widened[kWidePanels];
    for (int p = 0; p < 1 << log2; ++p) {
      float* out = wide + p * kWideStride;
      widen<W>(panels[p], begin + done, part, out);
      widened[p].data = reinterpret_cast<const char*>(out);
    }
    rows.multiply<float>(widened, log2, 0, done, part, resume || done > 0);
  }
}

// Lists the rows of a buffer that a matmul reads or writes, for example the rows that use one expert. Row i
// of the matmul is row rows[i] of the buffer or, if `rows` is null, row i.
struct RowList {
  const int32_t* rows = nullptr;
  MK_INLINE int operator[](int i) const { return rows == nullptr ? i : rows[i]; }
};

// Converts rows of a matmul's inputs to the layout that `micro` reads. The inputs have type T, or float32 if
// the matmul applies an RMS norm to them first.
template <class T>
class Inputs {
 public:
  Inputs(const Call& call, RowList list)
      : rows_(call.inputs<char>()),
        list_(list),
        weight_(call.phase->norm == Buffer::kNone ? nullptr : call.at<float>(call.phase->norm)),
        k_(call.phase->inner),
        eps_(call.dims->rms_eps) {}

  // Selects the rows that `unpack` converts: [row, row + count), at most kPassRows.
  void turn_to(int row, int count) {
    first_ = row;
    count_ = count;
    if (weight_ == nullptr) return;
    for (int r = 0; r < count; ++r) scale_[r] = rms_scale(this->row<float>(r), k_, eps_);
  }

  // Prepares inputs for a matmul: converts kChunk elements of each selected row, from index `begin` on, to
  // float32 or (`pairs`) to pairs of bfloat16 values. Rows of `out` are kChunkStride floats apart. If a row
  // ends inside a group of kUnit elements, the group is padded with zeros.
  void unpack(int begin, bool pairs, float* out) const {
    const int n = lower_of(k_ - begin, kChunk);
    for (int r = 0; r < count_; ++r, out += kChunkStride) {
      if (weight_ != nullptr) {
        const float *x = row<float>(r) + begin, *weight = weight_ + begin;
        unpack_row(n, pairs, out, [&](int i, int lanes) {
          return rounded(normalised(x + i, weight + i, scale_[r], lanes), T{});
        });
      } else {
        const T* x = row<T>(r) + begin;
        unpack_row(n, pairs, out, [&](int i, int lanes) { return load(x + i, lanes); });
      }
    }
  }

 private:
  template <class E>
  const E* row(int r) const {
    return reinterpret_cast<const E*>(rows_) + int64_t{list_[first_ + r]} * k_;
  }
  template <class F>
  static MK_INLINE void unpack_row(int n, bool pairs, float* out, const F& vector) {
    for (int i = 0; i < ceil_div(n, kUnit) * kUnit; i += kLanes) {
      const F32 v = i < n ? vector(i, lower_of(n - i, kLanes)) : F32{};
      if (kMayPair<T> && pairs)
        store_pairs(reinterpret_cast<uint32_t*>(out) + i / 2, v);
      else
        store(out + i, v);
    }
  }

  const char* rows_;
  const RowList list_;
  const float* weight_;
  const int k_;
  const float eps_;
  int first_ = 0, count_ = 0;
  float scale_[kPassRows];
};

// Receives the columns [first, first + columns) of one row of a matmul's output, which begin at `t`. The
// function may change them.
using TakeResult = void (*)(const Call& call, int row, int first, int columns, float* t);

// Runs a matmul for one tile of its output, inputs weights^T + bias, and passes the results to the callback
// `take`, one panel after another. `weights` lists the panels of all columns. If there are several matrices,
// such as gate and up, their panels alternate. Each call of `take` then gets the results of one panel of each
// matrix, kPanel floats apart. `from` says which input row each row of the tile reads, and `to` says which
// output row is passed to `take`. `bias` has the biases of one matrix after another, or is null.
template <class T>
void gemm(const Call& call, const Tile& tile, const Panel* weights, const float* bias, TakeResult take,
          RowList from = {}, RowList to = {}) {
  const Phase& phase = *call.phase;
  const int k = phase.inner, whole_units = ceil_div(k, kUnit) * kUnit, matrices = phase.matrices;
  constexpr int64_t ldc = kTilePanels * kPanel;
  float* const c = call.scratch->tile;
  float* const x = call.scratch->activations;
  const int row_end = tile.row + tile.rows, col_end = tile.col + tile.cols;
  const int panel = tile.col / kPanel * matrices;
  const int panel_end = panel + panel_count(tile.col, tile.cols) * matrices;
  Inputs<T> inputs(call, from);
  const bool pairs = call.bf16_pairs && weights[panel].type() == Dtype::BF16 &&
                     same_type(weights + panel, panel_end - panel);

  const bool q8 = call.dims->q8_activations;
  const auto rounds = [&](int p) { return q8 && weights[p].quantised(); };
  bool any_rounds = false;
  for (int p = panel; p < panel_end; ++p) any_rounds |= rounds(p);
  Rounded* const rounded = static_cast<Rounded*>(call.scratch->rounded);

  for (int r = tile.row; r < row_end; r += kPassRows) {
    const int rows = lower_of(row_end - r, kPassRows);
    inputs.turn_to(r, rows);
    const int blocks = ceil_div(rows, kMicroRows);
    const int block_rows = ceil_div(rows, blocks);
    // With few rows, all K elements of the inputs fit in the cache, so each weight is read only once.
    // The accumulators stay in registers from the first k to the last, unless quantised weights are
    // converted in parts for several rows.
    const bool whole_k = blocks == 1;
    const int64_t chunk_stride = int64_t{block_rows} * kChunkStride;
    const RoundedRows own{call.dims, &phase, call.layer, r, rows};
    if (any_rounds && (from.rows != nullptr || call.scratch->rounded_rows != own)) {
      for (int begin = 0; begin < k; begin += kChunk) {
        inputs.unpack(begin, false, x);
        Rounded* const chunk = rounded + begin / kChunk * rows * kRowUnits;
        for (int i = 0; i < rows; ++i)
          round_row(x + i * kChunkStride, ceil_div(lower_of(k - begin, kChunk), kUnit),
                    chunk + i * kRowUnits);
      }
      call.scratch->rounded_rows = from.rows == nullptr ? own : RoundedRows{};
    }
    bool held = false;  // whether `x` has all inputs that are needed as floats
    const auto prepare = [&](int begin) {
      for (int end = whole_k ? k : begin + 1; begin < end && !held; begin += kChunk)
        inputs.unpack(begin, pairs, whole_k ? x + begin / kChunk * chunk_stride : x);
      held = true;
    };
    for (int p = panel; p < panel_end; p += kTilePanels) {
      const int panels = lower_of(panel_end - p, kTilePanels);
      const int step = whole_k ? whole_units : kChunk;
      for (int begin = 0; begin < whole_units; begin += step) {
        const int steps = lower_of(whole_units - begin, step);
        held = held && whole_k;
        for (int q = 0; q < panels;) {
          if (call.aborted()) return;
          const Panel* const first = weights + p + q;
          int count = 1;
          while (q + count < panels && first[count].dtype == first->dtype) ++count;
          if (rounds(p + q)) {
            with_packed(first->type(), false, [&]<class P>() {
              multiply_rounded<P>(rounded + begin / kChunk * rows * kRowUnits, rows * kRowUnits, rows, first,
                                  count, begin, steps, call.scratch->weights, c + q * kPanel, ldc, begin > 0);
              return true;
            });
            q += count;
            continue;
          }
          prepare(begin);
          const auto multiply_block = [&]<class W>() {
            int log2 = rows == 1 ? panel_log2<W>(1) : panel_log2<float>(block_rows);
            while (1 << log2 > count) --log2;
            const int apart = rows == 1 ? count >> log2 : 1;
            for (int i = 0; i < apart; ++i, ++q) {
              const RowBlocks part{x, chunk_stride, c + q * kPanel, ldc, rows, block_rows, apart};
              multiply<W>(part, first + i, log2, begin, steps, call.scratch->weights, begin > 0);
            }
            q += apart * ((1 << log2) - 1);
          };
          if constexpr (kMayPair<T>) {
            if (pairs) {
              multiply_block.template operator()<Bf16Pairs>();
              continue;
            }
          }
          with_format(first->type(), multiply_block);
        }
      }
      const int start = p / matrices * kPanel, stop = start + panels / matrices * kPanel;
      const int run = matrices == 1 ? stop - start : kPanel;
      for (int i = 0; i < rows; ++i) {
        for (int at = start; at < stop; at += run) {
          const int first = higher_of(at, tile.col), n = lower_of(at + run, col_end) - first;
          float* t = c + i * ldc + int64_t{at - start} * matrices + first - at;
          for (int m = 0; bias != nullptr && m < matrices; ++m) {
            for (int j = 0; j < n; ++j) t[m * kPanel + j] += bias[m * phase.width + first + j];
          }
          take(call, to[r + i], first, n, t);
        }
      }
    }
  }
}

// Computes a tile of consecutive rows with the phase's weights and bias. Passes the results to `take`.
template <class T>
void gemm(const Call& call, const Tile& tile, TakeResult take) {
  gemm<T>(call, tile, call.weights<Panel>(), call.bias(), take);
}

}  // namespace mk::MK_SIMD
