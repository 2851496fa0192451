#pragma once
#include "../gemm.h"

namespace mk::MK_SIMD {

// ACT = silu(gate) * up. W_GATE_UP alternates a panel of gate and a panel of up, so the tile does too.
template <class T>
void gate_up_silu(const Call& call, const GateUpSilu& op) {
  const Dims& d = *call.dims;
  const float* bias = d.mlp_bias ? call.at<float>(Buffer::B_GATE_UP) : nullptr;
  gemm(call, call.at<T>(Buffer::H), d.hidden, call.at<T>(Buffer::W_GATE_UP), op.row, op.rows,
       op.col / kPanel * 2, (op.cols + kPanel - 1) / kPanel * 2,
       [&](int row, int rows, int panel, int panels, const float* c, int64_t ldc) {
         for (int r = 0; r < rows; ++r, c += ldc) {
           T* out = call.at<T>(Buffer::ACT) + int64_t{row + r} * d.rank_ffn();
           for (int p = 0; p < panels; p += 2) {
             const int col = (panel + p) / 2 * kPanel;
             for (int v = 0; v < kPanel; v += kLanes) {
               const int n = op.col + op.cols - col - v;
               if (n <= 0) break;
               F32 gate = load(c + p * kPanel + v), up = load(c + (p + 1) * kPanel + v);
               if (bias) {
                 gate += load(bias + col + v, n);
                 up += load(bias + d.rank_ffn() + col + v, n);
               }
               store(out + col + v, gate / (exp(-gate) + 1.0f) * up, n);
             }
           }
         }
       });
}

}  // namespace mk::MK_SIMD
