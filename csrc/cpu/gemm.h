// Tiles of C = A W^T on packed weights (packing.h), accumulated in float32.
//
// Every output has one accumulator that adds its products in ascending k, one fused multiply-add each where
// the processor has it, whatever the number of rows, the tile or the register block: a row's bits depend on
// nothing else. Quantised weights are multiplied as the float32 values that they stand for.
#pragma once
#include "rms_norm.h"
#include "weights.h"

namespace mk::MK_SIMD {

// Accumulators that fit the registers, and the rows of the largest block. 16-lane targets have 32 registers.
#if MK_LANES == 16
constexpr int kAccumulators = 24, kMicroRows = 12;
#elif MK_LANES == 8
constexpr int kAccumulators = 12, kMicroRows = 6;
#elif defined(__aarch64__)
constexpr int kAccumulators = 24, kMicroRows = 6;
#else
constexpr int kAccumulators = 8, kMicroRows = 2;
#endif
static_assert(kMicroRows <= kMaxMicroRows);

// log2 of the panels that a block of `rows` rows covers at once.
constexpr int panel_log2(int rows) {
  int log2 = 2;
  while (log2 > 0 && (rows * kPanelVectors << log2) > kAccumulators) --log2;
  return log2;
}
static_assert(1 << panel_log2(1) <= kWidePanels);

// Weights of two k steps for one vector of columns.
MK_INLINE void load_pair(const Bf16* p, int v, F32& even, F32& odd) {
  U32 words;
  memcpy(&words, p + 2 * v * kLanes, sizeof words);
  even = (F32)(words << 16);
  odd = (F32)(words & 0xFFFF0000u);
}

MK_INLINE void load_pair(const float* p, int v, F32& even, F32& odd) {
  even = load(p + v * kLanes);
  odd = load(p + kPanel + v * kLanes);
}

// C[R][P panels] (+)= A W^T over k steps (even). A: rows kChunkStride apart within a chunk, chunks
// chunk_stride apart; steps that begin inside a chunk end in it.
template <int R, int P, class T>
void micro(const float* a, int64_t chunk_stride, const T* w, int64_t panel_stride, int k, float* c,
           int64_t ldc, bool resume) {
  F32 acc[R][P][kPanelVectors];
  MK_UNROLL for (int i = 0; i < R; ++i) {
    MK_UNROLL for (int p = 0; p < P; ++p) {
      MK_UNROLL for (int v = 0; v < kPanelVectors; ++v) {
        acc[i][p][v] = resume ? load(c + i * ldc + p * kPanel + v * kLanes) : F32{};
      }
    }
  }
  for (int begin = 0; begin < k; begin += kChunk, a += chunk_stride) {
    const int steps = k - begin < kChunk ? k - begin : kChunk;
    for (int s = 0; s < steps; s += 2, w += 2 * kPanel) {
      F32 even[P][kPanelVectors], odd[P][kPanelVectors];
      MK_UNROLL for (int p = 0; p < P; ++p) {
        const T* panel = w + p * panel_stride;
        __builtin_prefetch(reinterpret_cast<const char*>(panel) + kPrefetchBytes);
        MK_UNROLL for (int v = 0; v < kPanelVectors; ++v) load_pair(panel, v, even[p][v], odd[p][v]);
      }
      MK_UNROLL for (int i = 0; i < R; ++i) {
        const F32 x = splat(a[i * kChunkStride + s]);
        MK_UNROLL for (int p = 0; p < P; ++p) {
          MK_UNROLL for (int v = 0; v < kPanelVectors; ++v) acc[i][p][v] += x * even[p][v];
        }
      }
      MK_UNROLL for (int i = 0; i < R; ++i) {
        const F32 x = splat(a[i * kChunkStride + s + 1]);
        MK_UNROLL for (int p = 0; p < P; ++p) {
          MK_UNROLL for (int v = 0; v < kPanelVectors; ++v) acc[i][p][v] += x * odd[p][v];
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

template <class T>
using Micro = void (*)(const float*, int64_t, const T*, int64_t, int, float*, int64_t, bool);

// micro<rows, 1 << log2>.
template <class T>
struct MicroTable {
  Micro<T> entry[kMicroRows + 1][3] = {};

  template <int R, int L>
  constexpr void fill() {
    if constexpr (L <= panel_log2(R)) entry[R][L] = micro<R, (1 << L), T>;
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

template <class T>
constexpr MicroTable<T> kMicro{};

// Rows of a matmul's inputs on their way into the arithmetic: of the compute type; or of float32, and
// normalised here.
template <class T>
class Inputs {
 public:
  explicit Inputs(const Call& call)
      : rows_(call.inputs<char>()),
        weight_(call.phase->norm == Buffer::kNone ? nullptr : call.at<float>(call.phase->norm)),
        k_(call.phase->inner),
        eps_(call.dims->rms_eps) {}

  // What `unpack` gives from now on: rows [row, row + count), at most kTileRows.
  void turn_to(int row, int count) {
    first_ = row;
    count_ = count;
    if (weight_ == nullptr) return;
    for (int r = 0; r < count; ++r) scale_[r] = rms_scale(this->row<float>(r), k_, eps_);
  }

  // Their chunk [begin, begin + kChunk) of k as float32, rows kChunkStride apart; a partial vector is filled
  // with zeros, so an odd k is followed by one.
  void unpack(int begin, float* out) const {
    const int n = lower_of(k_ - begin, kChunk);
    for (int r = 0; r < count_; ++r, out += kChunkStride) {
      if (weight_ != nullptr) {
        const float *x = row<float>(r) + begin, *weight = weight_ + begin;
        unpack_row(n, out, [&](int i, int lanes) {
          return rounded(normalised(x + i, weight + i, scale_[r], lanes), T{});
        });
      } else {
        const T* x = row<T>(r) + begin;
        unpack_row(n, out, [&](int i, int lanes) { return load(x + i, lanes); });
      }
    }
  }

 private:
  template <class E>
  const E* row(int r) const {
    return reinterpret_cast<const E*>(rows_) + int64_t{first_ + r} * k_;
  }
  template <class F>
  static MK_INLINE void unpack_row(int n, float* out, const F& vector) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, vector(i, kLanes));
    if (i < n) store(out + i, vector(i, n - i));
  }

  const char* rows_;
  const float* weight_;
  const int k_;
  const float eps_;
  int first_ = 0, count_ = 0;
  float scale_[kTileRows];
};

// t = inputs weights^T + bias of the phase on a tile; W is the packed weights' type. kResult takes columns
// [first, first + columns) of a row, every output once. Several matrices alternate by panels: then it takes
// one panel's columns at a time, with t of the next matrix kPanel further.
template <class T, class W, void (*kResult)(const Call& call, int row, int first, int columns, float* t)>
inline void gemm(const Call& call, const Tile& tile) {
  const Phase& phase = *call.phase;
  const int k = phase.inner, even_k = k + k % 2, matrices = phase.matrices;
  constexpr int64_t ldc = kTilePanels * kPanel;
  const float* const bias = call.bias();
  float* const c = call.scratch->tile;
  float* const x = call.scratch->activations;
  const int row_end = tile.row + tile.rows, col_end = tile.col + tile.cols;
  const int panel = tile.col / kPanel * matrices;
  const int panel_end = panel + panel_count(tile.col, tile.cols) * matrices;
  Inputs<T> inputs(call);
  const Weights<W> weights(call);

  for (int r = tile.row; r < row_end; r += kTileRows) {
    const int rows = lower_of(row_end - r, kTileRows);
    inputs.turn_to(r, rows);
    const int blocks = ceil_div(rows, kMicroRows);
    const int block_rows = ceil_div(rows, blocks);
    // Few rows: all of k fits the cache, so weights stream once and accumulators never leave the registers.
    const bool whole_k = blocks == 1;
    const int64_t chunk_stride = int64_t{block_rows} * kChunkStride;
    if (whole_k) {
      for (int begin = 0; begin < k; begin += kChunk) inputs.unpack(begin, x + begin / kChunk * chunk_stride);
    }
    for (int p = panel; p < panel_end; p += kTilePanels) {
      const int panels = lower_of(panel_end - p, kTilePanels);
      const int step = whole_k ? even_k : kChunk;
      for (int begin = 0; begin < even_k; begin += step) {
        const int steps = lower_of(even_k - begin, step);
        if (!whole_k) inputs.unpack(begin, x);
        int log2 = panel_log2(block_rows);
        for (int q = 0; q < panels; q += 1 << log2) {
          while (q + (1 << log2) > panels) --log2;
          if (call.aborted()) return;
          const int part = weights.steps(steps);
          for (int s = 0; s < steps; s += part) {
            const int part_steps = lower_of(steps - s, part);
            const auto* block_w = weights.block(p + q, 1 << log2, begin + s, part_steps);
            const float* block_x = x + s / kChunk * chunk_stride + s % kChunk;
            for (int i = 0; i < rows; i += block_rows) {
              const int n = lower_of(rows - i, block_rows);
              kMicro<typename Weights<W>::Element>.entry[n][log2](
                  block_x + int64_t{i} * kChunkStride, chunk_stride, block_w, weights.panel_stride,
                  part_steps, c + i * ldc + q * kPanel, ldc, begin + s > 0);
            }
          }
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
