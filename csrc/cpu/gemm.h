// Tiles of C = A W^T on packed weights (packing.h), accumulated in float32.
//
// Every output has one accumulator that adds its products in ascending k, one fused multiply-add each where
// the processor has it, whatever the number of rows, the tile or the register block: a row's bits depend on
// nothing else.
#pragma once
#include "simd.h"

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

// Bytes between a weight's prefetch and its use: hides DRAM latency where the hardware stops at 4 KiB pages.
constexpr int kPrefetchBytes = 2048;

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
// chunk_stride apart.
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

// Chunk [begin, begin + kChunk) of k of `rows` rows of A as float32; a partial vector is filled
// with zeros, so an odd k is followed by one.
template <class T>
inline void unpack_chunk(const T* a, int rows, int k, int begin, float* out) {
  const int n = k - begin < kChunk ? k - begin : kChunk;
  for (int r = 0; r < rows; ++r, out += kChunkStride) {
    const T* row = a + int64_t{r} * k + begin;
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, load(row + i));
    if (i < n) store(out + i, load(row + i, n - i));
  }
}

// Rows [row, row + rows) of A [.][k] times panels [panel, panel + panels) of W. Results leave through
// epilogue(first row, rows, first panel, panels, c, ldc), once per output.
template <class T, class Epilogue>
inline void gemm(const Call& call, const T* a, int k, const T* w, int row, int rows, int panel, int panels,
                 const Epilogue& epilogue) {
  const int even_k = k + k % 2;
  const int64_t panel_stride = int64_t{even_k} * kPanel;
  constexpr int64_t ldc = kTilePanels * kPanel;
  float* const c = call.scratch->tile;
  float* const x = call.scratch->activations;
  const int row_end = row + rows, panel_end = panel + panels;

  for (int r = row; r < row_end; r += kTileRows) {
    const int tile_rows = row_end - r < kTileRows ? row_end - r : kTileRows;
    const T* tile_a = a + int64_t{r} * k;
    const int blocks = (tile_rows + kMicroRows - 1) / kMicroRows;
    const int block_rows = (tile_rows + blocks - 1) / blocks;
    // Few rows: all of k fits the cache, so weights stream once and accumulators never leave the registers.
    const bool whole_k = blocks == 1;
    const int64_t chunk_stride = int64_t{block_rows} * kChunkStride;
    if (whole_k) {
      for (int begin = 0; begin < k; begin += kChunk) {
        unpack_chunk(tile_a, tile_rows, k, begin, x + begin / kChunk * chunk_stride);
      }
    }
    for (int p = panel; p < panel_end; p += kTilePanels) {
      const int tile_panels = panel_end - p < kTilePanels ? panel_end - p : kTilePanels;
      const int step = whole_k ? even_k : kChunk;
      for (int begin = 0; begin < even_k; begin += step) {
        const int steps = even_k - begin < step ? even_k - begin : step;
        if (!whole_k) unpack_chunk(tile_a, tile_rows, k, begin, x);
        int log2 = panel_log2(block_rows);
        for (int q = 0; q < tile_panels; q += 1 << log2) {
          while (q + (1 << log2) > tile_panels) --log2;
          if (call.aborted()) return;
          const T* block_w = w + (p + q) * panel_stride + int64_t{begin} * kPanel;
          for (int i = 0; i < tile_rows; i += block_rows) {
            const int n = tile_rows - i < block_rows ? tile_rows - i : block_rows;
            kMicro<T>.entry[n][log2](x + int64_t{i} * kChunkStride, chunk_stride, block_w, panel_stride,
                                     steps, c + i * ldc + q * kPanel, ldc, begin > 0);
          }
        }
      }
      epilogue(r, tile_rows, p, tile_panels, c, ldc);
    }
  }
}

// The common case: a tile of plain columns; epilogue(row, first column, columns, row of c).
template <class T, class Epilogue>
inline void gemm_columns(const Call& call, const T* a, int k, const T* w, int row, int rows, int col,
                         int cols, const Epilogue& epilogue) {
  gemm(call, a, k, w, row, rows, col / kPanel, panel_count(col, cols),
       [&](int r, int tile_rows, int p, int tile_panels, float* c, int64_t ldc) {
         const int start = p * kPanel, stop = start + tile_panels * kPanel;
         const int first = start > col ? start : col, end = stop < col + cols ? stop : col + cols;
         for (int i = 0; i < tile_rows; ++i) epilogue(r + i, first, end - first, c + i * ldc + first - start);
       });
}

}  // namespace mk::MK_SIMD
