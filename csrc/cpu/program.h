// A program in the interpreter: streams, queues, counters and their totals. megakernel/program/program.py
// describes the format.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "../common/record.h"

namespace mk {

constexpr int kPrologue = 0, kBody = 1, kEpilogue = 2, kSegments = 3;
constexpr int kQueues = 3;  // the index of the queues among the record lists, after the segments
constexpr int kRecordLists = 4;

// Each counter has its own cache line, so that waiting on one does not slow arrivals at another. It may lie
// in memory that processes share.
struct alignas(64) Counter {
  std::atomic<int32_t> value{0};
};
static_assert(sizeof(Counter) == 64 && std::atomic<int32_t>::is_always_lock_free);

// The borrowed arrays from which a program is made.
struct ProgramSource {
  const Dims* dims;
  const Phase* phases;                       // [ranks][kMaxPhases + 1]
  const char* const* names;                  // names of the phases, [kMaxPhases + 1]
  int32_t ranks, workers, counters, queues;  // queues: of one rank
  const int32_t* records[kRecordLists];
  int64_t lengths[kRecordLists];         // the number of records of each list
  const int32_t* offsets[kRecordLists];  // ranks * workers + 1; ranks * queues + 1
  const int32_t* totals[3];              // first, middle and last block, each [ranks][counters]
  Counter* const* values;  // each rank's (layers + 1) * counters counters, zero; null: the program's own
};

class Program {
 public:
  // Copies everything but the counters. Throws std::runtime_error if a record cannot be executed.
  explicit Program(const ProgramSource& source);

  const int32_t ranks, workers, layers;

  // The sizes as a rank sees them.
  const Dims& dims(int rank) const { return dims_[rank]; }

  // The phase of a record as a rank sees it, and its name.
  const Phase& phase(int rank, const int32_t* record) const {
    return phases_[int64_t{rank} * (kMaxPhases + 1) + record_phase(record)];
  }
  const char* name(const int32_t* record) const { return names_[record_phase(record)].c_str(); }

  const int32_t* record(int list, int32_t index) const {
    return records_[list].data() + int64_t{index} * kWords;
  }
  // The range of records of a (rank, worker)'s stream, or of a rank's queue.
  int32_t begin(int list, int stream) const { return offsets_[list][stream]; }
  int32_t end(int list, int stream) const { return offsets_[list][stream + 1]; }
  int stream(int rank, int worker) const { return rank * workers + worker; }
  int queue(int rank, int index) const { return rank * queues_ + index; }
  int queues() const { return queues_; }

  // The counter block of a record: the prologue shares the first layer's block, and the epilogue has the
  // block after the last layer's.
  int32_t block(int segment, int32_t layer) const {
    return segment == kPrologue ? 0 : segment == kBody ? layer : layers;
  }
  std::atomic<int32_t>& counter(int rank, int32_t block, int32_t index) {
    return values_[rank][int64_t{block} * counters_ + index].value;
  }
  // Arrivals per launch.
  int32_t total(int rank, int32_t block, int32_t index) const {
    return totals_[block == 0 ? 0 : block == layers ? 2 : 1][int64_t{rank} * counters_ + index];
  }
  // The number of records claimed from a queue in one layer's run of the body; like counters, never reset
  // between launches.
  std::atomic<int32_t>& claims(int queue, int32_t layer) {
    return claims_[int64_t{layer} * ranks * queues_ + queue].value;
  }

  uint32_t launches = 0;  // launches begun since the counters were zero
  // Resets the counters and claims of ranks [first, end) to the state before the first launch.
  void reset(int first, int end);

 private:
  void check(int list) const;
  std::string wrong(int list, int rank, const int32_t* record) const;
  std::string wrong_operands(int rank, const int32_t* record) const;

  const int32_t counters_, queues_;
  std::vector<Dims> dims_;
  std::vector<Phase> phases_;
  std::vector<std::string> names_;
  std::vector<int32_t> records_[kRecordLists], offsets_[kRecordLists], totals_[3];
  std::unique_ptr<Counter[]> own_values_, claims_;
  std::vector<Counter*> values_;
};

}  // namespace mk
