// The sequential meaning of a step, box by box: who must come before whom?
#pragma once
#include <stdint.h>

#include <vector>

#include "reach.h"
#include "verify.h"

namespace mk::verify {

// Walks every place through the phases of all runs. `found` gets what is wrong whatever the order; `pairs`
// what must be ordered, and `about` the access behind each pair (with What::unordered or What::not_onward).
class Walk {
 public:
  Walk(const Graph& graph, const Step& step);

  std::vector<Pair> pairs;
  std::vector<Found> about;
  std::vector<Found> found;

 private:
  struct Cell {
    int32_t writer = -1;    // row of the last event that wrote it
    int32_t instance = -1;  // run * phases + phase of that event
    int32_t readers = -1;   // since then: into readers_
  };
  struct Reader {
    int32_t row, next;
  };

  void walk_place(int32_t place, const int64_t* touches, int64_t count);
  void read(int32_t run, int64_t touch, int32_t expected);
  void write(int32_t run, int64_t touch);
  template <class F>
  void each_cell(int64_t touch, F f);
  void require(int32_t earlier, int32_t later, int32_t run, int64_t touch, int64_t cell, int32_t reads);
  void report(What what, int32_t earlier, int32_t later, int32_t phase, int64_t touch, int64_t cell);
  Found about_cell(What what, int32_t earlier, int32_t later, int32_t phase, int64_t touch,
                   int64_t cell) const;
  int32_t run_of(int32_t row) const;
  bool in_body(int32_t run) const { return run > 0 && run < graph_.runs - 1; }

  const Graph& graph_;
  const Step& step_;
  std::vector<int32_t> rows_, cols_;  // edges of the cells of the place at hand
  std::vector<Cell> cells_;
  std::vector<Reader> readers_;
  std::vector<int64_t> seen_;  // [row]: the last access that required the row
  int64_t accesses_ = 0;
};

}  // namespace mk::verify
