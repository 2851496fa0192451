// Stores results in the copies of a buffer on one or several ranks. The results are computed once and copied
// to each of these ranks.
#pragma once
#include "../../common/index.h"
#include "../simd/simd.h"

namespace mk::MK_SIMD {

// Stores n values in the buffer's copy on each of `ranks`, from element `at` on.
template <class T>
inline void store_to(const Call& call, Buffer buffer, Ranks ranks, int64_t at, const T* values, int64_t n) {
  const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
  for (int rank = ranks.begin; rank < ranks.end; ++rank) {
    T* out = call.copy<T>(buffer, rank) + at;
    if (rank == call.dims->rank) {
      if (out != values) memcpy(out, values, bytes);
    } else {
      store_remote(call, out, values, bytes);
    }
  }
}

// Converts n float32 results, in place, to the type of the last parameter.
inline const float* narrow(float* t, int, float) { return t; }

inline const Bf16* narrow(float* t, int n, Bf16) {
  Bf16* out = reinterpret_cast<Bf16*>(t);
  for (int i = 0; i < n; i += kLanes) store(out + i, load(t + i, n - i), n - i);
  return out;
}

}  // namespace mk::MK_SIMD
