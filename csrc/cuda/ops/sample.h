// Samples one token from a row of logits; the eight warps share the row. The code applies penalties,
// bias, mask, temperature, min-p, top-k and top-p, then draws one token, as
// megakernel/isa/operations/sample.py defines. Nothing is sorted: top-k and top-p search for the lowest
// logit that they keep. Weights are summed as integers, so that a sum has the same bits in any order.
#pragma once
#include "../../common/philox.h"
#include "call.h"
#include "memory.h"

namespace mk {

// Maps floats to unsigned integers that have the same order; both zeros give the same integer.
MK_FN uint32_t order_key(float value) {
  const uint32_t bits = float_to_bits(value + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

MK_FN float key_value(uint32_t key) { return bits_to_float(key >> 31 ? key & 0x7FFFFFFFu : ~key); }

MK_FN uint64_t add(uint64_t a, uint64_t b) { return a + b; }
MK_FN uint64_t greater(uint64_t a, uint64_t b) { return a > b ? a : b; }
MK_FN uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

// The largest logit found so far, and its token id: the lowest id if several logits are equal.
struct Peak {
  float value;
  int32_t id;
};

MK_FN uint64_t peak_key(float value, int32_t id) {
  return uint64_t{order_key(value)} << 32 | ~static_cast<uint32_t>(id);
}

MK_FN Peak as_peak(uint64_t key) {
  return {key_value(static_cast<uint32_t>(key >> 32)), static_cast<int32_t>(~static_cast<uint32_t>(key))};
}

// Returns the weight of a token in the random draw, in units of 2^-44; the sum of 2^18 weights fits in 64
// bits. `e` is exp(the token's logit - the largest logit); the weight of NaN is 0.
MK_FN uint64_t weight(float e) { return e > 0.0f ? static_cast<uint64_t>(e * 0x1p44f) : 0; }
constexpr float kWeightless = 32.0f;  // the weight of logits this far below the maximum is 0

// The tokens that top-k and top-p have kept so far: those with a logit above `bound`, and those with a logit
// equal to `bound` and an id of at most `last`.
struct Cut {
  float bound;
  int32_t last;
};

template <class P>
class Sampler {
 public:
  MK_FN Sampler(P& p, const Call& call)
      : p_(p),
        call_(call),
        vocab_(call.dims->vocab),
        thread_(call.warp * P::kLanes + p.lane()),
        z_(call.params->sample_scratch + int64_t{call.block} * 2 * vocab_),
        other_(z_ + vocab_),
        team_(p, call) {}

  // Samples logit row i. The token and its log-probability go to the outputs at rank 0; every rank also gets
  // the token in its token history.
  MK_FN void row(int i) {
    const Sizes& d = *call_.dims;
    const StepView& s = *call_.step;
    int32_t token = 0;
    float logprob = 0.0f;
    if (s.logit_rows[i] >= 0) {
      const float* raw = call_.at<float>(call_.phase().inputs) + int64_t{i} * vocab_;
      float log_sum;
      const Peak peak = soft_peak(raw, log_sum);
      token = s.target[i] >= 0 ? s.target[i] : choose(i, raw, peak.id);
      logprob = load_float(raw + token) - log_sum;
    }
    if (thread_ > 0) return;
    call_.copy<int32_t>(Buffer::TOKENS_OUT, 0)[i] = token;
    call_.copy<float>(Buffer::LOGPROBS_OUT, 0)[i] = logprob;
    if (s.sample_slot[i] < 0) return;
    const int64_t at = int64_t{s.sample_slot[i]} * (d.max_context + 1) + s.sample_position[i];
    MK_LOOP for (int rank = 0; rank < d.tp; ++rank) call_.copy<int32_t>(Buffer::HISTORY, rank)[at] = token;
  }

 private:
  static constexpr int kThreadsOfRow = kConsumerWarps * P::kLanes;
  enum Step { kTopK, kTopP, kDraw };

  // A thread loads kLoads logits at a time: those of token ids begin + j * kThreadsOfRow, for each j
  // below kLoads. Ids beyond the vocabulary get minus infinity.
  static constexpr int kLoads = 16;
  struct Logits {
    float v[kLoads];
  };
  MK_FN Logits load(const float* z, int begin) const {
    Logits out;
    if (begin < vocab_ - (kLoads - 1) * kThreadsOfRow) {
      MK_UNROLL for (int j = 0; j < kLoads; ++j) out.v[j] = load_float(z + begin + j * kThreadsOfRow);
      return out;
    }
    MK_UNROLL for (int j = 0; j < kLoads; ++j) {
      const int id = begin + j * kThreadsOfRow;
      out.v[j] = id < vocab_ ? load_float(z + id) : minus_infinity();
    }
    return out;
  }

  // Returns the largest logit of the row, and sets log_sum to the log of the sum of e^logit. To hide
  // latency, a thread adds up one batch of kLoads logits while the next two batches are being loaded.
  MK_FN Peak soft_peak(const float* z, float& log_sum) {
    constexpr int kGroup = 4;  // number of logits for which the running sum is rescaled once
    float top = minus_infinity(), sum = 0.0f;
    int id = 0;  // the first id with the largest logit
    Logits next = load(z, thread_), after = load(z, thread_ + kLoads * kThreadsOfRow);
    MK_LOOP for (int begin = thread_; begin < vocab_; begin += kLoads * kThreadsOfRow) {
      const Logits held = next;
      next = after;
      after = load(z, begin + 2 * kLoads * kThreadsOfRow);
      const float first = top;
      MK_UNROLL for (int j = 0; j < kLoads; j += kGroup) {
        const float before = top;
        MK_UNROLL for (int k = j; k < j + kGroup; ++k) top = fmaxf(top, held.v[k]);
        if (top > before) sum *= expf(before - top);
        MK_UNROLL for (int k = j; k < j + kGroup; ++k) sum += expf(held.v[k] - top);
      }
      if (top > first) {
        MK_UNROLL for (int j = kLoads - 1; j >= 0; --j) {
          if (held.v[j] == top) id = begin + j * kThreadsOfRow;
        }
      }
    }
    const Peak peak = as_peak(team_.reduce(peak_key(top, id), greater));
    log_sum = peak.value + logf(team_.sum(sum * expf(top - peak.value)));
    return peak;
  }

  MK_FN int32_t choose(int i, const float* raw, int32_t greatest) {
    const StepView& s = *call_.step;
    const float temperature = s.temperature[i];
    const bool penalised =
        s.history_slot[i] >= 0 &&
        (s.repetition_penalty[i] != 1.0f || s.presence_penalty[i] != 0.0f || s.frequency_penalty[i] != 0.0f);
    const bool biased = s.bias_begin[i] < s.bias_end[i];
    const bool masked = s.mask[i] > 0;
    if (temperature == 0.0f && !penalised && !biased && !masked) return greatest;
    MK_UNROLL_4 for (int id = thread_; id < vocab_; id += kThreadsOfRow) z_[id] = load_float(raw + id);
    if (masked) apply_mask(s.masks + int64_t{s.mask[i] - 1} * call_.dims->mask_words());
    p_.consumer_sync();
    if (penalised) penalise(i);
    if (biased) add_bias(i);
    uint64_t key = 0;
    MK_LOOP for (int id = thread_; id < vocab_; id += kThreadsOfRow) {
      float z = load_float(z_ + id);
      if (temperature > 0.0f) z_[id] = z /= temperature;
      key = greater(key, peak_key(z, id));
    }
    const Peak peak = as_peak(team_.reduce(key, greater));
    if (temperature == 0.0f || peak.value == minus_infinity()) return peak.id;
    top_ = peak.value;
    min_p_ = s.min_p[i];
    cut_ = {minus_infinity(), vocab_};
    // Up to three steps: top-k counts tokens, top-p adds up their weights, and the draw chooses a token. Each
    // step considers only the tokens that the previous one kept. The steps share most of their code, so a
    // loop keeps the kernel small.
    MK_LOOP for (int step = s.top_k[i] > 0 ? kTopK : kTopP;; ++step) {
      const bool count = step == kTopK;
      const uint64_t all = total(count);
      if (all == 0) return peak.id;  // the largest logit is NaN or infinite
      if (step == kTopP && !(s.top_p[i] < 1.0f)) step = kDraw;
      uint64_t wanted = count           ? least(static_cast<uint64_t>(s.top_k[i]), all)
                        : step == kTopP ? part(s.top_p[i], all)
                                        : drawn(i, all);
      if (wanted == all) continue;
      float bound = minus_infinity();
      if (step != kDraw) wanted = shorten(wanted, count, bound) - 1;
      const int32_t id = locate(wanted, step != kDraw, bound);
      if (step == kDraw) return id;
      cut_ = {bound, id};
    }
  }

  // Returns the weight that top-p must keep: the fraction p of the total `all`, rounded up, at least 1.
  MK_FN static uint64_t part(float p, uint64_t all) {
    const double wanted = ceil(static_cast<double>(p) * static_cast<double>(all));
    return wanted < 1.0 ? 1 : least(static_cast<uint64_t>(wanted), all);
  }

  // Returns a pseudo-random integer in [0, all), which selects the token. It depends on row i's seed,
  // sample position and choice (the completion's index within its request).
  MK_FN uint64_t drawn(int i, uint64_t all) const {
    const StepView& s = *call_.step;
    const uint64_t bits = random_bits(s.seed_low[i], s.seed_high[i], s.sample_position[i], s.choice[i]);
    // Computes floor(all * bits / 2^24) in two parts, because all * bits may exceed 64 bits.
    return (all >> 24) * bits + (((all & 0xFFFFFF) * bits) >> 24);
  }

  // Returns the weight of token `id` with logit z, or 1 if `count` is set. Returns 0 if the token is not
  // kept.
  MK_FN uint64_t measure(float z, int id, bool count) const {
    const float e = expf(z - top_);
    const uint64_t w = weight(e);
    const bool kept = w > 0 && e >= min_p_ && (z > cut_.bound || (z == cut_.bound && id <= cut_.last));
    return kept ? count ? 1 : w : 0;
  }

  MK_FN uint64_t total(bool count) {
    uint64_t sum = 0;
    MK_UNROLL_4 for (int id = thread_; id < vocab_; id += kThreadsOfRow) sum +=
        measure(load_float(z_ + id), id, count);
    return team_.reduce(sum, add);
  }

  // Adds up the weights of the kept tokens in ascending order of id, and returns the id at which the sum
  // exceeds `wanted`. With `equals`, counts the kept tokens whose logit equals `bound` instead. In each
  // round, each of the eight warps adds up an eighth of the remaining ids.
  MK_FN int32_t locate(uint64_t wanted, bool equals, float bound) {
    int begin = 0, end = vocab_;
    while (end - begin > 1) {
      const int part = ceil_div(end - begin, kConsumerWarps);
      const int from = begin + call_.warp * part;
      uint64_t sum = 0;
      MK_UNROLL_4 for (int id = from + p_.lane(); id < lower_of(from + part, end); id += P::kLanes) {
        const float z = load_float(z_ + id);
        const uint64_t m = measure(z, id, equals);
        sum += !equals || z == bound ? m : 0;
      }
      const uint64_t* parts = team_.gather(reduce_lanes<P>(sum, add));
      int w = 0;
      MK_LOOP for (; w < kConsumerWarps - 1 && parts[w] <= wanted; ++w) wanted -= parts[w];
      begin += w * part;
      end = lower_of(begin + part, end);
    }
    return lower_of(begin, vocab_ - 1);
  }

  // Top-k and top-p: finds how many of the largest logits are needed to reach a total of `wanted`. The
  // total is the number of logits if `count` is set, otherwise the sum of their weights. Sets `bound` to
  // the smallest logit that is needed: all logits above `bound` are kept, and some of those equal to
  // `bound`. Returns how many of the equal ones are kept.
  //
  // A bisection over order keys (integers in the same order as the logits) finds the bound. The logits
  // with keys above `low` reach a total of `wanted`, and the logits with keys above `high` do not. Each
  // round brings `low` and `high` closer together, until they differ by 1. After kRoundsBeforeList
  // rounds, the logits between them are copied to a list, and later rounds read only this list.
  MK_FN uint64_t shorten(uint64_t wanted, bool count, float& bound) {
    constexpr int kRoundsBeforeList = 4;
    uint32_t low = order_key(top_ - kWeightless) - 1, high = order_key(top_);
    uint64_t above = 0;
    int listed = -1;
    for (int round = 0; high - low > 1; ++round) {
      if (round == kRoundsBeforeList) listed = list(low, high);
      const float middle = 0.5f * key_value(low) + 0.5f * key_value(high);
      uint32_t cut = order_key(middle);
      if (cut <= low || cut >= high) cut = low + (high - low) / 2;
      uint64_t sum = 0, ends = 0;
      const auto look = [&](uint32_t key, uint64_t m) {
        if (m == 0 || key <= low || key > high) return;
        if (key > cut) sum += m;
        ends = widen(ends, key > cut ? uint64_t{~key} : uint64_t{key} << 32);
      };
      if (listed < 0) {
        MK_UNROLL_4 for (int id = thread_; id < vocab_; id += kThreadsOfRow) {
          const float z = load_float(z_ + id);
          look(order_key(z), measure(z, id, count));
        }
      } else {
        MK_LOOP for (int j = thread_; j < listed; j += kThreadsOfRow) {
          const float z = load_float(other_ + j);
          look(order_key(z), count ? 1 : weight(expf(z - top_)));
        }
      }
      sum = team_.reduce(sum, add);
      ends = team_.reduce(ends, widen);
      if (above + sum >= wanted) {
        low = ~static_cast<uint32_t>(ends) - 1;  // just below the smallest key above `cut`
      } else {
        above += sum;
        high = static_cast<uint32_t>(ends >> 32);  // the largest key that is at most `cut`
      }
    }
    bound = key_value(high);
    const uint64_t each = count ? 1 : weight(expf(bound - top_));
    return (wanted - above + each - 1) / each;
  }

  // Each word has two 32-bit halves. Returns the larger upper half of a and b and the larger lower half.
  MK_FN static uint64_t widen(uint64_t a, uint64_t b) {
    const uint64_t high = 0xFFFFFFFF00000000u;
    return greater(a & high, b & high) | greater(a & ~high, b & ~high);
  }

  // Copies the kept logits with order keys in (low, high] to `other_`. Returns their number.
  MK_FN int list(uint32_t low, uint32_t high) {
    int32_t* count = &call_.shared->listed;
    if (thread_ == 0) *count = 0;
    p_.consumer_sync();
    MK_LOOP for (int id = thread_; id < vocab_; id += kThreadsOfRow) {
      const float z = load_float(z_ + id);
      const uint32_t key = order_key(z);
      if (key > low && key <= high && measure(z, id, true)) other_[fetch_add(count, 1)] = z;
    }
    p_.consumer_sync();
    return *count;
  }

  // Calls each(token id) for tokens [begin, end) of a history, which the threads divide among themselves.
  template <class Each>
  MK_FN void for_tokens(const int32_t* history, int begin, int end, const Each& each) {
    MK_LOOP for (int t = begin + thread_; t < end; t += kThreadsOfRow) each(load_int(history + t));
    p_.consumer_sync();
  }

  // Applies the repetition penalty to every token of the history, then the frequency and presence penalties
  // to the tokens after the prompt. If a token occurs several times, only the first thread that reaches it
  // changes its logit, so that each penalty is applied once.
  MK_FN void penalise(int i) {
    const Sizes& d = *call_.dims;
    const StepView& s = *call_.step;
    const int32_t* history =
        call_.at<int32_t>(Buffer::HISTORY) + int64_t{s.history_slot[i]} * (d.max_context + 1);
    int32_t* counts = reinterpret_cast<int32_t*>(other_);
    const int end = s.sample_position[i];
    const float repetition = s.repetition_penalty[i];
    const auto forget = [&](int32_t id) { exchange(counts + id, 0); };
    for_tokens(history, 0, end, forget);
    for_tokens(history, 0, end, [&](int32_t id) {
      if (exchange(counts + id, 1) != 0) return;
      const float z = load_float(z_ + id);
      z_[id] = z > 0.0f ? z / repetition : z * repetition;
    });
    for_tokens(history, 0, end, forget);
    for_tokens(history, s.prompt_length[i], end, [&](int32_t id) { fetch_add(counts + id, 1); });
    for_tokens(history, s.prompt_length[i], end, [&](int32_t id) {
      const int32_t n = exchange(counts + id, 0);
      if (n > 0)
        z_[id] =
            load_float(z_ + id) - (s.frequency_penalty[i] * static_cast<float>(n) + s.presence_penalty[i]);
    });
  }

  // Sets the logits whose mask bit is 0 to minus infinity, which later additions do not change. Each thread
  // changes only logits that it has copied itself, so this function needs no barrier.
  MK_FN void apply_mask(const int32_t* mask) {
    MK_LOOP for (int id = thread_; id < vocab_; id += kThreadsOfRow) {
      if (!(static_cast<uint32_t>(mask[id / 32]) >> id % 32 & 1)) z_[id] = minus_infinity();
    }
  }

  // Adds the logit biases of row i. A token may have several pairs (token id, bias) in the row's list. The
  // thread that processes the first of them adds all of the token's biases, in the order of the list.
  MK_FN void add_bias(int i) {
    const StepView& s = *call_.step;
    const int end = s.bias_end[i];
    MK_LOOP for (int b = s.bias_begin[i] + thread_; b < end; b += kThreadsOfRow) {
      const int32_t id = s.bias_ids[b];
      int first = s.bias_begin[i];
      while (s.bias_ids[first] != id) ++first;
      if (first < b) continue;
      float z = load_float(z_ + id);
      MK_LOOP for (int j = b; j < end; ++j) {
        if (s.bias_ids[j] == id) z += s.bias_values[j];
      }
      z_[id] = z;
    }
    p_.consumer_sync();
  }

  P& p_;
  const Call& call_;
  const int vocab_, thread_;
  float* z_;      // the row's logits
  float* other_;  // first, counts of tokens for penalties; later, the list of logits that `shorten` reads
  Team<P> team_;
  float top_ = 0.0f, min_p_ = 0.0f;
  Cut cut_{};
};

template <class P>
MK_FN void sample(P& p, const Call& call, const Run& op) {
  Sampler<P> sampler(p, call);
  for (int i = op.row; i < op.row + op.rows; ++i) sampler.row(i);
}

}  // namespace mk
