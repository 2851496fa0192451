// Norms over all heads of q and over all heads of k, which some models apply after the QKV projection.
#pragma once
#include "../results.h"
#include "call.h"
#include "memory.h"

namespace mk {

// Each row of the inputs has q, k and v of all heads. Normalises q and k, and stores this rank's heads as a
// QKV projection does. All consumer warps work on one row at a time.
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

}  // namespace mk
