// The pages that an instruction takes, as a function of its record, the sizes and the step table. Every role
// walks the list of `for_pages` in its order. For each kind of instruction, `each` is called in a single
// place, because the role's code is inlined there and should exist only once.
//
// A page of tiles consists of boxes of [kBoxRows rows][128 bytes]; a page of pieces consists of kPieces rows
// of up to kPiece elements. A complete page is loaded by a single copy.
#pragma once
#include "../common/index.h"
#include "block.h"

namespace mk {

constexpr int kBoxBytes = kBoxRows * 128, kHalfPage = kPageBytes / 2, kPieceBytes = kPiece * 2;
constexpr int kPageBoxes = kTileRows / kBoxRows;

enum class Fill : int32_t { kWeights, kInputs, kOutput };

// A box or piece of a page: its place in its buffer, in elements and rows, and its place in the page.
struct Box {
  int32_t x, y;
  int32_t at;
  uint32_t bytes;
};

// The contents of a page: boxes column by column, `per` of them in each column.
struct PageUse {
  Fill fill;
  bool pieces = false;  // not tiles
  bool whole = false;   // one copy loads the whole page
  Buffer buffer;
  int32_t x, y, z = 0;  // of the first column: its first element, its row 0, its matrix in the buffer
  int32_t row = 0;      // the row of that column where the page begins
  int32_t boxes, per = kPageBoxes;
  int32_t step = 1;    // pieces: the distance between rows
  int32_t member = 0;  // weights of dots: which page of the pair
  int32_t other = 0;   // pieces: the distance, in rows, from member 0's rows to member 1's
  int32_t inner = 0;   // pieces: elements of a complete row
  int32_t item = -1;   // attention: the item's number in the slot; otherwise -1
  // attention: whether it is the item's first page, before which the item's counters must be satisfied
  bool opens = false;
  int32_t turn = 0;  // weights of tensor cores: SM turn % kSms of the worker loads the page

  // Calls each(Box) for every stride-th box, starting with number `first`.
  template <class Each>
  MK_FN void for_boxes(int32_t first, int32_t stride, Each&& each) const {
    MK_LOOP for (int32_t i = first; i < boxes; i += stride) {
      int32_t r = row + i, c = 0;
      MK_LOOP for (; r >= per; r -= per) c += 1;  // at most seven times
      const int32_t column = x + c * (pieces ? kPiece : kTileInner);
      const int32_t at = pieces ? i * kPieceBytes : c * kHalfPage + r * kBoxBytes;
      const int32_t row = y + (pieces ? member * other + r * step : r * kBoxRows);
      each(Box{column, row, at, column_bytes(column)});
    }
  }
  MK_FN uint32_t bytes() const {
    if (whole) return kPageBytes;
    if (!pieces || row + boxes <= per) return static_cast<uint32_t>(boxes) * column_bytes(x);
    uint32_t n = 0;
    for_boxes(0, 1, [&](const Box& box) { n += box.bytes; });
    return n;
  }

 private:
  // The bytes of a box in the column at `column`.
  MK_FN uint32_t column_bytes(int32_t column) const {
    return pieces ? static_cast<uint32_t>(lower_of(kPiece, inner - column)) * 2 : kBoxBytes;
  }
};

// The tensor map of a buffer for loads of whole pages, or for loads and stores of boxes.
MK_FN const TensorMap& map_of(const Params& params, int32_t rank, Buffer buffer, bool whole) {
  return params.maps[(rank * kBuffers + static_cast<int32_t>(buffer)) * kMaps + (whole ? 1 : 0)];
}

// Bit b: buffer b has a copy for each layer.
MK_DIMS_FN constexpr uint64_t layered_buffers() {
  uint64_t bits = 0;
  for (int b = 0; b < kBuffers; ++b) bits |= uint64_t{kLayered[b]} << b;
  return bits;
}
constexpr uint64_t kLayeredBuffers = layered_buffers();

// Whether matmuls are dot products on the CUDA cores ("dots"), not on tensor cores (Dims.units).
// Device code is compiled for one of the two, without the code of the other; host code is for both.
MK_FN bool uses_dots([[maybe_unused]] const Sizes& d) {
#if defined(MK_UNITS)
  return MK_UNITS == static_cast<int>(Units::kDots);
#else
  return d.units == static_cast<int32_t>(Units::kDots);
#endif
}

// A matmul: a tile of inputs [.][inner] times weights [.][inner] transposed. Two matrices lie one after the
// other, with `width` rows each; an output column then uses one row of each.
struct Matmul {
  const Phase& phase;
  const Tile& tile;

  MK_FN bool two() const { return phase.matrices == 2; }
  // Whether the matmul normalises its input rows itself, so that they take no pages.
  MK_FN bool normed() const { return phase.norm != Buffer::kNone; }
};
MK_FN Matmul matmul_of(const Task& task) { return {task.phase, operands<Tile>(task.record)}; }

// The number of the first matrix that the task uses in the buffer of its phase's weights.
MK_FN int32_t first_matrix(const Sizes& d, const Task& task, int32_t matrices) {
  const bool layered = kLayeredBuffers >> static_cast<int32_t>(task.phase.weights) & 1;
  return layered ? weight_layer(task.phase, d, task.where.layer) * matrices : 0;
}

// Tensor cores: the columns are divided into chunks. The pages of a chunk are its operands, in steps of
// kTileInner along the inner length, and then its results.
MK_FN int32_t chunk_cols(const Matmul& m) { return m.two() ? kChunk / 2 : kChunk; }
// Whether the results leave through output pages.
MK_FN bool by_pages(Result result) {
  switch (result) {
    case Result::kResidual:
    case Result::kPartial:
    case Result::kGated:
      return true;
    case Result::kNone:
    case Result::kHeads:
    case Result::kLogits:
      break;
  }
  return false;
}
// Columns of a page of results: float32 for the residual, otherwise bf16.
MK_FN int32_t output_cols(const Matmul& m) { return m.phase.result == Result::kResidual ? 32 : 64; }

template <class Each>
MK_FN bool tensor_pages(const Sizes& d, const Task& task, Each&& each) {
  const Matmul m = matmul_of(task);
  const bool partial = m.phase.result == Result::kPartial;
  const int32_t row_boxes = ceil_div(m.tile.rows, kBoxRows);
  const int32_t matrix = first_matrix(d, task, m.phase.matrices);
  const int32_t out_z = partial ? d.rank : 0;
  const int32_t out_y = partial ? d.reduce_place(m.tile.row) : m.tile.row;
  MK_LOOP for (int32_t done = 0; done < m.tile.cols; done += chunk_cols(m)) {
    const int32_t col = m.tile.col + done, cols = lower_of(m.tile.cols - done, chunk_cols(m));
    const int32_t outputs = by_pages(m.phase.result) ? cols : 0;
    // The pages of a step: the inputs, then the weights of the chunk's columns from 0 on, and then those of
    // the second matrix if there are two, otherwise the weights of the columns from kTileRows on.
    const int32_t members = m.two() || cols > kTileRows ? 3 : 2;
    int32_t x = 0, member = 0, out = 0;
    while (x < m.phase.inner || out < outputs) {
      PageUse use{.fill = Fill::kInputs,
                  .whole = row_boxes == kPageBoxes,
                  .buffer = m.phase.inputs,
                  .x = x,
                  .y = m.tile.row,
                  .boxes = row_boxes};
      if (x >= m.phase.inner) {
        use = {.fill = Fill::kOutput,
               .buffer = m.phase.output,
               .x = col + out,
               .y = out_y,
               .z = out_z,
               .boxes = row_boxes};
        out += output_cols(m);
      } else {
        if (member > 0) {
          const int32_t first = !m.two() && member == 2 ? kTileRows : 0;
          const int32_t boxes = ceil_div(lower_of(cols - first, kTileRows), kBoxRows);
          const int32_t z = m.two() ? matrix + member - 1 : matrix;
          use = {.fill = Fill::kWeights,
                 .whole = boxes == kPageBoxes,
                 .buffer = m.phase.weights,
                 .x = x,
                 .y = col + first,
                 .z = z,
                 .boxes = boxes,
                 .turn = members == 3 ? member - 1 : x / kTileInner};
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

// Dot products: the columns are divided into units of 16 (8 of each matrix if there are two), and the inner
// length into pieces. A piece of a unit is two pages, members 0 and 1: the unit's even and odd columns, or
// the columns of the first and of the second matrix. The input rows are loaded again in every lap of the
// ring, after the lap's weights: piece p of row r has number p * rows + r.
MK_FN int32_t unit_cols(const Matmul& m) { return m.two() ? kPieces : 2 * kPieces; }
MK_FN int32_t dot_units(const Matmul& m) {
  static_assert(kPieces == 8, "the code shifts, because a division takes as long as a page");
  return (m.tile.cols + unit_cols(m) - 1) >> (m.two() ? 3 : 4);
}
MK_FN int32_t dot_pieces(const Matmul& m) {
  return m.normed() ? 0 : m.tile.rows * ceil_div(m.phase.inner, kPiece);
}
MK_FN int32_t dot_input_pages(const Matmul& m) { return ceil_div(dot_pieces(m), kPieces); }
// The number of weight pages of the instruction, and of a lap. The latter is even, so that both members of a
// piece are in the same lap.
MK_FN int32_t dot_weight_pages(const Matmul& m) { return 2 * ceil_div(m.phase.inner, kPiece) * dot_units(m); }
MK_FN int32_t lap_weights(const Matmul& m) { return (kPages - dot_input_pages(m)) & ~1; }
// A table with four bits for each number of pieces: how many units of that many pieces fit kAheadPages. It is
// a table because a division takes as long as a page.
MK_DIMS_FN constexpr uint32_t ahead_units() {
  uint32_t bits = 0;
  for (int pieces = 1; pieces < 8; ++pieces)
    bits |= static_cast<uint32_t>(kAheadPages / 2 / pieces) << 4 * pieces;
  return bits;
}
static_assert(kAheadPages / 2 < 8, "units of eight pieces and more never fit");
constexpr uint32_t kAheadUnits = ahead_units();

// The number of columns, in whole units, whose weight pages are prefetched into the L2 cache before the ring
// has room for them.
MK_FN int32_t ahead_cols(const Matmul& m) {
  const int32_t pieces = ceil_div(m.phase.inner, kPiece);
  return pieces < 8 ? static_cast<int32_t>(kAheadUnits >> 4 * pieces & 7) * unit_cols(m) : 0;
}

template <class Each>
MK_FN bool dot_pages(const Sizes& d, const Task& task, Each&& each) {
  const Matmul m = matmul_of(task);
  const int32_t rows = m.tile.rows, pieces = dot_pieces(m);
  int32_t left = dot_weight_pages(m), lap = 0;   // weight pages left in all; and in this lap
  int32_t x = 0, first = 0;                      // the next weight page's x and first column
  int32_t piece = pieces, in_x = 0, in_row = 0;  // of the next input page
  const int32_t whole = kPieces / rows;          // complete columns of an input page
  while (true) {
    if (lap == 0 && piece >= pieces) {
      if (left == 0) return true;
      lap = lower_of(left, lap_weights(m));
      left -= lap;
      piece = in_x = in_row = 0;
    }
    PageUse use;
    if (lap > 0) {
      const int32_t columns = m.tile.cols - first, member = lap & 1;  // a lap consists of pairs
      use = {.fill = Fill::kWeights,
             .pieces = true,
             // the host encodes a map only for such an inner length
             .whole = m.phase.inner % kPieceInner == 0 && columns >= unit_cols(m),
             .buffer = m.phase.weights,
             .x = x,
             .y = m.tile.col + first,
             .z = first_matrix(d, task, 1),
             .boxes = lower_of(kPieces, m.two() ? columns : (columns + 1 - member) >> 1),
             .per = kPieces,
             .step = m.two() ? 1 : 2,
             .member = member,
             .other = m.two() ? m.phase.width : 1,
             .inner = m.phase.inner};
      --lap;
      if (member) x += kPiece;
      if (x >= m.phase.inner) {
        x = 0;
        first += unit_cols(m);
      }
    } else {
      use = {.fill = Fill::kInputs,
             .pieces = true,
             .buffer = m.phase.inputs,
             .x = in_x,
             .y = m.tile.row,
             .row = in_row,
             .boxes = lower_of(kPieces, pieces - piece),
             .per = rows,
             .inner = m.phase.inner};
      piece += kPieces;
      in_x += whole * kPiece;
      in_row += kPieces - whole * rows;
      if (in_row >= rows) {
        in_row -= rows;
        in_x += kPiece;
      }
    }
    if (!each(use)) return false;
  }
}

// The first item of an attention task and the end of its slot's items. The SMs of a worker take a
// slot's items in turn.
MK_FN int32_t first_item(const StepView& s, const Task& task) {
  return s.slot_items[operands<Attention>(task.record).slot] + (kSms == 1 ? 0 : task.sm);
}
MK_FN int32_t end_item(const StepView& s, const Task& task) {
  return s.slot_items[operands<Attention>(task.record).slot + 1];
}

// Attention: the query rows of an item (ordered by row, then by head of the group) are divided into tiles. A
// unit is one tile of one KV head, and a pass has one unit per consumer warp. In each pass, for each KV block
// and for each KV head of the pass, the pages of the keys come first, then those of the values: keys
// [element][token] in halves of 64 tokens, values [token][element] in halves of 64 elements. Narrow heads
// have both halves of their keys in one page. A padding item takes one empty page, which is full once the
// item's counters are satisfied. The task's empty pages follow the slot's items.
template <class Each>
MK_FN bool item_pages(const Sizes& d, const StepView& s, const Task& task, int32_t item, Each&& each) {
  const bool behind = kSms > 1 && item >= end_item(s, task);
  const bool padding = behind || s.item_seq[item] < 0;
  const int32_t tiles = padding ? 1 : ceil_div(s.item_rows[item] * d.group_size(), kQueryTile);
  const int32_t units = padding ? 1 : s.item_kv_heads[item] * tiles;
  const bool narrow = d.head_dim <= kTileInner;
  const int32_t key_boxes = ceil_div(d.head_dim, kBoxRows), halves = narrow ? 1 : 2;
  const int32_t pages = padding ? 1 : 2 * halves;
  bool opens = !behind;
  MK_LOOP for (int32_t pass = 0; pass < units; pass += kConsumerWarps) {
    const int32_t first = s.item_kv_head[item] + pass / tiles;
    const int32_t last = s.item_kv_head[item] + (lower_of(pass + kConsumerWarps, units) - 1) / tiles;
    int32_t blocks = behind ? task.empty : padding ? 1 : s.item_blocks[item];
    MK_LOOP for (int32_t block = s.item_block[item]; blocks > 0; ++block, --blocks) {
      MK_LOOP for (int32_t head = first; head <= last; ++head) {
        const int64_t seq = s.item_seq[here(item)];
        const int32_t* table = s.block_tables + seq * d.pages_per_seq();
        const int32_t matrix = padding ? 0 : table[block] * d.rank_kv_heads() + head;
        MK_LOOP for (int32_t i = 0; i < pages; ++i) {
          PageUse use{.fill = Fill::kInputs,
                      .buffer = Buffer::V_CACHE,
                      .x = (i - halves) * kTileInner,
                      .y = matrix * d.kv_page,
                      .z = task.where.layer,
                      .boxes = kPageBoxes,
                      .item = item,
                      .opens = opens};
          opens = false;
          if (i < halves) {
            use.buffer = Buffer::K_CACHE;
            use.x = i * kTileInner;
            use.y = matrix * d.head_dim;
            use.boxes = padding ? 0 : narrow ? 2 * key_boxes : key_boxes;
            use.per = key_boxes;
          }
          use.whole = use.boxes == kPageBoxes && use.per == kPageBoxes;
          if (!each(use)) return false;
        }
      }
    }
  }
  return true;
}

// The number of pages that `item_pages` lists.
MK_FN int32_t item_page_count(const Sizes& d, const StepView& s, int32_t item) {
  if (s.item_seq[item] < 0) return 1;
  const int32_t tiles = ceil_div(s.item_rows[item] * d.group_size(), kQueryTile);
  // `passes`: how many passes contain a head, summed over the heads. `unit`: the present head's
  // first.
  int32_t passes = 0, unit = 0;
  MK_LOOP for (int32_t head = s.item_kv_heads[item]; head > 0; --head, unit += tiles) passes +=
      (unit + tiles - 1) / kConsumerWarps - unit / kConsumerWarps + 1;
  return passes * s.item_blocks[item] * (d.head_dim <= kTileInner ? 2 : 4);
}

// How many more pages the slot's items take on a worker's SM 0 than on its SM 1.
MK_FN int32_t pages_ahead(const Sizes& d, const StepView& s, int32_t slot) {
  int32_t ahead = 0, sign = 1;
  MK_LOOP for (int32_t item = s.slot_items[slot]; item < s.slot_items[slot + 1]; ++item, sign = -sign)
      ahead += sign * item_page_count(d, s, item);
  return ahead;
}

// Calls each(PageUse) for every page of the instruction until it returns false.
template <class Each>
MK_FN bool for_pages(const Sizes& d, const StepView& s, const Task& task, Each&& each) {
  switch (task.phase.operation) {
    case Operation::kMatmul:
      return uses_dots(d) ? dot_pages(d, task, each) : tensor_pages(d, task, each);
    case Operation::kAttention: {
      const auto end = [&] { return end_item(s, task) + (kSms > 1 && task.empty > 0 ? kSms : 0); };
      MK_LOOP for (int32_t item = first_item(s, task); item < end(); item += kSms) {
        if (!item_pages(d, s, task, item, each)) return false;
      }
      break;
    }
    case Operation::kJoin:
    case Operation::kDrain:
    case Operation::kGather:
    case Operation::kRope:
    case Operation::kNorm:
    case Operation::kReduce:
    case Operation::kSample:
      break;
  }
  return true;
}

}  // namespace mk
