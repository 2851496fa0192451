#include "simd/draw.h"

#include <string.h>

#include <algorithm>
#include <vector>

namespace mk {
namespace {

// Returns a key for sorting tokens by weight, largest first, and then by id, lowest first. The bits of
// non-negative floats, read as integers, have the same order as the floats.
uint64_t order_key(float weight, int32_t id) {
  uint32_t bits;
  memcpy(&bits, &weight, sizeof bits);
  return uint64_t{~bits} << 32 | static_cast<uint32_t>(id);
}

float key_weight(uint64_t key) {
  const uint32_t bits = ~static_cast<uint32_t>(key >> 32);
  float weight;
  memcpy(&weight, &bits, sizeof weight);
  return weight;
}

// Top-p: returns how many of the largest weights are needed to reach the fraction top_p of the total weight.
// Moves their keys to the front of `keys`, the largest weight first. To save time, the keys are sorted only
// as far as needed: a trained model's distribution usually needs only a few of them.
size_t nucleus(std::vector<uint64_t>& keys, float top_p) {
  double total = 0.0, sum = 0.0;
  for (const uint64_t key : keys) total += key_weight(key);
  const double wanted = top_p * total;
  size_t sorted = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (i == sorted) {
      sorted = std::min(keys.size(), sorted == 0 ? 64 : 4 * sorted);
      std::nth_element(keys.begin() + i, keys.begin() + (sorted - 1), keys.end());
      std::sort(keys.begin() + i, keys.begin() + sorted);
    }
    sum += key_weight(keys[i]);
    if (sum >= wanted) return i + 1;
  }
  return keys.size();
}

}  // namespace

int32_t draw(float* e, int32_t vocab, float min_p, int32_t top_k, float top_p, double u, int32_t fallback) {
  const bool rank_cut = (top_k > 0 && top_k < vocab) || top_p < 1.0f;
  std::vector<uint64_t> keys;
  for (int32_t id = 0; id < vocab; ++id) {
    if (!(e[id] >= min_p)) e[id] = 0.0f;
    if (rank_cut && e[id] > 0.0f) keys.push_back(order_key(e[id], id));
  }
  if (rank_cut) {
    if (top_k > 0 && static_cast<size_t>(top_k) < keys.size()) {
      std::nth_element(keys.begin(), keys.begin() + (top_k - 1), keys.end());
      for (size_t i = top_k; i < keys.size(); ++i) e[static_cast<uint32_t>(keys[i])] = 0.0f;
      keys.resize(top_k);
    }
    if (top_p < 1.0f) {
      for (size_t i = nucleus(keys, top_p); i < keys.size(); ++i) e[static_cast<uint32_t>(keys[i])] = 0.0f;
    }
  }
  double sum = 0.0;
  for (int32_t id = 0; id < vocab; ++id) sum += e[id];
  const double wanted = u * sum;
  double cumulative = 0.0;
  for (int32_t id = 0; id < vocab; ++id) {
    cumulative += e[id];
    if (cumulative > wanted) return id;
  }
  return fallback;
}

}  // namespace mk
