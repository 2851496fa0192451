// RMS norms of rows of X. All warps share a row, so that one row alone is fast too. A lane holds its part of
// it, and fetches that of the next row while the sums of this one meet.
#pragma once
#include "../../common/index.h"
#include "call.h"
#include "memory.h"

namespace mk {

// Groups of eight columns that a lane holds: with 256 lanes, rows of 8,192. What is beyond is read twice.
constexpr int kNormHeld = 4;

struct NormPart {
  Eight part[kNormHeld];
};

template <class P>
class Norm {
 public:
  MK_FN Norm(P& p, const Call& call, const float* weight, Buffer out)
      : call_(call),
        x_(call.at<float>(Buffer::X)),
        weight_(weight),
        out_(out),
        hidden_(call.dims->hidden),
        first_(8 * (call.warp * P::kLanes + p.lane())),
        team_(p, call) {}

  // out[i] = norm of X[source(i)] * weight, at every rank that needs it, for rows i in [row, row + rows).
  // Where source gives kNone it is zero, where kSkip it is left alone.
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
            1.0f / sqrtf(sum_of_squares(held, r) / static_cast<float>(hidden_) + call_.dims->rms_eps);
        each(held, r, [&](int k, const Eight& v) {
          const Eight w = read_eight(weight_ + k);
          Eight y;
          MK_UNROLL for (int e = 0; e < 8; ++e) y.v[e] = v.v[e] * scale * w.v[e];
          store(i, k, pack_eight(y));
        });
      } else if (r == kNone) {
        MK_LOOP for (int k = first_; k < hidden_; k += kStep) store(i, k, Words{});
      }
    }
  }

 private:
  static constexpr int kStep = 8 * kConsumerWarps * P::kLanes;

  MK_FN NormPart fetch(int r) const {
    NormPart out{};
    const float* x = x_ + int64_t{r} * hidden_;
    MK_UNROLL for (int h = 0; h < kNormHeld; ++h) {
      if (r >= 0 && first_ + h * kStep < hidden_) out.part[h] = load_eight(x + first_ + h * kStep);
    }
    return out;
  }

  // f(column, values) for the lane's groups of a row, ascending.
  template <class F>
  MK_FN void each(const NormPart& held, int r, F f) const {
    MK_UNROLL for (int h = 0; h < kNormHeld; ++h) {
      if (first_ + h * kStep < hidden_) f(first_ + h * kStep, held.part[h]);
    }
    const float* x = x_ + int64_t{r} * hidden_;
    MK_LOOP for (int k = first_ + kNormHeld * kStep; k < hidden_; k += kStep) f(k, load_eight(x + k));
  }

  MK_FN float sum_of_squares(const NormPart& held, int r) {
    float squares = 0.0f;
    each(held, r,
         [&](int, const Eight& v) { MK_UNROLL for (int e = 0; e < 8; ++e) squares += v.v[e] * v.v[e]; });
    const float lanes = reduce_lanes<P>(squares, [](float a, float b) { return a + b; });
    const uint64_t* warps = team_.gather(float_to_bits(lanes));
    float sum = 0.0f;
    MK_UNROLL for (int w = 0; w < kConsumerWarps; ++w) sum += bits_to_float(static_cast<uint32_t>(warps[w]));
    return sum;
  }

  MK_FN void store(int i, int k, const Words& words) const {
    const Ranks ranks = norm_ranks(*call_.dims);
    MK_LOOP for (int rank = ranks.begin; rank < ranks.end; ++rank) {
      store_words(call_.copy<uint16_t>(out_, rank) + int64_t{i} * hidden_ + k, words);
    }
  }

  const Call& call_;
  const float *x_, *weight_;
  const Buffer out_;
  const int hidden_, first_;
  Team<P> team_;
};

// Y[i] = norm of X[logit_rows[i]], of rows whose residual this rank keeps; else H[i] = norm of X[i].
template <class P>
MK_FN void norm(P& p, const Call& call, Opcode opcode, const FinalNorm& op) {
  const bool last = opcode == Opcode::final_norm;
  const Buffer weight = last                         ? Buffer::FINAL_NORM
                        : opcode == Opcode::mlp_norm ? Buffer::MLP_NORM
                                                     : Buffer::ATTN_NORM;
  const float* weights = call.at<float>(weight, opcode == Opcode::next_norm);
  Norm<P>(p, call, weights, last ? Buffer::Y : Buffer::H).rows(op.row, op.rows, [&](int i) {
    if (!last) return i;
    if (!norms_logit_row(*call.dims, *call.step, i)) return Norm<P>::kSkip;
    const int r = call.step->logit_rows[i];
    return r >= 0 ? r : Norm<P>::kNone;
  });
}

}  // namespace mk
