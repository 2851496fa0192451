// A program as the interpreter holds it: streams, counters and their totals. Format: megakernel/program.py.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "../common/isa.h"

namespace mk {

constexpr int kPrologue = 0, kBody = 1, kEpilogue = 2, kSegments = 3;

// One cache line each, so that waiting on one does not slow arrivals at another.
struct alignas(64) Counter {
  std::atomic<int32_t> value{0};
};

// Borrowed arrays that a program is made from.
struct ProgramSource {
  const Dims* dims;
  int32_t ranks, workers, counters;
  const int32_t* records[kSegments];
  const int32_t* offsets[kSegments];  // ranks * workers + 1
  const int32_t* totals[3];           // first, middle and last block
};

class Program {
 public:
  // Copies. Throws std::runtime_error where a record cannot be executed.
  explicit Program(const ProgramSource& source);

  const Dims dims;
  const int32_t workers;

  const int32_t* record(int segment, int32_t index) const {
    return records_[segment].data() + int64_t{index} * kWords;
  }
  int32_t begin(int segment, int worker) const { return offsets_[segment][worker]; }
  int32_t end(int segment, int worker) const { return offsets_[segment][worker + 1]; }

  // Counter block of a record: the prologue shares the first, the epilogue has the one after the last
  // layer's.
  int32_t block(int segment, int32_t layer) const {
    return segment == kPrologue ? 0 : segment == kBody ? layer : dims.layers;
  }
  std::atomic<int32_t>& counter(int32_t block, int32_t index) {
    return values_[int64_t{block} * counters_ + index].value;
  }
  // Arrivals per launch.
  int32_t total(int32_t block, int32_t index) const {
    return totals_[block == 0 ? 0 : block == dims.layers ? 2 : 1][index];
  }

  uint32_t launches = 0;  // begun since the counters were zero
  void reset_counters();

 private:
  void check(int segment) const;

  const int32_t counters_;
  std::vector<int32_t> records_[kSegments], offsets_[kSegments], totals_[3];
  std::unique_ptr<Counter[]> values_;
};

}  // namespace mk
