// Measures how long a layer takes, to predict the time of layers that are not simulated.
#pragma once
#include <stdint.h>

#include "simulate.h"

namespace mk::simulate {

// All layers are alike, but the first one also does work of the prologue, and the last one ends without a
// next layer to overlap with. So each further layer is predicted to take as long as the second one.
class Pace {
 public:
  Pace(const Program& p, int32_t further_layers) : further_layers_(further_layers) {
    const auto tasks = [&](int list, int32_t lists) {
      int64_t count = 0;
      for (int32_t r = p.offsets[list][0]; r < p.offsets[list][lists]; ++r)
        count += p.records[r].end_task - p.records[r].first_task;
      return count;
    };
    left_[0] = left_[1] = tasks(kBody, p.ranks * p.workers) + tasks(kQueues, p.ranks * p.queues);
  }

  // Counts a task of `layer` whose output has been stored at `now`.
  void stored(int32_t layer, double now) {
    if (layer < 2 && --left_[layer] == 0) ended_[layer] = now;
  }
  // Returns how many seconds the layers take that are not simulated. Until the second layer has ended, the
  // result is only a lower bound.
  double further_s(double now) const {
    return left_[0] > 0 ? 0.0 : further_layers_ * ((left_[1] > 0 ? now : ended_[1]) - ended_[0]);
  }

 private:
  const int32_t further_layers_;
  int64_t left_[2];       // tasks of the first and of the second layer that have not been stored yet
  double ended_[2] = {};  // when the last task of these layers was stored
};

}  // namespace mk::simulate
