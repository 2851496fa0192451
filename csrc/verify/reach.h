// Which pairs of events of an acyclic graph are ordered? An event begins and ends. A counter gets its arrival
// when the event that signals it ends; an event begins after the counters that it waits for. Events that
// follow one another in a stream begin in that order and end in that order, but the second may begin before
// the first ends.
#pragma once
#include <stdint.h>

#include <vector>

#include "verify.h"

namespace mk::verify {

// `later` must begin after `earlier` has ended.
struct Pair {
  int32_t earlier, later;
};

// A topological order of all rows into `order`; returns how many rows it holds, fewer where there is a cycle.
// A row may be taken once `missing` (which is used up) of its incoming edges have been.
int32_t topological_order(const Graph& graph, int32_t* missing, int32_t* order);

class Reach {
 public:
  Reach(const Graph& graph, const int32_t* order);

  // Indices of the pairs that nothing orders, ascending.
  std::vector<int64_t> unordered(const std::vector<Pair>& pairs) const;

 private:
  static constexpr int kWords = 8;  // 64-bit words of sources that one sweep follows
  static constexpr int kBits = 64 * kWords;

  std::vector<int64_t> sweep_all(const std::vector<Pair>& pairs, const std::vector<int64_t>& which,
                                 const std::vector<int32_t>& source) const;
  void sweep(const std::vector<int32_t>& sources, const Pair* pairs, const int32_t* bit, int64_t count,
             uint8_t* missed) const;

  int32_t rows_, counters_;         // the first counter's row
  std::vector<int32_t> position_;   // of a row in the order
  std::vector<int64_t> begin_;      // [position]: into before_
  std::vector<int32_t> before_;     // positions of the predecessors
  std::vector<int32_t> row_;        // of a position
  std::vector<int32_t> stands_in_;  // a counter that a row signals and somebody waits for, else the row
};

}  // namespace mk::verify
