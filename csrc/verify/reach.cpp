#include "reach.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <numeric>
#include <thread>

namespace mk::verify {

int32_t topological_order(const Graph& graph, int32_t* missing, int32_t* order) {
  std::vector<int64_t> begin(graph.rows + 1);
  for (int64_t e = 0; e < graph.edges; e++) begin[graph.source[e] + 1]++;
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  std::vector<int32_t> after(graph.edges);
  std::vector<int64_t> next(begin.begin(), begin.end() - 1);
  for (int64_t e = 0; e < graph.edges; e++) after[next[graph.source[e]]++] = graph.target[e];

  int32_t done = 0;
  for (int32_t row = 0; row < graph.rows; row++)
    if (missing[row] == 0) order[done++] = row;
  for (int32_t i = 0; i < done; i++)
    for (int64_t e = begin[order[i]]; e < begin[order[i] + 1]; e++)
      if (--missing[after[e]] == 0) order[done++] = after[e];
  return done;
}

Reach::Reach(const Graph& graph, const int32_t* order)
    : rows_(graph.rows),
      counters_(graph.first[graph.runs]),
      position_(graph.rows),
      begin_(graph.rows + 1),
      before_(graph.edges),
      row_(order, order + graph.rows),
      stands_in_(graph.rows) {
  for (int32_t i = 0; i < rows_; i++) position_[order[i]] = i;
  std::vector<uint8_t> used(rows_);
  for (int64_t e = 0; e < graph.edges; e++) {
    begin_[position_[graph.target[e]] + 1]++;
    used[graph.source[e]] = 1;
  }
  std::partial_sum(begin_.begin(), begin_.end(), begin_.begin());
  std::vector<int64_t> next(begin_.begin(), begin_.end() - 1);
  std::iota(stands_in_.begin(), stands_in_.end(), 0);
  for (int64_t e = 0; e < graph.edges; e++) {
    const int32_t source = graph.source[e], target = graph.target[e];
    before_[next[position_[target]]++] = position_[source];
    if (target >= counters_ && used[target] && stands_in_[source] == source) stands_in_[source] = target;
  }
}

// Hundreds of tiles signal one counter, so the question is first asked of the counter. What has no path from
// there may have another: that is asked of the row itself.
std::vector<int64_t> Reach::unordered(const std::vector<Pair>& pairs) const {
  std::vector<int64_t> which(pairs.size());
  std::iota(which.begin(), which.end(), 0);
  std::vector<int32_t> source(pairs.size());
  for (size_t i = 0; i < pairs.size(); i++) source[i] = stands_in_[pairs[i].earlier];
  which = sweep_all(pairs, which, source);
  for (int64_t i : which) source[i] = pairs[i].earlier;
  return sweep_all(pairs, which, source);
}

std::vector<int64_t> Reach::sweep_all(const std::vector<Pair>& pairs, const std::vector<int64_t>& which,
                                      const std::vector<int32_t>& source) const {
  if (which.empty()) return {};
  // Number the sources in topological order and deal the pairs to chunks of kBits sources.
  std::vector<int32_t> number(rows_, -1);
  for (int64_t i : which) number[position_[source[i]]] = 0;
  std::vector<std::vector<int32_t>> chunks;
  int32_t sources = 0;
  for (int32_t p = 0; p < rows_; p++) {
    if (number[p] < 0) continue;
    if (sources % kBits == 0) chunks.emplace_back();
    chunks.back().push_back(p);
    number[p] = sources++;
  }
  std::vector<int64_t> begin(chunks.size() + 1);
  for (int64_t i : which) begin[number[position_[source[i]]] / kBits + 1]++;
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  std::vector<int64_t> index(which.size()), next(begin.begin(), begin.end() - 1);
  std::vector<Pair> sorted(which.size());
  std::vector<int32_t> bit(which.size());
  for (int64_t i : which) {
    const int32_t n = number[position_[source[i]]];
    const int64_t at = next[n / kBits]++;
    index[at] = i;
    sorted[at] = pairs[i];
    bit[at] = n % kBits;
  }

  std::vector<uint8_t> missed(which.size());
  const size_t threads = std::min<size_t>(chunks.size(), std::max(1u, std::thread::hardware_concurrency()));
  std::atomic<bool> out_of_memory = false;
  auto work = [&](size_t first) {
    try {
      for (size_t c = first; c < chunks.size(); c += threads)
        sweep(chunks[c], &sorted[begin[c]], &bit[begin[c]], begin[c + 1] - begin[c], &missed[begin[c]]);
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
    }
  };
  std::vector<std::thread> pool;
  for (size_t t = 1; t < threads; t++) pool.emplace_back(work, t);
  work(0);
  for (std::thread& thread : pool) thread.join();
  if (out_of_memory) throw std::bad_alloc();

  std::vector<int64_t> out;
  for (size_t i = 0; i < which.size(); i++)
    if (missed[i]) out.push_back(index[i]);
  std::sort(out.begin(), out.end());
  return out;
}

// Carry two bits per source along all edges, from the first source to the last row that is asked about:
// whether the source has ended, and whether it has only begun, when a row begins. A signal comes when what
// began has ended.
void Reach::sweep(const std::vector<int32_t>& sources, const Pair* pairs, const int32_t* bit, int64_t count,
                  uint8_t* missed) const {
  const int32_t start = sources.front();
  int32_t end = start;
  for (int64_t i = 0; i < count; i++) end = std::max(end, position_[pairs[i].later] + 1);
  constexpr int kEnded = 1, kBegun = 2;
  std::vector<uint64_t> bits(static_cast<size_t>(end - start) * 2 * kWords);  // ended, begun
  std::vector<uint8_t> any(end - start);
  size_t own = 0;
  for (int32_t p = start; p < end; p++) {
    const bool counter = row_[p] >= counters_;
    uint64_t* ended = &bits[static_cast<size_t>(p - start) * 2 * kWords];
    uint64_t* begun = counter ? ended : ended + kWords;
    const int if_begun = counter ? kEnded : kBegun;
    for (int64_t e = begin_[p]; e < begin_[p + 1]; e++) {
      const int32_t q = before_[e] - start;
      if (q < 0 || !any[q]) continue;
      const uint64_t* from = &bits[static_cast<size_t>(q) * 2 * kWords];
      if (any[q] & kEnded) {
        for (int w = 0; w < kWords; w++) ended[w] |= from[w];
        any[p - start] |= kEnded;
      }
      if (any[q] & kBegun) {
        for (int w = 0; w < kWords; w++) begun[w] |= from[kWords + w];
        any[p - start] |= if_begun;
      }
    }
    if (own < sources.size() && sources[own] == p) {
      begun[own / 64] |= uint64_t{1} << own % 64;
      any[p - start] |= if_begun;
      own++;
    }
  }
  for (int64_t i = 0; i < count; i++) {
    const int64_t later = int64_t{position_[pairs[i].later]} - start;
    missed[i] = later < 0 || !(bits[later * 2 * kWords + bit[i] / 64] >> bit[i] % 64 & 1);
  }
}

}  // namespace mk::verify
