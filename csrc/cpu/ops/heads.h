#pragma once
#include "../../common/index.h"
#include "../simd/gemm.h"

namespace mk::MK_SIMD {

// Permutes the lanes of a vector. `rotate` (RoPE) works on pairs of neighbouring lanes and needs three
// permutations: the even lane's value in both lanes, the odd lane's value in both lanes, and both values
// swapped.
#if defined(__clang__)
#define MK_SHUFFLE(v, mask) shuffle_lanes(v, mask)
MK_INLINE F32 shuffle_lanes(F32 v, I32 lanes) {
  F32 out;
  for (int i = 0; i < kLanes; ++i) out[i] = v[lanes[i]];
  return out;
}
#else
#define MK_SHUFFLE(v, mask) __builtin_shuffle(v, mask)
#endif

// Applies RoPE to n columns, in pairs: (a, b) -> (a cos - b sin, b cos + a sin). n is even, and the
// first column is the first of a pair. Then multiplies the columns by `scales`, if that is not null.
template <class T>
inline void rotate(const float* t, const float* rope, const float* scales, int n, T* out) {
  const I32 lane = lane_index();
  const I32 even = lane & ~1, odd = lane | 1, swapped = lane ^ 1;
  const F32 sign = select((lane & 1) != 0, splat(1.0f), splat(-1.0f));
  for (int i = 0; i < n; i += kLanes) {
    const F32 v = load(t + i, n - i), angle = load(rope + i, n - i);
    const F32 turned = MK_SHUFFLE(v, swapped) * sign * MK_SHUFFLE(angle, odd);
    F32 rotated = v * MK_SHUFFLE(angle, even) + turned;
    if (scales != nullptr) rotated = rotated * load(scales + i, n - i);
    store(out + i, rotated, n - i);
  }
}

// Applies an RMS norm to each head of q and k in columns [first, first + n) of q, k and v, which must be
// whole heads. With dims.late_scales, `rotate` multiplies by the norm's weights, after RoPE.
inline void norm_heads(const Call& call, int first, int n, float* t) {
  const Dims& d = *call.dims;
  const int rotated = lower_of(n, d.q_cols() + d.kv_cols() - first);
  const float* const weights = call.at<float>(call.phase->head_norm);
  for (int i = 0; i < rotated; i += d.head_dim) {
    const float* weight = weights + (first + i < d.q_cols() ? 0 : d.head_dim);
    const float scale = rms_scale(t + i, d.head_dim, d.rms_eps);
    for (int j = 0; j < d.head_dim; j += kLanes) {
      const int m = d.head_dim - j;
      float* x = t + i + j;
      store(x, d.late_scales ? load(x, m) * scale : normalised(x, weight + j, scale, m), m);
    }
  }
}

// Stores the K or V of one token and one head in Q8_0 format, rounded as the gguf package rounds. `page`
// points to the head's data in the token's KV page. In each quantisation block, K is stored as [word of four
// elements][token], and V as [token][element].
inline void quantise(const Dims& d, const float* x, char* page, int token, bool is_key) {
  for (int first = 0; first < d.head_dim; first += kKvUnit, page += kv_block_bytes(d)) {
    const int n = lower_of(d.head_dim - first, kKvUnit);
    float top = 0.0f;
    for (int i = 0; i < n; ++i) {
      const float a = fabsf(x[first + i]);
      top = a > top || a != a ? a : top;
    }
    const float scale = top / 127.0f, inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    const uint16_t half = half_of(scale);
    memcpy(page + token * kKvScale, &half, sizeof half);
    char* const values = page + kKvScale * d.kv_page;
    for (int i = 0; i < n; ++i) {
      // Rounds to the nearest integer; halves are rounded away from zero. Adding 0.5 and truncating would be
      // wrong, because the addition itself rounds. NaN becomes 0 here. It is not lost, because the block's
      // scale is then NaN or infinity, and so all values of the block are read as NaN.
      const float product = x[first + i] * inverse, a = product == product ? product : 0.0f;
      const float whole = static_cast<float>(static_cast<int32_t>(a));
      const float up = fabsf(a) >= fabsf(whole) + 0.5f ? 1.0f : 0.0f;
      const int at = is_key ? (i / 4 * d.kv_page + token) * 4 + i % 4 : token * n + i;
      values[at] = static_cast<char>(static_cast<int32_t>(whole + (a < 0.0f ? -up : up)));
    }
  }
}

// Finishes columns [first, first + n) of row r of the QKV projection: applies RoPE to q and k, then stores q
// in the output, and k and v in the KV cache. If heads are normalised or the KV cache is quantised, the range
// must consist of whole heads. Otherwise it may begin and end inside heads.
template <class T>
inline void store_heads(const Call& call, int r, int first, int n, float* t) {
  const Dims& d = *call.dims;
  if (call.phase->head_norm != Buffer::kNone) norm_heads(call, first, n, t);
  const StepView& s = *call.step;
  const float* rope = call.at<float>(Buffer::ROPE) + int64_t{r} * d.head_dim;
  const float* q_scales = d.late_scales ? call.at<float>(call.phase->head_norm) : nullptr;
  const float* k_scales = q_scales == nullptr ? nullptr : q_scales + d.head_dim;
  const int32_t seq = s.row_seq[r], position = s.positions[r], offset = position % d.kv_page;
  const int32_t page = seq < 0 ? 0 : s.block_tables[int64_t{seq} * d.pages_per_seq() + position / d.kv_page];
  for (int i = 0, width; i < n; i += width) {
    const int col = first + i;
    const int element = col % d.head_dim;
    width = lower_of(d.head_dim - element, n - i);
    if (col < d.q_cols()) {
      rotate(t + i, rope + element, q_scales, width, call.output<T>() + int64_t{r} * d.q_cols() + col);
    } else if (seq < 0) {
      continue;
    } else if (col < d.q_cols() + d.kv_cols()) {
      const int head = (col - d.q_cols()) / d.head_dim;
      if (d.quantised_kv) {
        rotate(t + i, rope, k_scales, width, t + i);
        quantise(d, t + i, call.at<char>(Buffer::K_CACHE) + k_index(d, page, head, 0), offset, true);
        continue;
      }
      T* k = call.at<T>(Buffer::K_CACHE) + k_index(d, page, head, element) + offset;
      T rotated[kPanel];
      for (int j = 0; j < width; j += kPanel) {
        const int m = lower_of(width - j, kPanel);
        const float* scales = k_scales == nullptr ? nullptr : k_scales + j;
        rotate(t + i + j, rope + element + j, scales, m, rotated);
        for (int e = 0; e < m; ++e) k[int64_t{j + e} * d.kv_page] = rotated[e];
      }
    } else {
      const int head = (col - d.q_cols() - d.kv_cols()) / d.head_dim;
      if (d.quantised_kv) {
        quantise(d, t + i, call.at<char>(Buffer::V_CACHE) + v_index(d, page, head, 0), offset, false);
        continue;
      }
      T* v = call.at<T>(Buffer::V_CACHE) + v_index(d, page, head, offset) + element;
      for (int j = 0; j < width; j += kLanes) store(v + j, load(t + i + j, width - j), width - j);
    }
  }
}

// Computes a tile of the QKV projection. Normalising a head, or quantising it for the KV cache, needs all its
// columns at once. In these cases the tile is divided into parts of whole heads, as many as one call of
// `gemm` can compute.
template <class T>
void heads(const Call& call, const Tile& tile) {
  // One weight panel fewer than `gemm` can compute at once, because a part of the tile that begins inside a
  // panel touches one panel more.
  constexpr int kPass = (kTilePanels - 1) * kPanel;
  static_assert(kMostHeadDim <= kPass);
  const int head = call.dims->head_dim;
  const bool whole = call.phase->head_norm != Buffer::kNone || call.dims->quantised_kv;
  const int most = whole ? kPass / head * head : tile.cols;
  for (int done = 0; done < tile.cols; done += most)
    gemm<T>(call, {tile.row, tile.rows, tile.col + done, lower_of(most, tile.cols - done)}, store_heads<T>);
}

}  // namespace mk::MK_SIMD
