// Tiles of C = A W^T with packed weights (packed.h), accumulated in float32.
//
// Every output has one accumulator, which adds its products in ascending k, each with one fused multiply-add
// if the processor has it. This order does not depend on the number of rows, the tile or the register block,
// so a row's bits do not depend on them either. Quantised weights are multiplied as their float32 values.
#pragma once
#include "formats.h"
#include "rms_norm.h"

namespace mk::MK_SIMD {

// kAccumulators: the accumulators that fit in registers beside the weights. kWithScales: the accumulators and
// scales that fit in registers while quantised weights are widened. kMicroRows: the rows of the largest
// register block. 16-lane targets have 32 registers. A test reads the machine code of every block.
#if MK_LANES == 16
constexpr int kAccumulators = 24, kWithScales = 18, kMicroRows = 12;
#elif MK_LANES == 8
constexpr int kAccumulators = 10, kWithScales = 8, kMicroRows = 5;
#elif defined(__aarch64__)
constexpr int kAccumulators = 24, kWithScales = 24, kMicroRows = 6;
#else
constexpr int kAccumulators = 8, kWithScales = 16, kMicroRows = 2;
#endif
static_assert(kMicroRows <= kMaxMicroRows);
constexpr int kPassRows = kTileRows / kMicroRows * kMicroRows;  // rows of one pass over a weight tile

// log2 of the number of panels that a block of `rows` rows covers at once.
template <class W>
constexpr int panel_log2(int rows) {
  int log2 = 2;
  const int vectors = (kPlain<W> ? rows : rows + 1) * kPanelVectors;
  while (log2 > 0 && vectors << log2 > (kPlain<W> ? kAccumulators : kWithScales)) --log2;
  return log2;
}
static_assert(1 << panel_log2<float>(1) <= kWidePanels);

// The steps along K in a 32-bit word of A. In a pair of bfloat16 values, the first step is in the upper half.
template <class W>
constexpr int kWordSteps = kInPairs<W> ? 2 : 1;

// sum + x w, for all steps of a word in order.
template <class W>
MK_INLINE F32 add_products(F32 sum, F32 x, F32 w) {
#if MK_LANES == 16
  if constexpr (kInPairs<W>) {
    // The instruction adds the product of the upper halves, then that of the lower halves, and rounds after
    // each addition.
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
  }
#endif
  return sum + x * w;
}

// C[R][P panels] = A W^T for steps [begin, begin + steps) along K of the panels, in whole units; `resume`
// adds to C instead. Within a chunk, rows of A are kChunkStride apart; chunks are chunk_stride apart. A range
// of steps that begins inside a chunk also ends in it.
template <int R, int P, class W>
void micro(const float* a, int64_t chunk_stride, const Panel* panels, int begin, int steps, float* c,
           int64_t ldc, bool resume) {
  F32 acc[R][P][kPanelVectors];
  MK_UNROLL for (int i = 0; i < R; ++i) {
    MK_UNROLL for (int p = 0; p < P; ++p) {
      MK_UNROLL for (int v = 0; v < kPanelVectors; ++v) {
        acc[i][p][v] = resume ? load(c + i * ldc + p * kPanel + v * kLanes) : F32{};
      }
    }
  }
  const char* data[P];
  MK_UNROLL for (int p = 0; p < P; ++p) data[p] = panels[p].data;
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
  MK_UNROLL for (int i = 0; i < R; ++i) {
    MK_UNROLL for (int p = 0; p < P; ++p) {
      MK_UNROLL for (int v = 0; v < kPanelVectors; ++v) {
        store(c + i * ldc + p * kPanel + v * kLanes, acc[i][p][v]);
      }
    }
  }
}

using Micro = void (*)(const float*, int64_t, const Panel*, int, int, float*, int64_t, bool);

// micro<rows, 1 << log2, W>.
template <class W>
struct MicroTable {
  Micro entry[kMicroRows + 1][3] = {};

  template <int R, int L>
  constexpr void fill() {
    if constexpr (L <= panel_log2<W>(R)) entry[R][L] = micro<R, (1 << L), W>;
  }
  template <int R>
  constexpr void fill_rows() {
    fill<R, 0>();
    fill<R, 1>();
    fill<R, 2>();
    if constexpr (R > 1) fill_rows<R - 1>();
  }
  constexpr MicroTable() { fill_rows<kMicroRows>(); }
};

template <class W>
constexpr MicroTable<W> kMicro{};

inline bool same_type(const Panel* panels, int count) {
  for (int i = 1; i < count; ++i)
    if (panels[i].dtype != panels->dtype) return false;
  return true;
}

// Rows to be multiplied with a block of panels: x is laid out like `a` in `micro`, in blocks of block_rows;
// results go to c.
struct RowBlocks {
  const float* x;
  int64_t chunk_stride;
  float* c;
  int64_t ldc;
  int rows, block_rows;

  template <class W>
  void multiply(const Panel* panels, int log2, int begin, int skip, int steps, bool resume) const {
    const float* block_x = x + skip / kChunk * chunk_stride + skip % kChunk;
    for (int i = 0; i < rows; i += block_rows)
      kMicro<W>.entry[lower_of(rows - i, block_rows)][log2](block_x + int64_t{i} * kChunkStride, chunk_stride,
                                                            panels, begin, steps, c + i * ldc, ldc, resume);
  }
};

// c (+)= x W^T for 1 << log2 panels of one type, over the steps [begin, begin + steps) along K. For one block
// of rows, quantised weights are widened in registers; for more, they are first widened to `wide` (Scratch).
template <class W>
void multiply(const RowBlocks& rows, const Panel* panels, int log2, int begin, int steps, float* wide,
              bool resume) {
  if (kPlain<W> || rows.rows <= rows.block_rows)
    return rows.multiply<W>(panels, log2, begin, 0, steps, resume);
  for (int done = 0, part; done < steps; done += part) {
    part = lower_of(steps - done, kWideSteps);
    Panel widened[kWidePanels];
    for (int p = 0; p < 1 << log2; ++p) {
      float* out = wide + p * kWideStride;
      widen<W>(panels[p], begin + done, part, out);
      widened[p].data = reinterpret_cast<const char*>(out);
    }
    rows.multiply<Cached>(widened, log2, 0, done, part, resume || done > 0);
  }
}

// Converts rows of a matmul's inputs: from the compute type, or from float32 with normalisation.
template <class T>
class Inputs {
 public:
  explicit Inputs(const Call& call)
      : rows_(call.inputs<char>()),
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

  // Converts the chunk [begin, begin + kChunk) along K of the selected rows to float32, or to pairs of
  // bfloat16 values. Rows of `out` are kChunkStride apart; a partial unit is padded with zeros.
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
    return reinterpret_cast<const E*>(rows_) + int64_t{first_ + r} * k_;
  }
  template <class F>
  static MK_INLINE void unpack_row(int n, bool pairs, float* out, const F& vector) {
    for (int i = 0; i < ceil_div(n, kUnit) * kUnit; i += kLanes) {
      const F32 v = i < n ? vector(i, lower_of(n - i, kLanes)) : F32{};
      if (kInPairs<T> && pairs)
        store_pairs(reinterpret_cast<uint32_t*>(out) + i / 2, v);
      else
        store(out + i, v);
    }
  }

  const char* rows_;
  const float* weight_;
  const int k_;
  const float eps_;
  int first_ = 0, count_ = 0;
  float scale_[kPassRows];
};

// Computes t = inputs weights^T + bias of the phase for a tile and gives every output to kResult once: a call
// gets columns [first, first + columns) of a row. If several matrices alternate by panels, a call gets the
// columns of one panel, and the next matrix's results lie at t + kPanel.
template <class T, void (*kResult)(const Call& call, int row, int first, int columns, float* t)>
inline void gemm(const Call& call, const Tile& tile) {
  const Phase& phase = *call.phase;
  const int k = phase.inner, whole_units = ceil_div(k, kUnit) * kUnit, matrices = phase.matrices;
  constexpr int64_t ldc = kTilePanels * kPanel;
  const float* const bias = call.bias();
  float* const c = call.scratch->tile;
  float* const x = call.scratch->activations;
  const int row_end = tile.row + tile.rows, col_end = tile.col + tile.cols;
  const int panel = tile.col / kPanel * matrices;
  const int panel_end = panel + panel_count(tile.col, tile.cols) * matrices;
  Inputs<T> inputs(call);
  const Panel* const weights = call.weights<Panel>();
  const bool pairs =
      kInPairs<T> && weights[panel].type() == Dtype::BF16 && same_type(weights + panel, panel_end - panel);

  for (int r = tile.row; r < row_end; r += kPassRows) {
    const int rows = lower_of(row_end - r, kPassRows);
    inputs.turn_to(r, rows);
    const int blocks = ceil_div(rows, kMicroRows);
    const int block_rows = ceil_div(rows, blocks);
    // A few rows fit the cache in their whole length, so weights stream once and accumulators never leave the
    // registers.
    const bool whole_k = blocks == 1;
    const int64_t chunk_stride = int64_t{block_rows} * kChunkStride;
    if (whole_k) {
      for (int begin = 0; begin < k; begin += kChunk)
        inputs.unpack(begin, pairs, x + begin / kChunk * chunk_stride);
    }
    for (int p = panel; p < panel_end; p += kTilePanels) {
      const int panels = lower_of(panel_end - p, kTilePanels);
      const int step = whole_k ? whole_units : kChunk;
      for (int begin = 0; begin < whole_units; begin += step) {
        const int steps = lower_of(whole_units - begin, step);
        if (!whole_k) inputs.unpack(begin, pairs, x);
        for (int q = 0; q < panels;) {
          if (call.aborted()) return;
          const Panel* const first = weights + p + q;
          const RowBlocks part{x, chunk_stride, c + q * kPanel, ldc, rows, block_rows};
          const auto multiply_block = [&]<class W>() {
            int log2 = whole_k ? panel_log2<W>(block_rows) : panel_log2<Cached>(block_rows);
            while (q + (1 << log2) > panels || !same_type(first, 1 << log2)) --log2;
            multiply<W>(part, first, log2, begin, steps, call.scratch->weights, begin > 0);
            q += 1 << log2;
          };
          if constexpr (kInPairs<T>) {
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
        for (int from = start; from < stop; from += run) {
          const int first = higher_of(from, tile.col), n = lower_of(from + run, col_end) - first;
          float* t = c + i * ldc + int64_t{from - start} * matrices + first - from;
          for (int m = 0; bias != nullptr && m < matrices; ++m) {
            for (int j = 0; j < n; ++j) t[m * kPanel + j] += bias[m * phase.width + first + j];
          }
          kResult(call, r + i, first, n, t);
        }
      }
    }
  }
}

}  // namespace mk::MK_SIMD
