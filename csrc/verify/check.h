// Checks that all indices in a graph and in a step are within bounds, before any code uses them.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <vector>

#include "verify.h"

namespace mk::verify {

inline bool inside(int64_t value, int64_t end) { return value >= 0 && value < end; }

inline bool is_sound(const Graph& graph) {
  if (graph.rows < 0 || graph.runs < 2 || graph.edges < 0 || graph.first[0] != 0) return false;
  for (int32_t run = 0; run < graph.runs; run++)
    if (graph.first[run] > graph.first[run + 1]) return false;
  if (graph.first[graph.runs] > graph.rows) return false;
  for (int64_t e = 0; e < graph.edges; e++)
    if (!inside(graph.source[e], graph.rows) || !inside(graph.target[e], graph.rows)) return false;
  return true;
}

// Returns whether `order` contains each row (node) of the graph exactly once.
inline bool is_order(const Graph& graph, const int32_t* order) {
  std::vector<uint8_t> seen(graph.rows);
  return std::all_of(order, order + graph.rows,
                     [&](int32_t row) { return inside(row, graph.rows) && !seen[row]++; });
}

inline bool are_rows(const Graph& graph, int64_t n, const int32_t* rows) {
  return std::all_of(rows, rows + n, [&](int32_t row) { return inside(row, graph.rows); });
}

inline bool is_sound(const Graph& graph, const Step& step) {
  // Returns the number of events (executions of instructions) in a segment: 0 prologue, 1 body, 2 epilogue.
  // The body runs once per layer, always with the same number of events, so this counts one layer.
  const auto events = [&](int32_t segment) {
    const int32_t run = segment == 2 ? graph.runs - 1 : segment;
    return graph.first[run + 1] - graph.first[run];
  };
  for (int32_t phase = 0; phase < step.phases; phase++)
    if (step.segment[phase] > 2) return false;
  for (int64_t t = 0; t < step.touches; t++) {
    if (!inside(step.phase[t], step.phases) || !inside(step.place[t], int64_t{step.buffers} * step.ranks))
      return false;
    const int32_t segment = step.segment[step.phase[t]];
    if (segment < 0 || !inside(step.event[t], step.kind[t] == Kind::host ? graph.rows : events(segment)))
      return false;
  }
  return true;
}

}  // namespace mk::verify
