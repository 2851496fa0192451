#pragma once
#include <math.h>

#include "../../common/philox.h"
#include "../simd/draw.h"
#include "store.h"

namespace mk::MK_SIMD {

// Returns the index of the largest of n values, the lowest such index if there is a tie, or 0 if all are NaN.
inline int32_t argmax(const float* z, int n) {
  constexpr int kRun = 64 * kLanes;
  const I32 lane = lane_index();
  float best = -INFINITY;
  int found = 0;  // where the first run that contains `best` begins
  for (int begin = 0; begin < n; begin += kRun) {
    const int end = lower_of(n, begin + kRun);
    F32 top = splat(-INFINITY);
    for (int i = begin; i < end; i += kLanes) {
      const F32 v = load(z + i, end - i);
      top = select((v > top) & (lane < end - i), v, top);
    }
    if (max(top) > best) {
      best = max(top);
      found = begin;
    }
  }
  for (int i = found; i < n; ++i) {
    if (z[i] == best) return i;
  }
  return 0;
}

// Stores e^(z - top) in `out` and returns the sum of these values. Sums of kRun values are computed in
// float32 and then added in double.
inline double exponentials(const float* z, int n, float top, float* out) {
  constexpr int kRun = 64 * kLanes;
  const I32 lane = lane_index();
  double total = 0.0;
  for (int begin = 0; begin < n; begin += kRun) {
    const int end = n - begin < kRun ? n : begin + kRun;
    F32 run{};
    for (int i = begin; i < end; i += kLanes) {
      const F32 e = select(lane < end - i, exp(load(z + i, end - i) - top), F32{});
      run += e;
      store(out + i, e, end - i);
    }
    total += sum(run);
  }
  return total;
}

// Sets the logit of each token to minus infinity if its bit in `mask` is 0.
inline void apply_mask(const Dims& d, const int32_t* mask, float* z) {
  for (int begin = 0; begin < d.vocab; begin += 32) {
    const uint32_t bits = static_cast<uint32_t>(mask[begin / 32]);
    const int end = d.vocab - begin < 32 ? d.vocab - begin : 32;
    if (bits == ~0u) continue;
    for (int i = 0; i < end; ++i) z[begin + i] = bits >> i & 1 ? z[begin + i] : -INFINITY;
  }
}

// Whether row i has penalties, a logit bias or a token mask.
inline bool adjusts(const StepView& s, int i) {
  return s.repetition_penalty[i] != 1.0f || s.presence_penalty[i] != 0.0f || s.frequency_penalty[i] != 0.0f ||
         s.bias_begin[i] < s.bias_end[i] || s.mask[i] > 0;
}

// Applies row i's penalties, logit bias and token mask to its logits z.
inline void adjust(const Call& call, int i, float* z) {
  const Dims& d = *call.dims;
  const StepView& s = *call.step;
  const float repetition = s.repetition_penalty[i];
  const float presence = s.presence_penalty[i], frequency = s.frequency_penalty[i];
  const int32_t slot = s.history_slot[i];
  if (slot >= 0 && (repetition != 1.0f || presence != 0.0f || frequency != 0.0f)) {
    const int32_t* history = call.at<int32_t>(Buffer::HISTORY) + int64_t{slot} * (d.max_context + 1);
    const int end = s.sample_position[i], prompt = s.prompt_length[i];
    int32_t* counts = call.scratch->counts;
    for (int t = 0; t < end; ++t) {
      const int32_t id = history[t];
      if (counts[id]++ == 0) z[id] = z[id] > 0.0f ? z[id] / repetition : z[id] * repetition;
    }
    for (int t = 0; t < end; ++t) counts[history[t]] = 0;
    for (int t = prompt; t < end; ++t) ++counts[history[t]];
    for (int t = prompt; t < end; ++t) {
      const int32_t id = history[t];
      if (counts[id] > 0) z[id] -= presence + frequency * static_cast<float>(counts[id]);
      counts[id] = 0;
    }
  }
  for (int b = s.bias_begin[i]; b < s.bias_end[i]; ++b) z[s.bias_ids[b]] += s.bias_values[b];
  if (s.mask[i] > 0) apply_mask(d, s.masks + int64_t{s.mask[i] - 1} * d.mask_words(), z);
}

inline void sample_row(const Call& call, int i) {
  const Dims& d = *call.dims;
  const StepView& s = *call.step;
  int32_t token = 0;
  float logprob = 0.0f;
  if (s.logit_rows[i] >= 0) {
    const float* raw = call.inputs<float>() + int64_t{i} * d.vocab;
    float* z = call.scratch->logits;
    const int32_t likeliest = argmax(raw, d.vocab);
    const float top = raw[likeliest], temperature = s.temperature[i];
    const double log_sum = top + log(exponentials(raw, d.vocab, top, z));
    token = s.target[i];
    if (token < 0 && temperature <= 0.0f && !adjusts(s, i)) token = likeliest;
    if (token < 0) {
      memcpy(z, raw, d.vocab * sizeof(float));
      adjust(call, i, z);
      token = argmax(z, d.vocab);
      if (temperature > 0.0f) {
        for (int v = 0; v < d.vocab; ++v) z[v] /= temperature;
        exponentials(z, d.vocab, z[token], z);
        const double u =
            random_bits(s.seed_low[i], s.seed_high[i], s.sample_position[i], s.choice[i]) * 0x1p-24;
        token = draw(z, d.vocab, s.min_p[i], s.top_k[i], s.top_p[i], u, token);
      }
    }
    logprob = static_cast<float>(raw[token] - log_sum);
    const int32_t slot = s.sample_slot[i], position = s.sample_position[i];
    if (slot >= 0 && position <= d.max_context) {
      store_to(call, Buffer::HISTORY, all_ranks(d), int64_t{slot} * (d.max_context + 1) + position, &token,
               1);
    }
  }
  store_to(call, Buffer::TOKENS_OUT, {0, 1}, i, &token, 1);
  store_to(call, Buffer::LOGPROBS_OUT, {0, 1}, i, &logprob, 1);
}

inline void sample(const Call& call, const Run& op) {
  for (int i = op.row; i < op.row + op.rows && !call.aborted(); ++i) sample_row(call, i);
}

}  // namespace mk::MK_SIMD
