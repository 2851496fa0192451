// Lists the shared-memory pages that an instruction uses, in order. The list depends only on the
// instruction's record, the sizes and the step table, so every role (loaders, consumers, storer) gets
// the same list from `for_pages`. The callback `each` is inlined. To keep the code small, each kind of
// instruction calls it in only one place.
//
// A page has one of two formats. A page of tiles has boxes of kBoxRows rows x 128 bytes. A page of
// pieces has up to kPieces pieces, each with up to kPiece successive elements of a row. If
// PageUse::whole is set, one bulk copy loads the page; otherwise each box or piece is copied separately.
#pragma once
#include "../common/index.h"
#include "block.h"
#include "routes.h"

namespace mk {

constexpr int kBoxBytes = kBoxRows * 128, kHalfPage = kPageBytes / 2, kPieceBytes = kPiece * 2;
constexpr int kPageBoxes = kTileRows / kBoxRows;

enum class Fill : int32_t { kWeights, kInputs };

// One part of a page: a TMA box, or a piece of one row. It begins at element x of row y of the buffer, and at
// byte `at` of the page. It has `bytes` bytes.
struct Box {
  int32_t x, y;
  int32_t at;
  uint32_t bytes;
};

// The contents of a page: `boxes` boxes or pieces. In the buffer, they form columns that are one box or
// piece wide. They are numbered column by column, with `per` of them in a column.
struct PageUse {
  Fill fill = Fill::kInputs;
  bool pieces = false;  // the format: pieces if true, otherwise tiles
  bool whole = false;   // whether one bulk copy loads the page; false if the page is not full
  Buffer buffer;
  // Where the first column begins in the buffer: element x, row y, matrix number z.
  int32_t x = 0, y, z = 0;
  int32_t row = 0;  // index, in the first column, of the page's first box or piece
  int32_t boxes, per = kPageBoxes;
  int32_t step = 1;    // pieces: distance between successive pieces, in rows of the buffer
  int32_t member = 0;  // weights of dot products: 0 or 1, the page's number in its pair
  int32_t other = 0;   // weights of dot products: how many rows after page 0's first row page 1 begins
  int32_t inner = 0;   // pieces: elements per row of the buffer
  int32_t item = -1;   // attention: the item's index in the step table; otherwise -1

  // attention: whether this is the first page of an item. Before it loads such a page, the loader waits for
  // the item's counters.
  bool opens = false;

  // Calls each(Box) for every stride-th box or piece of the page, starting with number `first`.
  template <class Each>
  MK_FN void for_boxes(int32_t first, int32_t stride, Each&& each) const {
    MK_LOOP for (int32_t i = first; i < boxes; i += stride) {
      int32_t r = row + i, c = 0;
      MK_LOOP for (; r >= per; r -= per) c += 1;  // at most 7 times: boxes <= 8
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
  // Returns the size in bytes of a box or, with `pieces`, of the piece that begins at element `column`.
  MK_FN uint32_t column_bytes(int32_t column) const {
    return pieces ? static_cast<uint32_t>(lower_of(kPiece, inner - column)) * 2 : kBoxBytes;
  }
};

// Returns the tensor map of a buffer for copies of a whole page, or of one box if `whole` is not set.
MK_FN const TensorMap& map_of(const Params& params, int32_t rank, Buffer buffer, bool whole) {
  return params.maps[(rank * kBuffers + static_cast<int32_t>(buffer)) * kMaps + (whole ? 1 : 0)];
}

// Whether matmuls are computed as dot products on the CUDA cores ("dots") instead of on tensor cores
// (Dims.units). Device code is compiled for only one of these two cases, host code for both.
MK_FN bool uses_dots(const Sizes& d) {
  return (kUnits == Units::kCore ? static_cast<Units>(d.units) : kUnits) == Units::kDots;
}

// Experts are always computed as dot products, also in programs whose matmuls use tensor cores.
MK_FN bool by_dots(const Sizes& d, const Task& task) { return uses_dots(d) || is_experts(task); }

// A matmul instruction, or a part of an experts instruction (routes.h explains its rows). It multiplies
// the tile's rows of the inputs [rows][inner] by the transpose of the weights [columns][inner]. With two
// weight matrices (gate and up), the second follows the first in the buffer. Each has `width` rows, and
// an output column uses one row of each.
struct Matmul {
  const Phase& phase;
  const Tile& tile;

  MK_FN int32_t row() const { return kOneRow ? 0 : tile.row; }
  MK_FN int32_t rows() const { return kOneRow ? 1 : tile.rows; }
  MK_FN bool two() const { return phase.matrices == 2; }
  // Whether the matmul normalises its input rows itself. In that case it reads the rows from global memory,
  // not from pages.
  MK_FN bool normed() const { return phase.norm != Buffer::kNone; }
};
MK_FN Matmul matmul_of(const Task& task) { return {task.phase, operands<Tile>(task.record)}; }

// Returns the layer whose weights the task uses; 0 if its weight buffer is not divided by layer.
MK_FN int32_t layer_of_weights(const Sizes& d, const Task& task) {
  const bool layered = kLayered >> static_cast<int32_t>(task.phase.weights) & 1;
  return layered ? weight_layer(task.phase, d, task.where.layer) : 0;
}
// Returns the index, in the task's weight buffer, of the first matrix that the task uses. A layer has
// `matrices` matrices. For experts, an expert's gate and up projections count as one matrix.
MK_FN int32_t first_matrix(const Sizes& d, const Task& task, int32_t matrices) {
  if (is_experts(task)) return layer_of_weights(d, task) * d.rank_experts() + part_of(task).expert;
  return layer_of_weights(d, task) * matrices;
}

// Returns how many output columns a matmul on tensor cores computes at a time (a chunk).
MK_FN int32_t chunk_cols(const Matmul& m) { return m.two() ? kChunk / 2 : kChunk; }
// Whether the results are written to output pages, which the storer copies to global memory.
MK_FN bool by_pages(Result result) {
  return result != Result::kNone && result != Result::kHeads && result != Result::kLogits;
}
// Returns the number of columns per output page. Results of the kinds kResidual and kStored are float32,
// all others bf16.
MK_FN int32_t output_cols(const Matmul& m) {
  return m.phase.result == Result::kResidual || m.phase.result == Result::kStored ? 32 : 64;
}

// Whether the task uses stages (block.h) instead of pages: a matmul on tensor cores does.
MK_FN bool in_stages(const Sizes& d, const Task& task) {
  return !uses_dots(d) && task.is(Operation::kMatmul);
}

// A chunk of a matmul on tensor cores: `cols` columns from column `col` on. Each k step takes a stage, with
// a page of inputs and one of weights for the first kTileRows columns. A third page has the second matrix
// or, with one matrix, the other columns. Results may take further stages, with up to kStepPages pages each.
struct Chunk {
  const Sizes& d;
  Matmul m;
  int32_t matrix, col, cols;

  MK_FN int32_t steps() const { return ceil_div(m.phase.inner, kTileInner); }
  MK_FN int32_t operands() const { return m.two() || cols > kTileRows ? 3 : 2; }
  MK_FN int32_t outputs() const { return by_pages(m.phase.result) ? ceil_div(cols, output_cols(m)) : 0; }
  // Returns a page of the first k step's operands: inputs if `member` is 0, otherwise weights.
  MK_FN PageUse operand(int32_t member) const {
    if (member == 0) return page(m.phase.inputs, m.tile.row, 0, m.tile.rows);
    const int32_t first = member == 2 && !m.two() ? kTileRows : 0, z = m.two() ? matrix + member - 1 : matrix;
    return page(m.phase.weights, col + first, z, lower_of(cols - first, kTileRows));
  }
  MK_FN PageUse output(int32_t i) const {
    const bool partial = m.phase.result == Result::kPartial;
    const int32_t y = partial ? d.reduce_place(m.tile.row) : m.tile.row;
    PageUse out = page(m.phase.output, y, partial ? d.rank : 0, m.tile.rows);
    out.x = col + i * output_cols(m);
    return out;
  }

 private:
  MK_FN static PageUse page(Buffer buffer, int32_t y, int32_t z, int32_t rows) {
    const int32_t boxes = ceil_div(rows, kBoxRows);
    return {.whole = boxes == kPageBoxes, .buffer = buffer, .y = y, .z = z, .boxes = boxes};
  }
};

// Calls each(Chunk) for a tensor-core matmul's chunks. Stops and returns false once `each` does.
template <class Each>
MK_FN bool for_chunks(const Sizes& d, const Task& task, Each&& each) {
  if (!in_stages(d, task)) return true;
  const Matmul m = matmul_of(task);
  const int32_t matrix = first_matrix(d, task, m.phase.matrices);
  MK_LOOP for (int32_t done = 0; done < m.tile.cols; done += chunk_cols(m)) {
    const int32_t cols = lower_of(m.tile.cols - done, chunk_cols(m));
    if (!each(Chunk{d, m, matrix, m.tile.col + done, cols})) return false;
  }
  return true;
}

// Pages of a matmul that is computed as dot products. The output columns are divided into units of 16 (8 of
// each matrix if there are two), and the inner dimension into pieces of kPiece elements. A unit needs a pair
// of weight pages for each piece. With one matrix, one page of the pair has the even columns and the other
// page the odd ones. With two matrices, each page has the columns of one matrix.
//
// The ring of pages is too small for all weights, so it is filled several times, in "laps". Each lap loads
// weight pages and then all input rows, so the inputs are loaded again in every lap. Piece p of input row r
// has number p * rows + r.

MK_FN int32_t unit_cols(const Matmul& m) { return m.two() ? kPieces : 2 * kPieces; }
MK_FN int32_t dot_units(const Matmul& m) {
  // A shift replaces the integer division, which would take as long as the work on a page.
  static_assert(kPieces == 8, "kPieces must be 8: dot_units shifts by 3 or 4 instead of dividing");
  return (m.tile.cols + unit_cols(m) - 1) >> (m.two() ? 3 : 4);
}
MK_FN int32_t dot_pieces(const Matmul& m) {
  return m.normed() || kOneRow ? 0 : m.rows() * ceil_div(m.phase.inner, kPiece);
}
MK_FN int32_t dot_input_pages(const Matmul& m) { return ceil_div(dot_pieces(m), kPieces); }
// How many weight pages a dot-product matmul uses in all, and how many fit in the ring beside the inputs.
// Both are even, because weight pages come in pairs.
MK_FN int32_t dot_weight_pages(const Matmul& m) { return 2 * ceil_div(m.phase.inner, kPiece) * dot_units(m); }
MK_FN int32_t lap_weights(const Sizes& d, const Matmul& m) {
  return higher_of(d.ring_pages - dot_input_pages(m), 2) & ~1;
}
// Returns page `member` (0 or 1) of a pair of weight pages. The pair begins at element x of the inner
// dimension and at column `first` of the tile.
MK_FN PageUse weight_page(const Sizes& d, const Task& task, int32_t member, int32_t x, int32_t first) {
  const Matmul m = matmul_of(task);
  const int32_t columns = m.tile.cols - first;
  return {.fill = Fill::kWeights,
          .pieces = true,
          // The host makes a map for whole pages only if the inner length is a multiple of kPieceInner.
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
}

template <class Each>
MK_FN bool dot_pages(const Sizes& d, const Task& task, Each&& each) {
  const Matmul m = matmul_of(task);
  if (kHasExperts && m.tile.rows == 0) return true;  // no row has chosen the expert
  // Weight pages still to come: `left` in later laps, `lap` in this one.
  int32_t left = dot_weight_pages(m), lap = 0;
  int32_t x = 0, first = 0;       // next weight page: its first element and column
  int32_t piece = dot_pieces(m);  // next input page: its first piece
  while (true) {
    if (lap == 0 && piece >= dot_pieces(m)) {
      if (left == 0) return true;
      lap = lower_of(left, lap_weights(d, m));
      left -= lap;
      piece = 0;
    }
    PageUse use;
    if (lap > 0) {
      const int32_t member = lap & 1;  // pages come in pairs
      use = weight_page(d, task, member, x, first);
      --lap;
      if (member) x += kPiece;
      if (x >= m.phase.inner) {
        x = 0;
        first += unit_cols(m);
      }
    } else {
      const int32_t rows = m.rows(), column = piece / rows;
      use = {.fill = Fill::kInputs,
             .pieces = true,
             .buffer = m.phase.inputs,
             .x = column * kPiece,
             .y = is_experts(task) ? 0 : m.tile.row,
             .row = piece - column * rows,
             .boxes = lower_of(kPieces, dot_pieces(m) - piece),
             .per = rows,
             .inner = m.phase.inner};
      piece += kPieces;
    }
    if (!each(use)) return false;
  }
}

MK_FN int32_t first_item(const StepView& s, const Task& task) {
  return s.slot_items[operands<Attention>(task.record).slot];
}
MK_FN int32_t end_item(const StepView& s, const Task& task) {
  return s.slot_items[operands<Attention>(task.record).slot + 1];
}

// Returns which KV blocks (of 128 tokens) an attention work item reads. With a sliding window, rows attend
// only to the last `span` tokens, so blocks before the window of the item's first row are left out.
MK_FN KvBlocks visible_blocks(const StepView& s, int32_t item, int32_t span) {
  const int32_t begin = s.item_block[item], end = begin + s.item_blocks[item];
  const int32_t first = first_visible(span, s.positions[kOneRow ? 0 : s.item_row[item]]) / kKvBlock;
  return {lower_of(higher_of(begin, first), end), end};
}

// A head of more than kHeadPart elements has two parts, each with kHeadPart elements.
constexpr int kMaxHeadParts = kWide ? 2 : 1;
// The number of units of an attention item that a block computes at the same time.
constexpr int kPassUnits = kTogether ? 1 : kConsumerWarps;
MK_FN int32_t head_parts(const Sizes& d) { return kWide && d.head_dim > kHeadPart ? kMaxHeadParts : 1; }

// Returns how many units of work a KV head with `rows` token rows has. Each part of the head has one
// unit for each tile of kQueryTile pairs (token row, query head).
MK_FN int32_t head_units(const Sizes& d, int32_t rows) {
  return ceil_div(rows * d.group_size(), kQueryTile) * head_parts(d);
}

// The number of pages of one KV block (128 tokens) of a KV head.
MK_FN int32_t kv_pages(const Sizes& d) { return d.head_dim <= kTileInner ? 2 : 4 * head_parts(d); }

// Lists the pages of one attention work item. Its work is divided into units, of which each pass
// processes kPassUnits (attention.h). A pass goes through the KV blocks and, in each block, through the
// KV heads. For each head, the pages of keys of all its parts come first, then the pages of values. Keys
// [element][token] are split into halves of 64 tokens, and values [token][element] into halves of 64
// elements. Each half is a page. If heads have at most kTileInner elements, one page has all keys, and
// one all values.
//
// An item without KV blocks to read has one empty page, which becomes full once the item's counters are
// complete. This is so for padding, and for items whose blocks are all before the layer's sliding window.
template <class Each>
MK_FN bool item_pages(const Sizes& d, const StepView& s, const Task& task, int32_t item, Each&& each) {
  const KvBlocks own = visible_blocks(s, item, d.span(task.where.layer));
  const bool empty = own.begin == own.end;
  const int32_t of_head = empty ? 1 : head_units(d, s.item_rows[item]);
  const int32_t units = empty ? 1 : s.item_kv_heads[item] * of_head;
  const bool narrow = d.head_dim <= kTileInner;
  const int32_t key_boxes = ceil_div(d.head_dim, kBoxRows * head_parts(d));
  const int32_t halves = narrow ? 1 : 2 * head_parts(d), pages = empty ? 1 : 2 * halves;
  bool opens = true;
  MK_LOOP for (int32_t pass = 0; pass < units; pass += kPassUnits) {
    const int32_t first = s.item_kv_head[item] + pass / of_head;
    const int32_t last = s.item_kv_head[item] + (lower_of(pass + kPassUnits, units) - 1) / of_head;
    int32_t blocks = empty ? 1 : own.end - own.begin;
    MK_LOOP for (int32_t block = own.begin; blocks > 0; ++block, --blocks) {
      MK_LOOP for (int32_t head = first; head <= last; ++head) {
        const int64_t seq = s.item_seq[here(item)];
        const int32_t* table = s.block_tables + seq * d.pages_per_seq();
        const int32_t matrix = empty ? 0 : table[block] * d.rank_kv_heads() + head;
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
            use.x = (kWide ? i % 2 : i) * kTileInner;
            use.y = matrix * d.head_dim + (kWide ? i / 2 * kHeadPart : 0);
            use.boxes = empty ? 0 : narrow ? 2 * key_boxes : key_boxes;
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

// Calls each(PageUse) for the instruction's pages. Stops and returns false when a call returns false.
template <class Each>
MK_FN bool for_pages(const Sizes& d, const StepView& s, const Task& task, Each&& each) {
  switch (static_cast<PagedOperation>(task.phase.operation)) {  // all other operations use no pages
    case PagedOperation::kExperts:
    case PagedOperation::kMatmul:
      return !by_dots(d, task) || dot_pages(d, task, each);
    case PagedOperation::kAttention: {
      MK_LOOP for (int32_t item = first_item(s, task); item < end_item(s, task); ++item) {
        if (!item_pages(d, s, task, item, each)) return false;
      }
      break;
    }
  }
  return true;
}

}  // namespace mk
