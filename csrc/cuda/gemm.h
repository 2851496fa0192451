// Matmuls on the tensor cores, one chunk of columns after another, with all operands in pages. tensor_pages
// (plan.h) lists the pages.
#pragma once
#include "plan.h"
#include "results.h"
#include "tensor_core.h"

namespace mk {

// A warp's accumulators are blocks of 8 columns. The blocks for the first weight page of a K step come first,
// then the blocks for the second weight page.
constexpr int kBlockCols = 8, kPageBlocks = kTileRows / kBlockCols;

// Multiplies one chunk in steps along the inner length. Two steps are in flight at a time. Returns the number
// of the page after the chunk's last operand page.
template <int kHalves, class Accumulators, class Pages>
MK_FN int multiply(Pages& pages, int page, int steps, Accumulators& acc) {
  constexpr int kStep = 1 + kHalves;
  const auto release = [&](int first) { MK_UNROLL for (int i = 0; i < kStep; ++i) pages.release(first + i); };
  for (int s = 0; s < steps; ++s, page += kStep) {
    const unsigned char* a = pages.full(page);
    const unsigned char* b0 = pages.full(page + 1);
    const unsigned char* b1 = kHalves == 2 ? pages.full(page + 2) : nullptr;
    acc.template step<kHalves>(a, b0, b1);
    if (s == 0) continue;
    acc.template settle<1>();
    release(page - kStep);
  }
  acc.template settle<0>();
  release(page - kStep);
  return page;
}

// fill_pages and store_results process kTurn blocks of accumulators (8 columns each) at a time. If they were
// unrolled over all blocks, their code would not fit the instruction cache.
constexpr int kTurn = 4;

// Calls each(block, h, e) for every pair of adjacent results that this lane holds in the first kTurn of
// `blocks` blocks. acc.row(h) is the pair's row in the tile, and acc.col(e) its column in the block.
template <class Accumulators, class Each>
MK_FN void for_pairs(int blocks, const Each& each) {
  MK_UNROLL for (int i = 0; i < kTurn; ++i) {
    if (i >= blocks) break;
    MK_UNROLL for (int h = 0; h < Accumulators::kRows; ++h) {
      MK_UNROLL for (int e = 0; e < Accumulators::kPairs; ++e) each(i, h, e);
    }
  }
}

// Writes a tile's results, `blocks` accumulator blocks, to output pages from page number `page` on, and
// returns the number of the page after the last one. A result has kElement bytes. For kTurn blocks at a time,
// `take(first)` returns the values of the blocks from `first` on, and `put(taken, first, i, h, e, at)` stores
// at address `at` the pair of block first + i that `h` and `e` select (see for_pairs).
//
// Neither `take` nor `put` may contain a lambda: NVRTC 13.0 mistakes a lambda inside a generic lambda for a
// host function.
template <int kElement, class Accumulators, class Pages, class Take, class Put>
MK_FN int fill_pages(Pages& pages, int page, int blocks, const Accumulators& acc, const Take& take,
                     const Put& put) {
  constexpr int kOfPage = kTileRowBytes / kElement / kBlockCols;
  unsigned char* out = nullptr;
  MK_LOOP for (int first = 0; first < blocks; first += kTurn) {
    if (first % kOfPage == 0) out = pages.full(page);
    const auto taken = take(first);
    for_pairs<Accumulators>(blocks - first, [&](int i, int h, int e) {
      const int col = (first + i) % kOfPage * kBlockCols + acc.col(e);
      put(taken, first, i, h, e, out + tile_offset(acc.row(h), col * kElement));
    });
    if ((first + kTurn) % kOfPage == 0 || first + kTurn >= blocks) pages.ready(page++);
  }
  return page;
}

// Accumulator blocks of both matrices of a gate/up matmul.
template <class Blocks>
struct Both {
  Blocks gate, up;
};

// The data, such as addresses, that `to.store` needs for each tile row in which this lane has results.
template <class Accumulators, class To>
struct OwnRows {
  typename To::Row row[Accumulators::kRows]{};

  MK_FN OwnRows(const Accumulators& acc, const To& to, const Tile& tile) {
    MK_UNROLL for (int h = 0; h < Accumulators::kRows; ++h) {
      if (acc.row(h) < tile.rows) row[h] = to.row(tile.row + acc.row(h));
    }
  }
};

// Passes to `to.store` each pair of results that is inside the tile and in columns [begin, end) of the chunk.
// The chunk starts at column `col`.
template <class Accumulators, class To>
MK_FN void store_results(const Accumulators& acc, const To& to, OwnRows<Accumulators, To>& rows,
                         const Matmul& m, int col, int begin, int end) {
  MK_LOOP for (int first = begin; first < end; first += kTurn * kBlockCols) {
    const auto part = acc.template blocks<kTurn>(first / kBlockCols);
    MK_LOOP for (int i = 0; i < kTurn; ++i) {
      MK_UNROLL for (int e = 0; e < Accumulators::kPairs; ++e) {
        const int at = first + i * kBlockCols + acc.col(e);
        if (at >= end) continue;
        const auto column = to.column(col + at);
        MK_UNROLL for (int h = 0; h < Accumulators::kRows; ++h) {
          Pair pair{};
          MK_UNROLL for (int j = 0; j < kTurn; ++j) {
            if (j == i) pair = {part.low(j, h, e), part.high(j, h, e)};
          }
          if (acc.row(h) < m.tile.rows) to.store(rows.row[h], column, pair.a, pair.b);
        }
      }
    }
  }
}

// Stores the results of a QKV projection. Heads that must be normalised take two passes of ToHeads::store:
// the first adds up the squares of the head's columns, the second stores the head. Squares are added in a
// fixed order: each lane adds those of its columns, then the sums of the lanes that share a row are added.
template <class Accumulators>
MK_FN void store_heads(const Accumulators& acc, ToHeads to, const Matmul& m, int col, int cols) {
  OwnRows<Accumulators, ToHeads> rows(acc, to, m.tile);
  int end = 0;
  MK_LOOP for (int begin = 0; begin < cols; begin = to.squares ? begin : end) {
    to.squares = !to.squares && to.normed(col + begin);
    end = to.normed(col + begin) ? begin + to.head_dim() : cols;
    store_results(acc, to, rows, m, col, begin, end);
    MK_UNROLL for (int h = 0; h < Accumulators::kRows; ++h) {
      float& norm = rows.row[h].norm;
      MK_UNROLL for (int mask = 1; mask < kBlockCols / 2 / Accumulators::kPairs; mask *= 2) norm +=
          shuffle_xor(norm, mask);
      norm = to.squares ? to.scale(norm) : 0.0f;
    }
  }
}

// Called by a warp whose rows are all outside the tile: releases each page of the matmul.
template <class Pages>
MK_FN void pass_over(const Matmul& m, int steps, Pages& pages) {
  for (int done = 0, page = 0; done < m.tile.cols; done += chunk_cols(m)) {
    const int cols = lower_of(m.tile.cols - done, chunk_cols(m));
    MK_LOOP for (const int end = page + steps * (m.two() || cols > kTileRows ? 3 : 2); page < end; ++page) {
      pages.full(page);
      pages.release(page);
    }
    if (!by_pages(m.phase.result)) continue;
    MK_LOOP for (int at = 0; at < cols; at += output_cols(m), ++page) {
      pages.full(page);
      pages.ready(page);
    }
  }
}

// Runs a matmul instruction on the tensor cores, on consumer warp c.warp.
template <class P, class Pages>
MK_FN void gemm(const Call& c, const Matmul& m, Pages& pages) {
  using Accumulators = typename P::Accumulators;
  const int steps = ceil_div(m.phase.inner, kTileInner);
  if (c.warp / 4 * 64 >= m.tile.rows) return pass_over(m, steps, pages);  // this warpgroup has no rows
  for (int done = 0, page = 0; done < m.tile.cols; done += chunk_cols(m)) {
    const int col = m.tile.col + done, cols = lower_of(m.tile.cols - done, chunk_cols(m)),
              blocks = ceil_div(cols, kBlockCols);
    Accumulators acc(c.warp);
    if (m.two() || cols > kTileRows) {
      page = multiply<2>(pages, page, steps, acc);
    } else {
      page = multiply<1>(pages, page, steps, acc);
    }
    const auto taken = [&](int first) { return acc.template blocks<kTurn>(first); };
    using Part = decltype(taken(0));
    switch (m.phase.result) {
      case Result::kHeads:
        store_heads(acc, ToHeads(c), m, col, cols);
        break;
      case Result::kLogits: {
        const ToLogits to(c);
        OwnRows<Accumulators, ToLogits> rows(acc, to, m.tile);
        store_results(acc, to, rows, m, col, 0, cols);
        break;
      }
      case Result::kResidual:
      case Result::kStored: {
        const ToResidual to(c);
        page = fill_pages<4>(
            pages, page, blocks, acc, taken, [&](const Part& v, int first, int i, int h, int e, void* at) {
              *static_cast<Pair*>(at) =
                  to.value(col + (first + i) * kBlockCols + acc.col(e), v.low(i, h, e), v.high(i, h, e));
            });
        break;
      }
      case Result::kPartial:
        page = fill_pages<2>(pages, page, blocks, acc, taken,
                             [&](const Part& v, int, int i, int h, int e, void* at) {
                               store_pair(static_cast<uint16_t*>(at), v.low(i, h, e), v.high(i, h, e));
                             });
        break;
      case Result::kGated:
      case Result::kGeluGated: {
        const ToGated to(c);
        page = fill_pages<2>(
            pages, page, blocks, acc,
            [&](int first) { return Both<Part>{taken(first), taken(kPageBlocks + first)}; },
            [&](const Both<Part>& v, int first, int i, int h, int e, void* at) {
              const int at_col = col + (first + i) * kBlockCols + acc.col(e);
              store_pair(static_cast<uint16_t*>(at), to.value(at_col, v.gate.low(i, h, e), v.up.low(i, h, e)),
                         to.value(at_col + 1, v.gate.high(i, h, e), v.up.high(i, h, e)));
            });
        break;
      }
      case Result::kNone:
        break;
    }
  }
}

}  // namespace mk
