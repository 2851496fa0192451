// How long work of different kinds is computed at the same time: megakernel/timeline/overlap.py's numbers.
#pragma once
#include <vector>

#include "../common/isa.h"
#include "simulate.h"

namespace mk::simulate {

class Overlaps {
 public:
  Overlaps(const Program& program, double begin, Result& result)
      : result_(result),
        compute_bound_of_(program.compute_bound),
        counted_(begin),
        rank_computing_(program.ranks),
        kind_computing_(static_cast<size_t>(program.layers + 2) * (kMaxPhases + 1)) {}

  // A worker begins (by = 1) or ends (-1) computing a phase in a layer, of which prologue and epilogue have
  // one of their own.
  void change(double now, int32_t rank, int64_t layer, int32_t phase, int by) {
    count(now);
    computing_ += by;
    if (compute_bound_of_[phase] == 1) compute_bound_ += by;
    if (compute_bound_of_[phase] == 0) memory_bound_ += by;
    const auto used = [by](int32_t& count) {
      const int before = count > 0;
      count += by;
      return (count > 0) - before;
    };
    busy_ranks_ += used(rank_computing_[rank]);
    kinds_ += used(kind_computing_[layer * (kMaxPhases + 1) + phase]);
  }

 private:
  void count(double now) {
    const double time = now - counted_;
    counted_ = now;
    if (computing_ == 0 || time <= 0) return;
    if (memory_bound_ > 0) {
      result_.across_workers[1] += time;
      if (compute_bound_ > 0) result_.across_workers[0] += time;
    }
    result_.phases[1] += time;
    result_.across_ranks[1] += time;
    if (kinds_ > 1) result_.phases[0] += time;
    if (kinds_ > 1 && busy_ranks_ > 1) result_.across_ranks[0] += time;
  }

  Result& result_;
  const uint8_t* const compute_bound_of_;  // by phase
  double counted_;
  int computing_ = 0, memory_bound_ = 0, compute_bound_ = 0, kinds_ = 0, busy_ranks_ = 0;
  std::vector<int32_t> rank_computing_, kind_computing_;
};

}  // namespace mk::simulate
