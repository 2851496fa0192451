// The matmul operation. `gemm` passes its results to a function that stores them; each kind of result
// has its own. The argument `t` has the results for row r and columns [first, first + n).
#pragma once
#include "../simd/gemm.h"
#include "heads.h"
#include "store.h"

namespace mk::MK_SIMD {

inline void add_residual(const Call& call, int r, int first, int n, float* t) {
  float* x = call.output<float>() + int64_t{r} * call.dims->hidden + first;
  for (int i = 0; i < n; i += kLanes) store(x + i, load(x + i, n - i) + load(t + i, n - i), n - i);
}

template <class T>
inline void store_plain(const Call& call, int r, int first, int n, float* t) {
  T* out = call.output<T>() + int64_t{r} * call.phase->width + first;
  for (int i = 0; i < n; i += kLanes) store(out + i, load(t + i, n - i), n - i);
}

// Stores this rank's partial sums on each rank that has the residual of row r: output[this rank][r] = t.
template <class T>
inline void store_partial(const Call& call, int r, int first, int n, float* t) {
  const Dims& d = *call.dims;
  store_to(call, call.phase->output, residual_ranks(d, r),
           int64_t{d.reduce_row(d.rank, r)} * d.hidden + first, narrow(t, n, T{}), n);
}

// SiLU, and GELU as approximated by tanh, are both gate * sigmoid(e). These functions return e: for SiLU
// the gate itself, for GELU a polynomial of the gate.
inline F32 silu_exponent(F32 gate) { return gate; }
inline F32 gelu_exponent(F32 gate) {
  return (gate * gate * gate * 0.044715f + gate) * 1.5957691216057308f;  // 2 sqrt(2 / pi)
}

// Stores output[r] = gate * sigmoid(exponent(gate)) * up, where gate is the result of the first matrix and up
// that of the second. Both are in `t`, kPanel floats apart.
template <class T, F32 (*kExponent)(F32)>
inline void store_gated(const Call& call, int r, int first, int n, float* t) {
  T* out = call.output<T>() + int64_t{r} * call.phase->width + first;
  for (int i = 0; i < n; i += kLanes) {
    const F32 gate = load(t + i, n - i), up = load(t + kPanel + i, n - i);
    store(out + i, gate / (exp(-kExponent(gate)) + 1.0f) * up, n - i);
  }
}

// Stores row r's logits for this rank's part of the vocabulary on the rank that samples row r.
inline void store_logits(const Call& call, int r, int first, int n, float* t) {
  const Dims& d = *call.dims;
  const int sampler = r / d.own_logit_rows();
  for (int i = 0; d.logit_cap != 0.0f && i < n; i += kLanes)
    store(t + i, capped(load(t + i, n - i), d.logit_cap), n - i);
  store_to(call, call.phase->output, {sampler, sampler + 1}, int64_t{r} * d.vocab + d.first_vocab() + first,
           t, n);
}

template <class T>
void matmul(const Call& call, const Tile& tile) {
  switch (call.phase->result) {
    case Result::kNone:
      return;
    case Result::kHeads:
      return heads<T>(call, tile);
    case Result::kResidual:
      return gemm<T>(call, tile, add_residual);
    case Result::kPartial:
      return gemm<T>(call, tile, store_partial<T>);
    case Result::kGated:
      return gemm<T>(call, tile, store_gated<T, silu_exponent>);
    case Result::kLogits:
      return gemm<T>(call, tile, store_logits);
    case Result::kStored:
      return gemm<T>(call, tile, store_plain<float>);
    case Result::kGeluGated:
      return gemm<T>(call, tile, store_gated<T, gelu_exponent>);
  }
}

}  // namespace mk::MK_SIMD
