// Derives which events (executions of instructions) must not overlap: any two that access the same element of
// a buffer, if at least one of them writes it. The order of the model's phases determines which one must come
// first.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <span>
#include <vector>

#include "reach.h"
#include "verify.h"

namespace mk::verify {

// Replays all accesses to each buffer of each rank, in the order of a sequential execution. Two results:
// `found` has the faults that are certain whatever the order of events. `pairs` has the pairs of events whose
// order the program must guarantee; if it does not guarantee pairs[i], about[i] is the fault to report.
class Walk {
 public:
  Walk(const Graph& graph, const Step& step) : graph_(graph), step_(step), seen_(graph.rows, -1) {
    const int32_t places = step.buffers * step.ranks;
    const Groups<int64_t> touches(
        places, step.touches, [&](int64_t t) { return step.place[t]; }, [](int64_t t) { return t; });
    for (int32_t place = 0; place < places; place++)
      if (!touches[place].empty()) walk_place(place, touches[place]);
  }

  std::vector<Pair> pairs;
  std::vector<Found> about;
  std::vector<Found> found;

 private:
  static void sort_unique(std::vector<int32_t>& values) {
    std::sort(values.begin(), values.end());
    values.erase(std::unique(values.begin(), values.end()), values.end());
  }

  struct Cell {
    int32_t writer = -1;    // the last event that wrote the cell (a row of the graph); -1: none
    int32_t instance = -1;  // when the writer wrote: its run * phases + its phase
    int32_t readers = -1;   // last event that read the cell since then (index in readers_); -1: none
  };
  struct Reader {
    int32_t row, next;
  };

  void walk_place(int32_t place, std::span<const int64_t> touches) {
    rows_.clear();
    cols_.clear();
    for (int64_t t : touches) {
      for (int32_t edge : {step_.row[t], step_.row_end[t]})
        if (rows_.empty() || rows_.back() != edge) rows_.push_back(edge);
      for (int32_t edge : {step_.col[t], step_.col_end[t]})
        if (cols_.empty() || cols_.back() != edge) cols_.push_back(edge);
    }
    sort_unique(rows_);
    sort_unique(cols_);
    cells_.assign((rows_.size() - 1) * (cols_.size() - 1), Cell{});
    readers_.clear();

    const int32_t buffer = place / step_.ranks;
    int32_t expected = -1;
    for (int32_t run = 0; run < graph_.runs; run++) {
      const int32_t segment = in_body(run) ? 1 : run == 0 ? 0 : 2;
      if (segment == 1 && step_.layered[buffer]) {
        std::fill(cells_.begin(), cells_.end(), Cell{});
        expected = -1;
      }
      auto left = touches;
      for (int32_t phase = 0; phase < step_.phases; phase++) {
        const auto end = std::ranges::find_if(left, [&](int64_t t) { return step_.phase[t] != phase; });
        const auto own = left.first(end - left.begin());
        left = left.subspan(own.size());
        if (step_.segment[phase] != segment) continue;
        for (int64_t t : own)
          if (step_.kind[t] != Kind::write) read(run, t, expected);
        for (int64_t t : own)
          if (step_.kind[t] == Kind::write) write(run, t);
        if (step_.declares[phase * step_.buffers + buffer]) expected = run * step_.phases + phase;
      }
    }
  }

  template <class F>
  void each_cell(int64_t t, F f) {
    if (step_.row[t] >= step_.row_end[t] || step_.col[t] >= step_.col_end[t]) return;
    auto at = [](const std::vector<int32_t>& edges, int32_t edge) {
      return std::lower_bound(edges.begin(), edges.end(), edge) - edges.begin();
    };
    const int64_t r0 = at(rows_, step_.row[t]), r1 = at(rows_, step_.row_end[t]);
    const int64_t c0 = at(cols_, step_.col[t]), c1 = at(cols_, step_.col_end[t]);
    const int64_t width = static_cast<int64_t>(cols_.size()) - 1;
    accesses_++;
    for (int64_t r = r0; r < r1; r++)
      for (int64_t c = c0; c < c1; c++)
        if (!f(r * width + c)) return;
  }

  void read(int32_t run, int64_t t, int32_t expected) {
    const bool host = step_.kind[t] == Kind::host;
    const int32_t row = graph_.first[run] + step_.event[t];
    each_cell(t, [&](int64_t at) {
      Cell& cell = cells_[at];
      if (cell.writer < 0 || cell.instance != expected) {
        const int32_t phase = expected < 0 ? -1 : expected % step_.phases;
        found.push_back(about_cell(What::missing, cell.writer, host ? -1 : row, phase, t, at));
        return false;
      }
      if (host) return true;
      require(cell.writer, row, run, t, at, 1);
      readers_.push_back({row, cell.readers});
      cell.readers = static_cast<int32_t>(readers_.size()) - 1;
      return true;
    });
  }

  void write(int32_t run, int64_t t) {
    const int32_t row = graph_.first[run] + step_.event[t];
    const int32_t instance = run * step_.phases + step_.phase[t];
    each_cell(t, [&](int64_t at) {
      Cell& cell = cells_[at];
      if (cell.instance == instance) {
        found.push_back(about_cell(What::twice, cell.writer, row, step_.phase[t], t, at));
        return false;
      }
      if (cell.writer >= 0) require(cell.writer, row, run, t, at, 0);
      for (int32_t r = cell.readers; r >= 0; r = readers_[r].next)
        if (readers_[r].row != row) require(readers_[r].row, row, run, t, at, 2);
      cell = {row, instance, -1};
      return true;
    });
  }

  // Notes that event `later` must begin after event `earlier` has ended. To save time, an order that is
  // required in every layer is tested in only one layer: the one where it is hardest to satisfy, because the
  // graph has the fewest edges there. If both events are in the same layer, that is layer 1, because layer 0
  // has all edges of later layers and more. If they are in different layers, `later` is in the last one.
  void require(int32_t earlier, int32_t later, int32_t run, int64_t t, int64_t cell, int32_t reads) {
    const int32_t last = graph_.runs - 2, from = run_of(earlier);
    What what = What::unordered;
    if (in_body(run)) {
      if (from == 0 && run > 1) {  // the prologue wrote the cell, and every layer reads it
        what = What::not_onward;
        earlier = later - (graph_.first[run] - graph_.first[run - 1]);
      }
      const bool across = what == What::not_onward || (from > 0 && from < run);
      if (across && run != last) return;
      if (from == run && run != std::min(2, last)) return;
    }
    if (seen_[earlier] == accesses_) return;
    seen_[earlier] = accesses_;
    pairs.push_back({earlier, later});
    about.push_back(about_cell(what, earlier, later, step_.phase[t], t, cell, reads));
  }

  Found about_cell(What what, int32_t earlier, int32_t later, int32_t phase, int64_t t, int64_t cell,
                   int32_t reads = 0) const {
    const int64_t width = static_cast<int64_t>(cols_.size()) - 1;
    const int64_t r = cell / width, c = cell % width;
    return {what,     earlier,      later,    phase,        step_.place[t],
            rows_[r], rows_[r + 1], cols_[c], cols_[c + 1], reads};
  }

  int32_t run_of(int32_t row) const {
    int32_t run = 0;
    while (row >= graph_.first[run + 1]) run++;
    return run;
  }
  bool in_body(int32_t run) const { return run > 0 && run < graph_.runs - 1; }

  const Graph& graph_;
  const Step& step_;
  std::vector<int32_t> rows_, cols_;  // borders between cells, the parts into which accesses divide a buffer
  std::vector<Cell> cells_;
  std::vector<Reader> readers_;
  std::vector<int64_t> seen_;  // [row]: number of the last access paired with the row, to avoid duplicates
  int64_t accesses_ = 0;
};

}  // namespace mk::verify
