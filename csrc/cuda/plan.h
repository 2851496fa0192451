// Which pages an instruction takes: a function of its record, the sizes and the step table. Everyone who
// touches pages walks the list that `for_pages` gives, in its order. Each kind of instruction hands out all
// of its pages at one place, so that the code of those who walk is there but once.
//
// A page of tiles is made of boxes of [kBoxRows rows][128 bytes], a page of pieces of kPieces rows of up to
// kPiece elements.
#pragma once
#include "../common/index.h"
#include "block.h"

namespace mk {

constexpr int kBoxBytes = kBoxRows * 128, kHalfPage = kPageBytes / 2, kPieceBytes = kPiece * 2;

enum class Fill : int32_t { kWeights, kInputs, kOutput };

// A piece of a page: where it lies in its buffer, in elements and rows, and in its page.
struct Box {
  int32_t x, y;
  int32_t at;
  uint32_t bytes;
};

// What lies in a page: boxes column by column, `per` of them in each.
struct PageUse {
  Fill fill;
  bool pieces;  // not tiles
  Buffer buffer;
  int32_t x, y, z;  // of the first column: elements, its row 0, and matrices of the buffer
  int32_t row;      // of that column, where the page begins
  int32_t boxes, per;
  int32_t step;   // pieces: rows between rows
  int32_t inner;  // pieces: elements of a whole row
  int32_t item;   // attention: whose counters must hold; -1 elsewhere

  // Calls each(Box) in order.
  template <class Each>
  MK_FN void for_boxes(Each&& each) const {
    int32_t left = boxes, r = row, column = x, at = 0;
    MK_LOOP for (int32_t first = 0; left > 0; first += kHalfPage) {
      if (!pieces) at = first;
      const uint32_t bytes = column_bytes(column);
      MK_LOOP for (; r < per && left > 0; ++r, --left) {
        each(Box{column, y + r * (pieces ? step : kBoxRows), at, bytes});
        at += pieces ? kPieceBytes : kBoxBytes;
      }
      r = 0;
      column += pieces ? kPiece : kTileInner;
    }
  }
  MK_FN uint32_t bytes() const {
    if (!pieces || row + boxes <= per) return static_cast<uint32_t>(boxes) * column_bytes(x);
    uint32_t n = 0;
    for_boxes([&](const Box& box) { n += box.bytes; });
    return n;
  }

 private:
  // Of a box of the column at `column`.
  MK_FN uint32_t column_bytes(int32_t column) const {
    return pieces ? static_cast<uint32_t>(lower(kPiece, inner - column)) * 2 : kBoxBytes;
  }
};

// The numerics class. The device's code is for one, which leaves out half of it; the host's is for both.
MK_FN bool uses_dots([[maybe_unused]] const Sizes& d) {
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
MK_FN bool matmul_of(const Sizes& d, const int32_t* record, Matmul& m) {
  const QkvRope& op =
      shared_operands<QkvRope, OProj, OPartial, GateUpSilu, DownProj, DownPartial, LmHead>(record);
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
MK_FN int32_t chunk_cols(const Matmul& m) { return m.halves == 2 ? kChunk / 2 : kChunk; }
// Columns of a page of results.
MK_FN int32_t output_cols(const Matmul& m) { return m.output == Buffer::X ? 32 : 64; }

template <class Each>
MK_FN bool tensor_pages(const Sizes& d, const Matmul& m, int32_t layer, Each&& each) {
  constexpr int32_t kPer = kTileRows / kBoxRows;
  const int32_t row_boxes = ceil_div(m.rows, kBoxRows);
  const int32_t matrix = weight_layer(m, layer) * m.halves;
  const bool reduce = m.output == Buffer::REDUCE;
  const int32_t out_z = reduce ? d.rank : 0;
  const int32_t out_y = reduce ? reduce_place(d, m.row) : m.row;
  MK_LOOP for (int32_t done = 0; done < m.cols; done += chunk_cols(m)) {
    const int32_t col = m.col + done, cols = lower(m.cols - done, chunk_cols(m));
    const int32_t outputs = m.by_pages ? cols : 0;
    // Of a K step: the inputs, then weights of columns from 0 on, then of gate and up the latter, else of
    // columns from kTileRows on.
    const int32_t members = m.halves == 2 || cols > kTileRows ? 3 : 2;
    int32_t x = 0, member = 0, out = 0;
    while (x < m.k || out < outputs) {
      PageUse use{Fill::kInputs, false, m.inputs, x, m.row, 0, 0, row_boxes, kPer, 0, 0, -1};
      if (x >= m.k) {
        use = {Fill::kOutput, false, m.output, col + out, out_y, out_z, 0, row_boxes, kPer, 0, 0, -1};
        out += output_cols(m);
      } else {
        if (member > 0) {
          const int32_t first = m.halves == 1 && member == 2 ? kTileRows : 0;
          const int32_t boxes = ceil_div(lower(cols - first, kTileRows), kBoxRows);
          use = {Fill::kWeights, false, m.weights, x, col + first, matrix + (member - 1) % m.halves, 0,
                 boxes,          kPer,  0,         0, -1};
        }
        if (++member == members) {
          member = 0;
          x += kTileInner;
        }
      }
      if (!each(use)) return false;
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
MK_FN bool dot_pages(const Sizes& d, const Matmul& m, int32_t layer, Each&& each) {
  const int32_t units = ceil_div(m.cols, 2 * kPieces / m.halves), step = 2 / m.halves;
  const int32_t cells = m.rows * ceil_div(m.k, kPiece), matrix = weight_layer(m, layer);
  const int32_t other = m.halves == 2 ? d.rank_ffn() : 1;     // from rows of member 0 to those of member 1
  int32_t left = 2 * ceil_div(m.k, kPiece) * units, lap = 0;  // weight pages; of this lap
  int32_t x = 0, member = 0, first = 0;                       // of the next weight page; its first column
  int32_t cell = cells;                                       // of the next input page
  while (true) {
    if (lap == 0 && cell >= cells) {
      if (left == 0) return true;
      lap = lower(left, lap_weights(m));
      left -= lap;
      cell = 0;
    }
    PageUse use;
    if (lap > 0) {
      const int32_t rows = m.cols - first - (m.halves == 2 ? 0 : member);
      use = {Fill::kWeights,
             true,
             m.weights,
             x,
             m.col + first + member * other,
             matrix,
             0,
             lower(kPieces, ceil_div(rows, step)),
             kPieces,
             step,
             m.k,
             -1};
      --lap;
      member ^= 1;
      if (member == 0) x += kPiece;
      if (x >= m.k) {
        x = 0;
        first += 2 * kPieces / m.halves;
      }
    } else {
      use = {Fill::kInputs, true, m.inputs,      cell / m.rows * kPiece,
             m.row,         0,    cell % m.rows, lower(kPieces, cells - cell),
             m.rows,        1,    m.k,           -1};
      cell += kPieces;
    }
    if (!each(use)) return false;
  }
}

// Attention: the query rows of an item (row, then head of the group) in tiles, units = KV heads x tiles, a
// pass of one unit per consumer warp; of each pass every KV block, of that every KV head of the pass, its
// keys, then its values: keys [element][token] in halves of 64 tokens, values [token][element] in halves of
// 64 elements. Narrow heads have both halves of their keys in one page. A padding item takes one page with
// nothing in it, which says that its counters hold.
template <class Each>
MK_FN bool item_pages(const Sizes& d, const StepView& s, int32_t item, int32_t layer, Each&& each) {
  const bool padding = s.item_seq[item] < 0;
  const int32_t tiles = padding ? 1 : ceil_div(s.item_rows[item] * d.group_size(), kQueryTile);
  const int32_t units = padding ? 1 : s.item_kv_heads[item] * tiles;
  const bool narrow = d.head_dim <= kTileInner;
  const int32_t key_boxes = ceil_div(d.head_dim, kBoxRows), halves = narrow ? 1 : 2;
  const int32_t pages = padding ? 1 : 2 * halves;
  MK_LOOP for (int32_t pass = 0; pass < units; pass += kConsumerWarps) {
    const int32_t first = s.item_kv_head[item] + pass / tiles;
    const int32_t last = s.item_kv_head[item] + (lower(pass + kConsumerWarps, units) - 1) / tiles;
    int32_t blocks = padding ? 1 : s.item_blocks[item];
    MK_LOOP for (int32_t block = s.item_block[item]; blocks > 0; ++block, --blocks) {
      MK_LOOP for (int32_t head = first; head <= last; ++head) {
        const int64_t seq = s.item_seq[here(item)];
        const int32_t* table = s.block_tables + seq * d.pages_per_seq();
        const int32_t matrix = padding ? 0 : table[block] * d.rank_kv_heads() + head;
        MK_LOOP for (int32_t i = 0; i < pages; ++i) {
          PageUse use{Fill::kInputs,
                      false,
                      Buffer::V_CACHE,
                      (i - halves) * kTileInner,
                      matrix * d.page,
                      layer,
                      0,
                      kTileRows / kBoxRows,
                      kTileRows / kBoxRows,
                      0,
                      0,
                      item};
          if (i < halves) {
            use.buffer = Buffer::K_CACHE;
            use.x = i * kTileInner;
            use.y = matrix * d.head_dim;
            use.boxes = padding ? 0 : narrow ? 2 * key_boxes : key_boxes;
            use.per = key_boxes;
          }
          if (!each(use)) return false;
        }
      }
    }
  }
  return true;
}

// Calls each(PageUse) for every page of the instruction until it gives false.
template <class Each>
MK_FN bool for_pages(const Sizes& d, const StepView& s, const Task& task, Each&& each) {
  if (task.is(Opcode::attention)) {
    const Attention& op = operands<Attention>(task.record);
    MK_LOOP for (int32_t item = s.slot_items[op.slot]; item < s.slot_items[op.slot + 1]; ++item) {
      if (!item_pages(d, s, item, task.where.layer, each)) return false;
    }
    return true;
  }
  Matmul m;
  if (!matmul_of(d, task.record, m)) return true;
  return uses_dots(d) ? dot_pages(d, m, task.where.layer, each) : tensor_pages(d, m, task.where.layer, each);
}

}  // namespace mk
