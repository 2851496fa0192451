// RMS norms of rows. A norm instruction stores the normalised rows on every rank that needs them. A matmul
// that normalises its own inputs keeps them in shared memory instead. All consumer warps work on one row at a
// time, so that even a single row is fast. Each lane has its elements of the row in registers, and
// loads those of the next row while the warps add up the sum of squares.
#pragma once
#include "../../common/index.h"
#include "../results.h"
#include "call.h"
#include "memory.h"

namespace mk {

constexpr int kNoRow = -1, kSkippedRow = -2;

template <class P>
class Norm {
 public:
  MK_FN Norm(P& p, const Call& call)
      : call_(call),
        own_(call.early.operation != Operation::kNorm),
        x_(kOneRow ? static_cast<const float*>(call.early.input) : call.at<float>(call.phase().inputs)),
        weight_(call.early.norm),
        width_(call.dims->hidden),
        first_(8 * (call.warp * P::kLanes + p.lane())),
        team_(p, call, kOneRow && own_) {}

  // For each i in [row, row + rows), normalises row source(i) of the inputs and multiplies it by the
  // weights. Stores the result as row i of the output on every rank that needs it or, in a matmul, as
  // row i - row of Scratch::rows. If source(i) is kNoRow, stores zeros; if it is kSkippedRow, stores nothing.
  template <class Source>
  MK_FN void rows(int row, int rows, Source source) {
    NormPart next = fetch(source(row));
    for (int i = row; i < row + rows; ++i) {
      const int r = source(i);
      const NormPart held = next;
      if (i + 1 < row + rows) next = fetch(source(i + 1));
      if (r >= 0) {
        const float scale =
            one_over_root(sum_of_squares(held, r) / static_cast<float>(width_) + call_.dims->rms_eps);
        const float* x = x_ + int64_t{r} * width_;
        if (call_.dims->post_norms && call_.phase().result == Result::kResidual && !own_) {
          add(i, x, scale);
          continue;
        }
        const auto scaled = [&](int k, const Eight& v, const Eight& w) {
          store(i, i - row, k, pack_eight(times(v, scale, w)));
        };
        MK_UNROLL for (int h = 0; h < kNormHeld; ++h) {
          const int k = first_ + h * kStep;
          if (has(h)) scaled(k, held.part[h], kEarly ? call_.early.weights.part[h] : read_eight(weight_ + k));
        }
        MK_LOOP for (int k = first_ + kNormHeld * kStep; !kEarly && k < width_; k += kStep)
            scaled(k, load_eight(x + k), read_eight(weight_ + k));
      } else if (r == kNoRow) {
        MK_LOOP for (int k = first_; k < width_; k += kStep) store(i, i - row, k, Words{});
      }
    }
  }

 private:
  static constexpr int kStep = 8 * kConsumerWarps * P::kLanes;
  // Whether the norm's weights are in registers.
  static constexpr bool kEarly = kTogether && kMostHidden <= kNormHeld * kStep;

  // Whether the row has this lane's group `h` of eight columns.
  MK_FN bool has(int h) const { return (kOneRow && kMostHidden % kStep == 0) || first_ + h * kStep < width_; }

  MK_FN NormPart fetch(int r) const {
    NormPart out{};
    const float* x = x_ + int64_t{kOneRow ? 0 : r} * width_;
    MK_UNROLL for (int h = 0; h < kNormHeld; ++h) {
      if (r >= 0 && has(h)) out.part[h] = load_eight(x + first_ + h * kStep);
    }
    return out;
  }

  // Returns the sum of the squares of row r, over all warps. Each lane adds its columns in ascending order,
  // so that the sum always has the same bits.
  MK_FN float sum_of_squares(const NormPart& held, int r) {
    float squares = 0.0f;
    const auto add = [&](const Eight& v) {
      MK_UNROLL for (int e = 0; e < 8; ++e) squares += v.v[e] * v.v[e];
    };
    MK_UNROLL for (int h = 0; h < kNormHeld; ++h) {
      if (has(h)) add(held.part[h]);
    }
    const float* x = x_ + int64_t{r} * width_;
    MK_LOOP for (int k = first_ + kNormHeld * kStep; !kEarly && k < width_; k += kStep)
        add(load_eight(x + k));
    return team_.sum(squares);
  }

  MK_FN void store(int i, int own_row, int k, const Words& words) const {
    if (own_) {
      *reinterpret_cast<Words*>(call_.shared->rows + 2 * (own_row * width_ + k)) = words;
      return;
    }
    const Ranks ranks = norm_ranks(*call_.dims);
    MK_LOOP for (int rank = ranks.begin; rank < ranks.end; ++rank) {
      store_words(call_.copy<uint16_t>(call_.phase().output, rank) + int64_t{i} * width_ + k, words);
    }
  }

  static MK_FN Eight times(const Eight& v, float scale, const Eight& w) {
    Eight y;
    MK_UNROLL for (int e = 0; e < 8; ++e) y.v[e] = v.v[e] * scale * w.v[e];
    return y;
  }

  // Normalises `x`, a row of the inputs, and adds it to row `row` of the residual. Reads x from memory again,
  // although part of it is in registers: using the registers would need a second copy of the code in `rows`.
  MK_FN void add(int row, const float* x, float scale) const {
    float* residual = call_.at<float>(call_.phase().output) + int64_t{row} * width_;
    MK_LOOP for (int k = first_; k < width_; k += kStep) {
      Eight sum = load_eight(residual + k);
      sum += times(load_eight(x + k), scale, read_eight(weight_ + k));
      store_eight(residual + k, sum);
    }
  }

  const Call& call_;
  const bool own_;
  const float *x_, *weight_;
  const int width_, first_;
  Team<P> team_;
};

// Returns which row of the inputs becomes row i of the norm's results, as Norm::rows requires it.
MK_FN int normed_row(const Call& call, int i) {
  if (call.early.operation != Operation::kNorm || call.phase().rows != Rows::kLogit) return i;
  return norms_logit_row(*call.dims, *call.step, i) ? higher_of(call.step->logit_rows[i], kNoRow)
                                                    : kSkippedRow;
}

// Prefetches the norm weights that this lane will read, while other instructions still compute the input
// rows. In builds for one row, loads those that it keeps in registers.
template <class P>
MK_FN void prefetch_norm(P& p, Call& call) {
  constexpr int kStep = 8 * kConsumerWarps * P::kLanes;
  const Phase& phase = call.phase();
  call.early.norm = call.weights<float>(phase.operation == Operation::kNorm ? phase.weights : phase.norm);
  if (kOneRow) call.early.row = normed_row(call, 0);
  if (kWide && !call.early.norm) return;
  int k = 8 * (call.warp * P::kLanes + p.lane());
  MK_UNROLL for (int h = 0; kTogether && h < kNormHeld; ++h, k += kStep) {
    if (k < call.dims->hidden) call.early.weights.part[h] = read_eight(call.early.norm + k);
  }
  for (; k < call.dims->hidden; k += kStep) prefetch(call.early.norm + k);
}

// Some models apply a norm to all heads of q together, and another to all heads of k, after the QKV
// projection. Each row of the inputs has q, k and v of all heads. Stores this rank's heads as a QKV
// projection does. All consumer warps work on one row at a time.
template <class P>
MK_FN void norm_heads(P& p, const Call& call, const Run& op) {
  const Sizes& d = *call.dims;
  const int q_end = d.heads * d.head_dim, kv = d.kv_heads * d.head_dim, k_end = q_end + kv;
  const int own_k = d.q_cols(), own_v = own_k + d.kv_cols(), first_kv = d.first_kv_head() * d.head_dim;
  const int first = 8 * (call.warp * P::kLanes + p.lane()), step = 8 * kConsumerWarps * P::kLanes;
  const float* weights = call.weights<float>(call.phase().weights);
  const ToHeads to(call);
  Team<P> team(p, call);
  MK_LOOP for (int r = op.row; r < op.row + op.rows; ++r) {
    const float* x = call.at<float>(call.phase().inputs) + int64_t{r} * (k_end + kv);
    // Each lane adds its columns in ascending order, so that the sums always have the same bits.
    float q_squares = 0.0f, k_squares = 0.0f;
    MK_LOOP for (int at = first; at < k_end; at += step) {
      const Eight v = load_eight(x + at);
      float squares = 0.0f;
      MK_UNROLL for (int e = 0; e < 8; ++e) squares += v.v[e] * v.v[e];
      (at < q_end ? q_squares : k_squares) += squares;
    }
    const auto factor = [&](float squares, int n) {
      return one_over_root(team.sum(squares) / static_cast<float>(n) + d.rms_eps);
    };
    const float q_factor = factor(q_squares, q_end), k_factor = factor(k_squares, kv);
    ToHeads::Row row = to.row(r);
    MK_LOOP for (int col = first; col < d.qkv_cols(); col += step) {
      // The column of the inputs. Groups of eight columns never cross heads.
      const int at = col < own_k   ? col + d.first_head() * d.head_dim
                     : col < own_v ? col - own_k + q_end + first_kv
                                   : col - own_v + k_end + first_kv;
      const Eight v = load_eight(x + at);
      row.norm = at < q_end ? q_factor : k_factor;
      MK_UNROLL for (int e = 0; e < 8; e += 2) {
        const Pair w = at < k_end ? *reinterpret_cast<const Pair*>(weights + at + e) : Pair{1, 1};
        to.store(row, to.column(col + e), v.v[e] * w.a, v.v[e + 1] * w.b);
      }
    }
  }
}

// Rounds the rows of a norm phase without weights, and stores them on every rank that needs them.
template <class P>
MK_FN void round_rows(P& p, const Call& call, const Run& op) {
  const int width = call.phase().inner;
  const int64_t begin = int64_t{op.row} * width;
  const float* x = call.at<float>(call.phase().inputs) + begin;
  const Ranks ranks = norm_ranks(*call.dims);
  MK_LOOP for (int k = 8 * (call.warp * P::kLanes + p.lane()); k < op.rows * width;
               k += 8 * kConsumerWarps * P::kLanes) {
    const Words words = pack_eight(load_eight(x + k));
    MK_LOOP for (int rank = ranks.begin; rank < ranks.end; ++rank)
        store_words(call.copy<uint16_t>(call.phase().output, rank) + begin + k, words);
  }
}

template <class P>
MK_FN void norm(P& p, const Call& call) {
  const Run& op = operands<Run>(call.task->record);
  if (kWide && call.task->is(Operation::kNorm)) {
    if (call.phase().result == Result::kHeads) return norm_heads(p, call, op);
    if (call.phase().weights == Buffer::kNone) return round_rows(p, call, op);
  }
  Norm<P>(p, call).rows(kOneRow ? 0 : op.row, kOneRow ? 1 : op.rows,
                        [&](int i) { return kOneRow ? call.early.row : normed_row(call, i); });
  if (call.early.operation != Operation::kNorm) p.consumer_sync();
}

}  // namespace mk
