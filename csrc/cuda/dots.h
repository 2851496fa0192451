// Computes matmuls with few rows on the CUDA cores. Each output is a dot product, and each weight is loaded
// into a shared-memory page once.
//
// Weights and inputs arrive in pages of kPieces pieces. A piece is up to kPiece consecutive elements of
// one row (plan.h). Output columns are computed in units of 16 or, with two matrices (gate and up), 8 of
// each. For each kPiece elements of the inner dimension, a unit needs two weight pages. Consumer warp w
// uses piece w of both, for columns 2w and 2w + 1 of the unit or, with two matrices, column w of each.
// Input rows are in the ring for a lap (one filling of it), or elsewhere if the block normalised or
// copied them.
//
// The order of additions is fixed, so results do not depend on the other rows: a lane adds its products in
// ascending order, then a tree adds the sums of the lanes. For a normalised head, each warp adds the squares
// of its columns in ascending order, then the sums of the warps are added in order.
#pragma once
#include "ops/memory.h"
#include "plan.h"
#include "results.h"

namespace mk {

static_assert(kPieces == kConsumerWarps, "a page has a piece for each consumer warp");

// Where to find the same piece (kPiece elements) of every input row. `base` is the ring or
// Scratch::rows. Row 0's piece begins `first` bytes after `base`, and the piece of each further row
// `stride` bytes later. In the ring, an offset of `end` or more wraps around to the ring's start.
struct DotInput {
  const unsigned char* base;
  int32_t first, stride, end;
};

// A warp's dot products: two output columns of each row. Before `reduce`, a lane has only partial sums.
template <class P>
class Dots {
 public:
  MK_FN void clear() { MK_UNROLL for (int r = 0; r < kDotRows; ++r) sum_[r].a = sum_[r].b = 0; }

  // Adds the products of `n` weights and `n` inputs to both columns of each row. The weights of the two
  // columns are at `w0` and `w1`.
  MK_FN void add(P& p, const unsigned char* w0, const unsigned char* w1, int n, int rows,
                 const DotInput& input) {
    if (rows == 1 && n == kPiece) {
      MK_UNROLL_2 for (int v = 0; v < kVectors; ++v) {
        const int at = (v * P::kLanes + p.lane()) * 16;
        const auto part = [at](const unsigned char* piece) {
          return *reinterpret_cast<const Words*>(piece + at);
        };
        multiply(sum_[0], part(w0), part(w1), part(input.base + input.first));
      }
      return;
    }
    MK_LOOP for (int v = 0; v < kVectors; ++v) {
      const Words first = part(w0, v, p.lane(), n), second = part(w1, v, p.lane(), n);
      int32_t at = here(input.first);
      MK_UNROLL for (int r = 0; r < kDotRows; ++r) {
        if (r >= rows) break;
        multiply(sum_[r], first, second, part(input.base + at, v, p.lane(), n));
        at += input.stride;
        if (at >= input.end) at -= kRing * kPageBytes;
      }
    }
  }

  // Adds up, for each row, the partial sums of all lanes. In every step, two lanes exchange sums. The first
  // steps keep all rows. In each later step, a lane keeps half of its rows, and adds the other lane's sums
  // for them. In the end, lane i has the total of row i.
  template <int kMask = P::kLanes / 2>
  MK_FN void reduce(P& p, int rows) {
    if constexpr (kMask >= kDotRows) {
      MK_UNROLL for (int r = 0; r < kDotRows; ++r) {
        if (r >= rows) break;
        sum_[r].a += shuffle_xor(sum_[r].a, kMask);
        sum_[r].b += shuffle_xor(sum_[r].b, kMask);
      }
      reduce<kMask / 2>(p, rows);
    } else if constexpr (kMask > 0) {
      const bool upper = p.lane() & kMask;
      MK_UNROLL for (int r = 0; r < kMask; ++r) {
        if (r >= rows) break;
        const Pair low = sum_[r], high = sum_[r + kMask];
        sum_[r].a = (upper ? high.a : low.a) + shuffle_xor(upper ? low.a : high.a, kMask);
        sum_[r].b = (upper ? high.b : low.b) + shuffle_xor(upper ? low.b : high.b, kMask);
      }
      reduce<kMask / 2>(p, rows);
    }
  }
  // Returns the sums of a row, after reduce(). On the GPU, the result is valid only on lane `row`. A warp
  // with a single lane has the sums of all rows.
  MK_FN Pair at(int row) const { return sum_[P::kLanes == 1 ? row : 0]; }

 private:
  static constexpr int kVectors = kPiece / 8 / P::kLanes;

  MK_FN static void multiply(Pair& sum, const Words& first, const Words& second, const Words& in) {
    MK_UNROLL for (int i = 0; i < 4; ++i) {
      sum.a += low_half(in.w[i]) * low_half(first.w[i]);
      sum.b += low_half(in.w[i]) * low_half(second.w[i]);
      sum.a += high_half(in.w[i]) * high_half(first.w[i]);
      sum.b += high_half(in.w[i]) * high_half(second.w[i]);
    }
  }

  // Returns eight consecutive elements of a piece of n elements, or zeros if they are past the end.
  MK_FN static Words part(const unsigned char* piece, int vector, int lane, int n) {
    const int at = (vector * P::kLanes + lane) * 8;
    return at < n ? *reinterpret_cast<const Words*>(piece + 2 * at) : Words{};
  }

  Pair sum_[kDotRows];
};

// In builds for one row, copies the input row to shared memory, where `dots` reads it. All consumer
// warps must have finished the previous instruction.
template <class P>
MK_FN void copy_row(P& p, const Call& c) {
  constexpr int kStep = 8 * 32 * kConsumerWarps, kParts = higher_of(ceil_div(kMostInner, kStep), 1);
  const int first = 8 * (c.warp * P::kLanes + p.lane()), inner = c.phase().inner;
  const uint16_t* from = here(static_cast<const uint16_t*>(c.early.input) + first);
  Words held[kParts];
  MK_UNROLL for (int i = 0; i < kParts; ++i) {
    if (first + i * kStep < inner) held[i] = load_words(from + i * kStep);
  }
  MK_UNROLL for (int i = 0; i < kParts; ++i) {
    if (first + i * kStep < inner)
      *reinterpret_cast<Words*>(c.shared->rows + 2 * (first + i * kStep)) = held[i];
  }
  p.consumer_sync();
}

// Passes the warp's two outputs of each row to `to.store`.
template <class P, class To>
MK_FN void store_dots(P& p, const Call& c, const Dots<P>& dots, const To& to, const Matmul& m, int col) {
  const auto column = to.column(m.tile.col + col);
  MK_LOOP for (int r = p.lane(); r < m.rows(); r += P::kLanes) {
    const Pair t = dots.at(r);
    const int at = kOneRow ? 0 : m.row() + r;
    auto row = to.row(is_experts(*c.task) ? Routes(*c.params, *c.dims).result(*c.task, r) : at);
    to.store(row, column, t.a, t.b);
    if constexpr (kOneRow) return;
  }
}

// Stores the results of a QKV projection. To normalise a head, the sum of the squares of all its columns
// is needed. So a warp keeps its results of such a head in registers.
template <class P>
class DotHeads {
 public:
  // In builds for one row without head norms, starts to load the RoPE angle before the warp multiplies.
  MK_FN void begin(const Call& c, const Matmul& m, int unit) {
    const ToHeads to(c);
    if (unit == 0) row_ = to.row(0);
    column_ = to.column(m.tile.col + unit + 2 * c.warp);
    angle_ = to.angle(row_, column_);
  }

  // Takes the warp's two columns, for every row, of the unit (16 columns) that starts at column `unit`
  // of the tile. Stores them at once or, if the head must be normalised, after the head's last unit.
  MK_FN void store(P& p, const Call& c, const Dots<P>& dots, const Matmul& m, int unit) {
    ToHeads to(c);
    if constexpr (!kHeadNorms) {
      const Pair t = dots.at(0);
      if (p.lane() == 0) to.store(row_, column_, t.a, t.b, [&] { return angle_; });
      return;
    }
    const bool normed = to.normed(m.tile.col + unit);
    const int units = normed ? to.head_dim() / kUnit : 1, last = unit / kUnit % units, rows = m.tile.rows;
    for_rows(p, 0, rows, [&](int r) {
      MK_UNROLL for (int u = 0; u < kUnits; ++u) {
        if (u == last) kept_[u][own(r)] = dots.at(r);
      }
    });
    if (last + 1 < units) return;
    const int first = m.tile.col + unit - last * kUnit + 2 * c.warp;
    ToHeads::Row row[kOwnRows]{};
    for_rows(p, 0, rows, [&](int r) { row[own(r)] = to.row(m.tile.row + r); });
    MK_LOOP for (to.squares = normed;; to.squares = false) {
      MK_LOOP for (int u = 0; u < units; ++u) {
        const auto column = to.column(first + u * kUnit);
        for_rows(p, 0, rows, [&](int r) {
          Pair t{};
          MK_UNROLL for (int k = 0; k < kUnits; ++k) {
            if (k == u) t = kept_[k][own(r)];
          }
          to.store(row[own(r)], column, t.a, t.b);
        });
      }
      if (!to.squares) return;
      meet(p, c, to, rows, row);
    }
  }

 private:
  static constexpr int kUnit = 2 * kPieces, kUnits = kMaxHeadParts * kHeadPart / kUnit,
                       kOwnRows = P::kLanes == 1 ? kDotRows : 1;

  MK_FN static int own(int row) { return P::kLanes == 1 ? row : 0; }
  // Calls `each` for those rows of [begin, end) whose sums this lane has.
  template <class Each>
  MK_FN static void for_rows(P& p, int begin, int end, const Each& each) {
    if constexpr (P::kLanes == 1) {
      for (int r = begin; r < end; ++r) each(r);
    } else {
      if (p.lane() >= begin && p.lane() < end) each(p.lane());
    }
  }

  // Computes the factor that normalises each row of a head, from the sums of squares of all warps. The
  // warps exchange these for several rows at a time, in two arrays used in turn (as in Team::gather).
  MK_FN void meet(P& p, const Call& c, const ToHeads& to, int rows, ToHeads::Row* row) {
    constexpr int kPart = sizeof c.shared->squares[0][0] / sizeof(float);
    MK_LOOP for (int first = 0; first < rows; first += kPart, turn_ ^= 1) {
      auto& squares = c.shared->squares[turn_];
      const int end = lower_of(first + kPart, rows);
      for_rows(p, first, end, [&](int r) { squares[c.warp][r - first] = row[own(r)].norm; });
      p.consumer_sync();
      for_rows(p, first, end, [&](int r) {
        float sum = 0.0f;
        MK_UNROLL for (int w = 0; w < kConsumerWarps; ++w) sum += squares[w][r - first];
        row[own(r)].norm = to.scale(sum);
      });
    }
  }

  Pair kept_[kUnits][kOwnRows]{};
  int turn_ = 0;
  ToHeads::Row row_;
  ToHeads::Column column_;
  Pair angle_;
};

template <class P, class Pages>
MK_FN void dots(P& p, const Call& c, const Matmul& m, Pages& pages) {
  const int inner = m.phase.inner, rows = m.rows(), cols = m.tile.cols;
  const bool two = m.two();
  const int pieces = ceil_div(inner, kPiece), inputs = dot_input_pages(m), own = c.warp * kPieceBytes;
  const bool normed = m.normed();
  if (kHasExperts && rows == 0) return;  // no row has chosen the expert
  int weights_left = dot_weight_pages(m);
  Dots<P> sums;
  DotHeads<P> heads;
  int page = 0, held = 0;  // held: number of the first input page of the lap in progress

  // `heads` uses the block's scratch memory, so all warps must have finished the previous instruction.
  if (kHeadNorms && m.phase.head_norm != Buffer::kNone) p.consumer_sync();
  const auto release_inputs = [&] { pages.release(held, inputs); };
  for (int unit = 0; unit < cols; unit += two ? kPieces : 2 * kPieces) {
    const int col = unit + (two ? c.warp : 2 * c.warp);
    sums.clear();
    if (!kHeadNorms && c.early.result == Result::kHeads && col < cols) heads.begin(c, m, unit);
    int piece = 0;
    do {  // at least once: if the loop might not run, the compiler would clear the sums twice
      if (!kOneRow && page == held) {
        if (page > 0) {
          release_inputs();
          page += inputs;
        }
        held = page + lower_of(lap_weights(*c.dims, m), weights_left);
        for (int i = 0; i < inputs; ++i) pages.full(held + i);
      }
      const unsigned char* first = pages.full(page) + own;
      const unsigned char* second = pages.full(page + 1) + own;
      if (kOneRow || col < cols) {  // for one row, products that nobody needs take less time than a branch
        const int at = piece * rows;
        const DotInput input =
            kOneRow || normed
                ? DotInput{c.shared->rows, piece * kPieceBytes, 2 * inner, 0x7FFFFFFF}
                : DotInput{pages.ring(), pages.offset(held + at / kPieces) + at % kPieces * kPieceBytes,
                           kPieceBytes, kRing * kPageBytes};
        sums.add(p, first, second, lower_of(inner - piece * kPiece, kPiece), rows, input);
      }
      pages.release(page, 2);
      page += 2, weights_left -= 2;
    } while (++piece < pieces);
    if (col >= cols) continue;
    sums.reduce(p, rows);
    const Result of_experts = two ? Result::kGated : Result::kNone;
    switch (uses_dots(*c.dims) ? c.early.result : of_experts) {
      case Result::kHeads:
        heads.store(p, c, sums, m, unit);
        break;
      case Result::kResidual:
      case Result::kStored:
        store_dots(p, c, sums, ToResidual(c), m, col);
        break;
      case Result::kPartial:
        store_dots(p, c, sums, ToPartial(c), m, col);
        break;
      case Result::kGated:
      case Result::kGeluGated:
        store_dots(p, c, sums, ToGated(c), m, col);
        break;
      case Result::kLogits:
        store_dots(p, c, sums, ToLogits(c), m, col);
        break;
      case Result::kNone:
        if constexpr (kHasExperts) store_dots(p, c, sums, ToRows(c), m, col);
        break;
    }
  }
  if constexpr (!kOneRow) release_inputs();
}

}  // namespace mk
