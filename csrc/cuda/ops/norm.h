// RMS norms of rows, for all ranks that need them or for the block's own matmul. All warps work on the same
// row, so that a single row is fast too. A lane holds its part of the row and fetches its part of the next
// row while the sums are combined.
#pragma once
#include "../../common/index.h"
#include "call.h"
#include "memory.h"

namespace mk {

// The number of groups of eight columns that a lane holds: with 256 lanes, enough for rows of 8,192 columns.
// Further columns are read twice.
constexpr int kNormHeld = 4;

// The weights of a norm, or of the norm inside a matmul.
MK_FN Buffer norm_weights(const Phase& phase) {
  return phase.norm != Buffer::kNone ? phase.norm : phase.weights;
}

struct NormPart {
  Eight part[kNormHeld];
};

template <class P>
class Norm {
 public:
  MK_FN Norm(P& p, const Call& call)
      : call_(call),
        own_(call.phase().norm != Buffer::kNone),
        x_(call.at<float>(call.phase().inputs)),
        weight_(call.weights<float>(norm_weights(call.phase()))),
        width_(call.phase().inner),
        first_(8 * (call.warp * P::kLanes + p.lane())),
        team_(p, call) {}

  // output[i] = norm of inputs[source(i)] * weight, on every rank that needs it, for rows i in [row, row +
  // rows). For a matmul with a norm, the result is row i - row of the block's Scratch instead. If source
  // returns kNone, the row is zero; if it returns kSkip, the row is not written.
  static constexpr int kNone = -1, kSkip = -2;
  template <class Source>
  MK_FN void rows(int row, int rows, Source source) {
    NormPart next = fetch(source(row));
    for (int i = row; i < row + rows; ++i) {
      const int r = source(i);
      const NormPart held = next;
      if (i + 1 < row + rows) next = fetch(source(i + 1));
      if (r >= 0) {
        const float scale =
            1.0f / sqrtf(sum_of_squares(held, r) / static_cast<float>(width_) + call_.dims->rms_eps);
        const auto scaled = [&](int k, const Eight& v, const Eight& w) {
          Eight y;
          MK_UNROLL for (int e = 0; e < 8; ++e) y.v[e] = v.v[e] * scale * w.v[e];
          store(i, i - row, k, pack_eight(y));
        };
        MK_UNROLL for (int h = 0; h < kNormHeld; ++h) {
          if (first_ + h * kStep < width_)
            scaled(first_ + h * kStep, held.part[h], read_eight(weight_ + first_ + h * kStep));
        }
        const float* x = x_ + int64_t{r} * width_;
        MK_LOOP for (int k = first_ + kNormHeld * kStep; k < width_; k += kStep)
            scaled(k, load_eight(x + k), read_eight(weight_ + k));
      } else if (r == kNone) {
        MK_LOOP for (int k = first_; k < width_; k += kStep) store(i, i - row, k, Words{});
      }
    }
  }

 private:
  static constexpr int kStep = 8 * kConsumerWarps * P::kLanes;

  MK_FN NormPart fetch(int r) const {
    NormPart out{};
    const float* x = x_ + int64_t{r} * width_;
    MK_UNROLL for (int h = 0; h < kNormHeld; ++h) {
      if (r >= 0 && first_ + h * kStep < width_) out.part[h] = load_eight(x + first_ + h * kStep);
    }
    return out;
  }

  // The lane's groups are added in ascending order.
  MK_FN float sum_of_squares(const NormPart& held, int r) {
    float squares = 0.0f;
    const auto add = [&](const Eight& v) {
      MK_UNROLL for (int e = 0; e < 8; ++e) squares += v.v[e] * v.v[e];
    };
    MK_UNROLL for (int h = 0; h < kNormHeld; ++h) {
      if (first_ + h * kStep < width_) add(held.part[h]);
    }
    const float* x = x_ + int64_t{r} * width_;
    MK_LOOP for (int k = first_ + kNormHeld * kStep; k < width_; k += kStep) add(load_eight(x + k));
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

  const Call& call_;
  const bool own_;
  const float *x_, *weight_;
  const int width_, first_;
  Team<P> team_;
};

// Prefetches the part of the weights that a lane will read, while other instructions still compute the rows.
template <class P>
MK_FN void prefetch_norm(P& p, const Call& call) {
  const float* weights = call.weights<float>(norm_weights(call.phase()));
  for (int k = 8 * (call.warp * P::kLanes + p.lane()); k < call.phase().inner;
       k += 8 * kConsumerWarps * P::kLanes)
    prefetch(weights + k);
}

// Normalises the rows of a norm phase, or the inputs of a matmul with a norm.
template <class P>
MK_FN void norm(P& p, const Call& call) {
  static_assert(__builtin_offsetof(Tile, row) == __builtin_offsetof(Run, row) &&
                __builtin_offsetof(Tile, rows) == __builtin_offsetof(Run, rows));
  const Run& op = operands<Run>(call.task->record);
  const bool logits = call.task->is(Operation::kNorm) && call.phase().rows == Rows::kLogit;
  Norm<P>(p, call).rows(op.row, op.rows, [&](int i) {
    if (!logits) return i;
    if (!norms_logit_row(*call.dims, *call.step, i)) return Norm<P>::kSkip;
    const int r = call.step->logit_rows[i];
    return r >= 0 ? r : Norm<P>::kNone;
  });
  if (!call.task->is(Operation::kNorm)) p.consumer_sync();
}

}  // namespace mk
