// Decides for pairs of events whether the second can only begin after the first has ended. An event is one
// execution of an instruction. It waits for counters before it begins, and signals counters at its end. The
// events of a stream begin in order and end in order, but they may overlap. The graph must have no cycles.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <future>
#include <numeric>
#include <span>
#include <thread>
#include <vector>

#include "verify.h"

namespace mk::verify {

// Assigns items 0 to n - 1 to groups: group(i) is the group of item i. Element [g] is the list of value(i)
// for all items i in group g, in ascending order of i.
template <class T>
class Groups {
 public:
  Groups() = default;
  template <class Group, class Value>
  Groups(int64_t groups, int64_t n, Group group, Value value) : begin_(groups + 1), values_(n) {
    for (int64_t i = 0; i < n; i++) begin_[group(i) + 1]++;
    std::partial_sum(begin_.begin(), begin_.end(), begin_.begin());
    std::vector<int64_t> next(begin_.begin(), begin_.end() - 1);
    for (int64_t i = 0; i < n; i++) values_[next[group(i)]++] = value(i);
  }

  std::span<const T> operator[](int64_t group) const {
    return {values_.data() + begin_[group], values_.data() + begin_[group + 1]};
  }

 private:
  std::vector<int64_t> begin_;
  std::vector<T> values_;
};

// Two events, as rows of the graph. A correct program begins `later` only after `earlier` has ended.
struct Pair {
  int32_t earlier, later;
};

// Writes a topological order of the graph's nodes (rows) into `order`, and returns how many nodes it has.
// Nodes on or after a cycle are left out. On entry, missing[row] must be the number of incoming edges of node
// `row`. The function counts it down, and appends the node when it reaches 0.
inline int32_t topological_order(const Graph& graph, int32_t* missing, int32_t* order) {
  const Groups<int32_t> after(
      graph.rows, graph.edges, [&](int64_t e) { return graph.source[e]; },
      [&](int64_t e) { return graph.target[e]; });
  int32_t done = 0;
  for (int32_t row = 0; row < graph.rows; row++)
    if (missing[row] == 0) order[done++] = row;
  for (int32_t i = 0; i < done; i++)
    for (int32_t row : after[order[i]])
      if (--missing[row] == 0) order[done++] = row;
  return done;
}

class Reach {
 public:
  Reach(const Graph& graph, const int32_t* order)
      : rows_(graph.rows),
        counters_(graph.first[graph.runs]),
        position_(graph.rows),
        row_(order, order + graph.rows),
        stands_in_(graph.rows) {
    for (int32_t i = 0; i < rows_; i++) position_[order[i]] = i;
    before_ = {rows_, graph.edges, [&](int64_t e) { return position_[graph.target[e]]; },
               [&](int64_t e) { return position_[graph.source[e]]; }};
    std::vector<uint8_t> used(rows_);
    for (int64_t e = 0; e < graph.edges; e++) used[graph.source[e]] = 1;
    std::iota(stands_in_.begin(), stands_in_.end(), 0);
    for (int64_t e = 0; e < graph.edges; e++) {
      const int32_t source = graph.source[e], target = graph.target[e];
      if (target >= counters_ && used[target] && stands_in_[source] == source) stands_in_[source] = target;
    }
  }

  // Returns the indices, in ascending order, of the pairs whose order the graph does not guarantee. It
  // is guaranteed by a path from the earlier node to the later one that passes through a counter. Other
  // paths do not suffice, because successive events of a stream may overlap. Two searches find the
  // pairs. Hundreds of nodes signal the same counter, so the first search starts at that counter, once
  // for all of them. The second search starts at the earlier node itself, but only for pairs without a
  // path in the first one.
  std::vector<int64_t> unordered(const std::vector<Pair>& pairs) const {
    std::vector<int64_t> which(pairs.size());
    std::iota(which.begin(), which.end(), 0);
    which = sweep_all(pairs, which, [&](int64_t i) { return position_[stands_in_[pairs[i].earlier]]; });
    return sweep_all(pairs, which, [&](int64_t i) { return position_[pairs[i].earlier]; });
  }

 private:
  static constexpr int kWords = 8;  // one pass over the graph tracks 64 * kWords sources, one bit each
  static constexpr int kBits = 64 * kWords;

  // A question: must the event at position `later` of the topological order come after source number `bit`?
  // (A pass over the graph starts at several nodes, its sources.) Pair number `index` needs the answer.
  struct Question {
    int64_t index;
    int32_t later, bit;
  };

  // Takes indices i of `pairs`, in ascending order, and returns those whose order no path in the graph
  // proves. A path must lead to the later event from the node at position source(i) of the topological
  // order. That node is the earlier event, or a counter that it signals.
  template <class Source>
  std::vector<int64_t> sweep_all(const std::vector<Pair>& pairs, const std::vector<int64_t>& which,
                                 Source source) const {
    // Numbers the sources in topological order, and groups the pairs by chunks of kBits sources.
    std::vector<int32_t> number(rows_, -1);
    for (int64_t i : which) number[source(i)] = 0;
    std::vector<int32_t> sources;
    for (int32_t p = 0; p < rows_; p++) {
      if (number[p] < 0) continue;
      number[p] = static_cast<int32_t>(sources.size());
      sources.push_back(p);
    }
    const size_t chunks = (sources.size() + kBits - 1) / kBits;
    const Groups<Question> questions(
        chunks, which.size(), [&](int64_t k) { return number[source(which[k])] / kBits; },
        [&](int64_t k) {
          const int64_t i = which[k];
          return Question{i, position_[pairs[i].later], number[source(i)] % kBits};
        });

    const size_t threads = std::min<size_t>(chunks, std::max(1u, std::thread::hardware_concurrency()));
    const auto work = [&](size_t first) {
      std::vector<int64_t> missed;
      for (size_t c = first; c < chunks; c += threads) {
        const size_t begin = c * kBits, end = std::min(begin + kBits, sources.size());
        sweep({&sources[begin], end - begin}, questions[c], missed);
      }
      return missed;
    };
    std::vector<std::future<std::vector<int64_t>>> parts;
    for (size_t t = 0; t < threads; t++)
      parts.push_back(std::async(t ? std::launch::async : std::launch::deferred, work, t));
    std::vector<int64_t> out;
    for (auto& part : parts)
      for (int64_t i : part.get()) out.push_back(i);
    std::sort(out.begin(), out.end());
    return out;
  }

  // Answers all questions in one pass over the graph's rows (nodes). A question asks whether a source
  // event ends before a later row begins. Adds the indices of the questions with the answer "no" to
  // `missed`. For each row and each source, the pass computes two bits. `ended`: the source has
  // certainly ended when the row begins. `begun`: the row is the source itself, or follows it in the
  // same stream. Events of a stream end in order. So when a row signals a counter, the sources whose
  // `begun` bit is set have ended too, and become `ended` at the counter.
  void sweep(std::span<const int32_t> sources, std::span<const Question> questions,
             std::vector<int64_t>& missed) const {
    const int32_t start = sources.front();
    int32_t end = start;
    for (const Question& question : questions) end = std::max(end, question.later + 1);
    constexpr int kEnded = 1, kBegun = 2;
    std::vector<uint64_t> bits(static_cast<size_t>(end - start) * 2 * kWords);  // ended, begun
    std::vector<uint8_t> any(end - start);
    size_t own = 0;
    for (int32_t p = start; p < end; p++) {
      const bool counter = row_[p] >= counters_;
      uint64_t* ended = &bits[static_cast<size_t>(p - start) * 2 * kWords];
      uint64_t* begun = counter ? ended : ended + kWords;
      const int if_begun = counter ? kEnded : kBegun;
      for (int32_t before : before_[p]) {
        const int32_t q = before - start;
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
    for (const auto& [index, later, bit] : questions) {
      const int64_t at = int64_t{later} - start;
      if (at < 0 || !(bits[at * 2 * kWords + bit / 64] >> bit % 64 & 1)) missed.push_back(index);
    }
  }

  int32_t rows_, counters_;        // number of rows (nodes); the first row that is a counter, not an event
  std::vector<int32_t> position_;  // the position of each row in the topological order
  Groups<int32_t> before_;         // for each position, the positions of its row's predecessors
  std::vector<int32_t> row_;       // the row at each position of the order

  // For each row (node), a counter that it signals and another row awaits; without one, the row itself.
  std::vector<int32_t> stands_in_;
};

}  // namespace mk::verify
