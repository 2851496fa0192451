// Which pages an instruction takes: a function of its record, the sizes and the step table. Everyone who
// touches pages walks the list that `for_pages` gives, in its order.
//
// A page of tiles is made of boxes of [kBoxRows rows][128 bytes], a page of pieces of kPieces rows of up to
// kPiece elements.
#pragma once
#include "../common/index.h"
#include "block.h"

namespace mk {

constexpr int kBoxBytes = kBoxRows * 128, kHalfPage = kPageBytes / 2, kPieceBytes = kPiece * 2;

enum class Fill : int32_t { kWeights, kInputs, kOutput };

// What lies in a page. Box i of [first, first + boxes): column (i / per), row (i % per).
struct PageUse {
  Fill fill;
  bool pieces;  // not tiles
  Buffer buffer;
  int32_t x, y, z;  // of box 0, in elements, rows, and matrices of the buffer
  int32_t first, boxes, per;
  int32_t step;   // pieces: rows between rows
  int32_t inner;  // pieces: elements of a whole row
  int32_t item;   // attention: whose counters must hold; -1 elsewhere

  MK_FN int32_t box_x(int32_t i) const { return x + (first + i) / per * (pieces ? kPiece : kTileInner); }
  MK_FN int32_t box_y(int32_t i) const { return y + (first + i) % per * (pieces ? step : kBoxRows); }
  // Where in its page it lies.
  MK_FN int32_t box_at(int32_t i) const {
    return pieces ? i * kPieceBytes : i / per * kHalfPage + i % per * kBoxBytes;
  }
  MK_FN uint32_t box_bytes(int32_t i) const {
    return pieces ? static_cast<uint32_t>(lower(kPiece, inner - box_x(i))) * 2 : kBoxBytes;
  }
  MK_FN uint32_t bytes() const {
    uint32_t n = 0;
    for (int32_t i = 0; i < boxes; ++i) n += box_bytes(i);
    return n;
  }
};

// The numerics class. The device's code is for one, which leaves out half of it; the host's is for both.
MK_FN bool uses_dots([[maybe_unused]] const Dims& d) {
#if defined(MK_DOTS)
  return MK_DOTS != 0;
#else
  return d.dots != 0;
#endif
}

// A matmul: rows x cols of inputs [.][k] times weights [.][k] transposed.
struct Matmul {
  Buffer inputs, weights;
  bool by_pages;  // its results go through output pages to `output`
  Buffer output;
  int32_t k, halves;  // halves 2: gate and up, whose weights lie one after the other
  int32_t row, rows, col, cols;
};

// False where the record is no matmul.
MK_FN bool matmul_of(const Dims& d, const int32_t* record, Matmul& m) {
  const QkvRope& op = operands<QkvRope>(record);  // as of all matmuls
  switch (static_cast<Opcode>(record_opcode(record))) {
#define MK_MATMUL(name, weights, inputs, inner, halves, output)                                            \
  case Opcode::name:                                                                                       \
    m = {Buffer::inputs, Buffer::weights, output >= 0, static_cast<Buffer>(output), inner, halves, op.row, \
         op.rows,        op.col,          op.cols};                                                        \
    return true;
    MK_MATMULS(MK_MATMUL)
#undef MK_MATMUL
    default:
      return false;
  }
}

// Every layer has weights of its own but for the LM head's.
MK_FN int32_t weight_layer(const Matmul& m, int32_t layer) {
  return m.weights == Buffer::LM_HEAD ? 0 : layer;
}

// Tensor cores: columns in chunks; of each chunk its k, kTileInner at a time, then the results.
MK_FN int32_t chunk_cols(const Matmul& m) { return kChunk / m.halves; }
// Columns of a page of results.
MK_FN int32_t output_cols(const Matmul& m) { return m.output == Buffer::X ? 32 : 64; }

template <class Each>
MK_FN bool tensor_pages(const Dims& d, const Matmul& m, int32_t layer, Each&& each) {
  const int32_t row_boxes = ceil_div(m.rows, kBoxRows);
  const int32_t depth = weight_layer(m, layer);
  const bool reduce = m.output == Buffer::REDUCE;
  const int32_t out_z = reduce ? d.rank : 0;
  const int32_t out_y =
      reduce ? static_cast<int32_t>(reduce_row(d, d.rank, m.row)) - d.rank * d.own_rows() : m.row;
  for (int32_t col = 0; col < m.cols; col += chunk_cols(m)) {
    const int32_t cols = lower(m.cols - col, chunk_cols(m));
    for (int32_t x = 0; x < m.k; x += kTileInner) {
      if (!each(PageUse{Fill::kInputs, false, m.inputs, x, m.row, 0, 0, row_boxes, kTileRows / kBoxRows, 0, 0,
                        -1}))
        return false;
      for (int32_t n = 0; n < 2; ++n) {
        const int32_t first = m.halves == 2 ? 0 : n * kTileRows, half = m.halves == 2 ? n : 0;
        if (first >= cols) break;
        if (!each(PageUse{Fill::kWeights, false, m.weights, x, m.col + col + first, depth * m.halves + half,
                          0, ceil_div(lower(cols - first, kTileRows), kBoxRows), kTileRows / kBoxRows, 0, 0,
                          -1}))
          return false;
      }
    }
    if (!m.by_pages) continue;
    for (int32_t at = 0; at < cols; at += output_cols(m)) {
      if (!each(PageUse{Fill::kOutput, false, m.output, m.col + col + at, out_y, out_z, 0, row_boxes,
                        kTileRows / kBoxRows, 0, 0, -1}))
        return false;
    }
  }
  return true;
}

// Dot products: units of 16 columns (of gate and up 8 each), whose k comes in pieces; a piece of a unit is
// two pages, member 0 and 1: even and odd columns, or gate and up. The activations come again in every lap of
// the ring, after the lap's weights: piece p of row r is number p * rows + r.
MK_FN int32_t dot_input_pages(const Matmul& m) { return ceil_div(m.rows * ceil_div(m.k, kPiece), kPieces); }
// Weight pages of a lap, both members of a piece in the same one.
MK_FN int32_t lap_weights(const Matmul& m) { return (kPages - dot_input_pages(m)) & ~1; }

template <class Each>
MK_FN bool dot_pages(const Dims& d, const Matmul& m, int32_t layer, Each&& each) {
  const int32_t pieces = ceil_div(m.k, kPiece), units = ceil_div(m.cols, 2 * kPieces / m.halves);
  const int32_t weights = 2 * pieces * units, inputs = dot_input_pages(m), cells = m.rows * pieces;
  for (int32_t page = 0; page < weights;) {
    for (const int32_t end = lower(weights, page + lap_weights(m)); page < end; ++page) {
      const int32_t member = page % 2, piece = page / 2 % pieces, unit = page / 2 / pieces;
      const int32_t first = unit * (2 * kPieces / m.halves);  // column
      const int32_t y = m.halves == 2 ? member * d.rank_ffn() + m.col + first : m.col + first + member;
      const int32_t step = 2 / m.halves;
      const int32_t left = m.cols - first - (m.halves == 2 ? 0 : member);
      if (!each(PageUse{Fill::kWeights, true, m.weights, piece * kPiece, y, weight_layer(m, layer), 0,
                        lower(kPieces, ceil_div(left, step)), kPieces, step, m.k, -1}))
        return false;
    }
    for (int32_t i = 0; i < inputs; ++i) {
      if (!each(PageUse{Fill::kInputs, true, m.inputs, 0, m.row, 0, i * kPieces,
                        lower(kPieces, cells - i * kPieces), m.rows, 1, m.k, -1}))
        return false;
    }
  }
  return true;
}

// Attention: the query rows of an item (row, then head of the group) in tiles, units = KV heads x tiles, a
// pass of one unit per consumer warp; of each pass every KV block, of that every KV head of the pass, its
// keys, then its values: keys [element][token] in halves of 64 tokens, values [token][element] in halves of
// 64 elements. Narrow heads have both halves of their keys in one page. A padding item takes one page with
// nothing in it, which says that its counters hold.
template <class Each>
MK_FN bool item_pages(const Dims& d, const StepView& s, int32_t item, int32_t layer, Each&& each) {
  if (s.item_seq[item] < 0)
    return each(PageUse{Fill::kInputs, false, Buffer::K_CACHE, 0, 0, layer, 0, 0, 1, 0, 0, item});
  const int32_t tiles = ceil_div(s.item_rows[item] * d.group_size(), kQueryTile);
  const int32_t units = s.item_kv_heads[item] * tiles;
  const int32_t* table = s.block_tables + static_cast<int64_t>(s.item_seq[item]) * d.pages_per_seq();
  const bool narrow = d.head_dim <= kTileInner;
  const int32_t key_boxes = ceil_div(d.head_dim, kBoxRows), value_boxes = kTileRows / kBoxRows;
  for (int32_t pass = 0; pass < units; pass += kConsumerWarps) {
    const int32_t first = s.item_kv_head[item] + pass / tiles;
    const int32_t last = s.item_kv_head[item] + (lower(pass + kConsumerWarps, units) - 1) / tiles;
    for (int32_t block = s.item_block[item]; block < s.item_block[item] + s.item_blocks[item]; ++block) {
      for (int32_t head = first; head <= last; ++head) {
        const int32_t matrix = table[block] * d.rank_kv_heads() + head;
        const int32_t key = matrix * d.head_dim, value = matrix * d.page;
        for (int32_t half = 0; half < (narrow ? 1 : 2); ++half) {
          if (!each(PageUse{Fill::kInputs, false, Buffer::K_CACHE, half * kTileInner, key, layer, 0,
                            narrow ? 2 * key_boxes : key_boxes, key_boxes, 0, 0, item}))
            return false;
        }
        for (int32_t half = 0; half < (narrow ? 1 : 2); ++half) {
          if (!each(PageUse{Fill::kInputs, false, Buffer::V_CACHE, half * kTileInner, value, layer, 0,
                            value_boxes, value_boxes, 0, 0, item}))
            return false;
        }
      }
    }
  }
  return true;
}

// Calls each(PageUse) for every page of the instruction until it gives false.
template <class Each>
MK_FN bool for_pages(const Dims& d, const StepView& s, const Task& task, Each&& each) {
  if (task.is(Opcode::attention)) {
    const int32_t slot = operands<Attention>(task.record).slot;
    for (int32_t item = s.slot_items[slot]; item < s.slot_items[slot + 1]; ++item) {
      if (!item_pages(d, s, item, task.where.layer, each)) return false;
    }
    return true;
  }
  Matmul m;
  if (!matmul_of(d, task.record, m)) return true;
  return uses_dots(d) ? dot_pages(d, m, task.where.layer, each) : tensor_pages(d, m, task.where.layer, each);
}

}  // namespace mk
