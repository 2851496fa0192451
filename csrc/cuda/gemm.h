// Matmuls on tensor cores, one chunk of columns after another. Operands are in the stages of block.h.
#pragma once
#include "plan.h"
#include "results.h"
#include "tensor_core.h"

namespace mk {

// A warp's accumulators are divided into blocks of 8 columns. The blocks for the first weight page of a
// k step come first, then the blocks for its second weight page.
constexpr int kBlockCols = 8, kPageBlocks = kTileRows / kBlockCols;

// Multiplies one chunk in k steps, one per stage. Two k steps are in flight at a time. But if a stage is
// not filled yet, the previous stage is released first, because the loaders may need its room.
template <int kHalves, class Accumulators, class Pages>
MK_FN void multiply(Pages& pages, int steps, Accumulators& acc) {
  int held = 0;  // how many stages of earlier steps are not released: 0 or 1
  MK_LOOP while (steps > 0) {
    if (!pages.all(pages.filled(0))) {
      acc.template settle<0>();
      pages.release_stage(1, held);
      held = 0;
      pages.wait_stage();
    }
    MK_LOOP for (bool filled = true; filled && steps > 0; --steps) {
      const bool next = pages.filled(1);  // asked early, because the answer takes long
      acc.template step<kHalves>(pages.ring(), stage_of(pages.stage()).slot);
      pages.advance();
      filled = pages.all(next);
      acc.template settle<1>();
      pages.release_stage(2, held);
      held = 1;
    }
  }
  acc.template settle<0>();
  pages.release_stage(1, held);
}

// store_stages and store_results process kTurn blocks of accumulators (8 columns each) at a time. If
// their loops were unrolled over all blocks, the code would not fit the instruction cache.
constexpr int kTurn = 4;

// Writes a chunk's results to stages, from which the storer copies them. The chunk starts at column
// `col` and has `blocks` blocks of 8 columns. `to.pair` turns two columns' accumulators into results.
template <class Accumulators, class Pages, class To>
MK_FN void store_stages(const Accumulators& acc, Pages& pages, const To& to, int col, int blocks) {
  using Element = typename To::Element;
  constexpr int kOfPage = kTileRowBytes / sizeof(Element) / kBlockCols, kOfStage = kStepPages * kOfPage;
  MK_LOOP for (int begin = 0; begin < blocks; begin += kOfStage) {
    pages.wait_stage();
    MK_LOOP for (int first = begin; first < lower_of(begin + kOfStage, blocks); first += kTurn) {
      unsigned char* out =
          pages.ring() + (stage_of(pages.stage()).slot * kStepPages + (first - begin) / kOfPage) * kPageBytes;
      const auto part = acc.template blocks<kTurn>(first);
      const auto up = acc.template blocks<kTurn>(To::kTwo ? kPageBlocks + first : first);
      MK_UNROLL for (int n = 0; n < kTurn * Accumulators::kRows * Accumulators::kPairs; ++n) {
        const int i = n / Accumulators::kRows / Accumulators::kPairs,
                  h = n / Accumulators::kPairs % Accumulators::kRows, e = n % Accumulators::kPairs,
                  at = (first + i) * kBlockCols + acc.col(e);
        if (first + i >= blocks) break;
        auto* place = out + tile_offset(acc.row(h), at % (kOfPage * kBlockCols) * sizeof(Element));
        store_pair(
            reinterpret_cast<Element*>(place),
            to.pair(col + at, {part.low(i, h, e), part.high(i, h, e)}, {up.low(i, h, e), up.high(i, h, e)}));
      }
    }
    pages.ready();
  }
}

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

// Runs a matmul instruction on a warp whose rows are outside the tile. The warp computes nothing, but like
// every consumer warp it must release each stage.
template <class Pages>
MK_FN void pass_over(const Call& c, Pages& pages) {
  for_chunks(*c.dims, *c.task, [&](const Chunk& chunk) {
    MK_LOOP for (int s = 0; s < chunk.steps(); ++s) {
      pages.wait_stage();
      pages.advance();
      pages.release_stage(1, 1);
    }
    MK_LOOP for (int page = 0; page < chunk.outputs(); page += kStepPages) {
      pages.wait_stage();
      pages.ready();
    }
    return true;
  });
}

// Runs a matmul instruction on the tensor cores, on consumer warp c.warp.
template <class P, class Pages>
MK_FN void gemm(const Call& c, const Matmul& m, Pages& pages) {
  using Accumulators = typename P::Accumulators;
  const int steps = here(ceil_div(m.phase.inner, kTileInner));
  if (c.warp / 4 * 64 >= m.tile.rows) return pass_over(c, pages);  // this warpgroup has no rows
  for (int done = 0; done < m.tile.cols; done += chunk_cols(m)) {
    const int col = m.tile.col + done, cols = lower_of(m.tile.cols - done, chunk_cols(m)),
              blocks = ceil_div(cols, kBlockCols);
    Accumulators acc(c.warp);
    if (m.two() || cols > kTileRows) {
      multiply<2>(pages, steps, acc);
    } else {
      multiply<1>(pages, steps, acc);
    }
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
      case Result::kStored:
        store_stages(acc, pages, ToResidual(c), col, blocks);
        break;
      case Result::kPartial:
        store_stages(acc, pages, ToPartial(c), col, blocks);
        break;
      case Result::kGated:
      case Result::kGeluGated:
        store_stages(acc, pages, ToGated(c), col, blocks);
        break;
      case Result::kNone:
        break;
    }
  }
}

}  // namespace mk
