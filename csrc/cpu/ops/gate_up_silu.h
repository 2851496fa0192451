#pragma once
#include "../gemm.h"

namespace mk::MK_SIMD {

// ACT = silu(gate) * up. W_GATE_UP alternates a panel of gate and a panel of up, so the tile does too.
template <class T>
void gate_up_silu(const Call& call, const GateUpSilu& op) {
  const Dims& d = *call.dims;
  const float* bias = d.mlp_bias ? call.at<float>(Buffer::B_GATE_UP) : nullptr;
  gemm(call, call.at<T>(Buffer::H), d.hidden, call.at<T>(Buffer::W_GATE_UP), op.row, op.rows,
       op.col / kPanel * 2, panel_count(op.col, op.cols) * 2,
       [&](int row, int rows, int panel, int panels, const float* c, int64_t ldc) {
         for (int r = 0; r < rows; ++r, c += ldc) {
           T* out = call.at<T>(Buffer::ACT) + int64_t{row + r} * d.rank_ffn();
           for (int p = 0; p < panels; p += 2) {
             const int start = (panel + p) / 2 * kPanel, stop = start + kPanel;
             const int first = start > op.col ? start : op.col;
             const int end = stop < op.col + op.cols ? stop : op.col + op.cols;
             for (int col = first; col < end; col += kLanes) {
               const int n = end - col;
               const float* t = c + p * kPanel + col - start;
               F32 gate = load(t, n), up = load(t + kPanel, n);
               if (bias) {
                 gate += load(bias + col, n);
                 up += load(bias + d.rank_ffn() + col, n);
               }
               store(out + col, gate / (exp(-gate) + 1.0f) * up, n);
             }
           }
         }
       });
}

}  // namespace mk::MK_SIMD
