// Matmuls on the tensor cores, chunk by chunk of the columns, all from pages. Pages: tensor_pages (plan.h).
#pragma once
#include "plan.h"
#include "results.h"
#include "tensor_core.h"

namespace mk {

// A warp's accumulators are blocks of 8 columns, first those of a K step's first weight page, then of its second.
constexpr int kBlockCols = 8, kPageBlocks = kTileRows / kBlockCols;

// A chunk's K loop; two steps are in flight. Returns the page after its last.
template <int kHalves, class Accumulators, class Pages>
MK_FN int multiply(Pages& pages, int page, int steps, Accumulators& acc) {
  constexpr int kStep = 1 + kHalves;
  const auto release = [&](int first) {
    MK_UNROLL for (int i = 0; i < kStep; ++i) pages.release(first + i);
  };
  acc.clear();
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

// The same pages, for warps whose rows the tile lacks.
template <class Pages>
MK_FN int pass_over(Pages& pages, int page, int count) {
  for (const int end = page + count; page < end; ++page) {
    pages.full(page);
    pages.release(page);
  }
  return page;
}

// Writes `blocks` blocks of results to output pages of kTileRowBytes / kElement columns; `write(block, h, e, to)` puts a
// pair at an address. Returns the page after the last.
template <int kElement, int kBlocks, class Accumulators, class Pages, class Write>
MK_FN int fill_pages(Pages& pages, int page, int blocks, bool idle, const Accumulators& acc,
                     const Write& write) {
  constexpr int kStep = kTileRowBytes / kElement / kBlockCols;
  MK_UNROLL for (int first = 0; first < kBlocks; first += kStep) {
    if (first >= blocks) break;
    unsigned char* out = pages.writable(page);
    if (!idle) {
      MK_UNROLL for (int h = 0; h < Accumulators::kRows; ++h) {
        MK_UNROLL for (int i = 0; i < kStep; ++i) {
          if (first + i >= blocks) break;
          MK_UNROLL for (int e = 0; e < Accumulators::kPairs; ++e) {
            write(first + i, h, e, out + tile_offset(acc.row(h), (i * kBlockCols + acc.col(e)) * kElement));
          }
        }
      }
    }
    pages.ready(page++);
  }
  return page;
}

// Hands each pair of results that the tile has to `to.store`; `cols` columns from `col` on.
template <class Accumulators, class To>
MK_FN void store_results(const Accumulators& acc, const To& to, const Matmul& m, int col, int cols) {
  typename To::Row rows[Accumulators::kRows]{};
  MK_UNROLL for (int h = 0; h < Accumulators::kRows; ++h) {
    if (acc.row(h) < m.rows) rows[h] = to.row(m.row + acc.row(h));
  }
  MK_UNROLL for (int i = 0; i < 2 * kPageBlocks; ++i) {
    if (i * kBlockCols >= cols) break;
    MK_UNROLL for (int e = 0; e < Accumulators::kPairs; ++e) {
      if (i * kBlockCols + acc.col(e) >= cols) continue;
      const auto column = to.column(col + i * kBlockCols + acc.col(e));
      MK_UNROLL for (int h = 0; h < Accumulators::kRows; ++h) {
        if (acc.row(h) < m.rows) to.store(rows[h], column, acc.low(i, h, e), acc.high(i, h, e));
      }
    }
  }
}

// An instruction on consumer warp c.warp.
template <class P, class Pages>
MK_FN void gemm(const Call& c, Opcode opcode, const Matmul& m, Pages& pages) {
  const int steps = ceil_div(m.k, kTileInner);
  typename P::Accumulators acc(c.warp);
  const bool idle = acc.first_row() >= m.rows;
  for (int done = 0, page = 0; done < m.cols; done += chunk_cols(m)) {
    const int col = m.col + done, cols = lower(m.cols - done, chunk_cols(m)), blocks = ceil_div(cols, kBlockCols);
    const bool both = m.halves == 2 || cols > kTileRows;
    if (idle) {
      page = pass_over(pages, page, steps * (both ? 3 : 2));
    } else if (both) {
      page = multiply<2>(pages, page, steps, acc);
    } else {
      page = multiply<1>(pages, page, steps, acc);
    }
    switch (opcode) {
      case Opcode::qkv_rope:
        if (!idle) store_results(acc, ToQkv(c), m, col, cols);
        break;
      case Opcode::lm_head:
        if (!idle) store_results(acc, ToLogits(c), m, col, cols);
        break;
      case Opcode::o_proj:
      case Opcode::down_proj: {
        const ToResidual to = residual(c, opcode);
        page = fill_pages<4, 2 * kPageBlocks>(
            pages, page, blocks, idle, acc, [&](int i, int h, int e, unsigned char* out) {
              *reinterpret_cast<Pair*>(out) =
                  to.value(col + i * kBlockCols + acc.col(e), acc.low(i, h, e), acc.high(i, h, e));
            });
        break;
      }
      case Opcode::o_partial:
      case Opcode::down_partial:
        page = fill_pages<2, 2 * kPageBlocks>(
            pages, page, blocks, idle, acc, [&](int i, int h, int e, unsigned char* out) {
              store_pair(reinterpret_cast<uint16_t*>(out), acc.low(i, h, e), acc.high(i, h, e));
            });
        break;
      case Opcode::gate_up_silu: {
        const ToActivation to(c);
        page = fill_pages<2, kPageBlocks>(
            pages, page, blocks, idle, acc, [&](int i, int h, int e, unsigned char* out) {
              const int at = col + i * kBlockCols + acc.col(e), up = kPageBlocks + i;
              store_pair(reinterpret_cast<uint16_t*>(out), to.value(at, acc.low(i, h, e), acc.low(up, h, e)),
                         to.value(at + 1, acc.high(i, h, e), acc.high(up, h, e)));
            });
        break;
      }
      default:
        break;
    }
  }
}

}  // namespace mk
