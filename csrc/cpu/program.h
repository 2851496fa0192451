// A program in the form that the interpreter executes: instruction records in streams (one per worker) and in
// shared queues, the counters that order the instructions, and the total that each counter must reach.
// megakernel/program/program.py describes the format.
#pragma once
#include <atomic>
#include <string>
#include <vector>

#include "../common/record.h"

namespace mk {

constexpr int kPrologue = 0, kBody = 1, kEpilogue = 2, kSegments = 3;
// The first three record lists contain the records of the three segments. The last list contains the records
// of all queues.
constexpr int kQueues = 3;
constexpr int kRecordLists = 4;

// Each counter has its own cache line, so that waiting on one counter does not slow arrivals at another.
struct alignas(64) Counter {
  std::atomic<int32_t> value{0};
};
static_assert(sizeof(Counter) == 64 && std::atomic<int32_t>::is_always_lock_free);

// The arrays from which a program is made. They belong to the caller.
struct ProgramSource {
  const Dims* dims;
  const Phase* phases;                       // [ranks][kMaxPhases + 1]
  const char* const* names;                  // names of the phases, [kMaxPhases + 1]
  int32_t ranks, workers, counters, queues;  // workers and queues: per rank; counters: per layer and rank
  const int32_t* records[kRecordLists];

  // Where each stream or queue begins in its list, followed by the end of the last one:
  // [ranks * workers + 1] for a segment, [ranks * queues + 1] for the queues.
  const int32_t* offsets[kRecordLists];
  // How many signals each counter receives per launch, as arrays [ranks][counters]. Every layer has its own
  // set ("block") of counters, and the epilogue after the layers has one more. totals[0] is for the first
  // block, totals[1] for every block in the middle, and totals[2] for the last block.
  const int32_t* totals[3];
};

class Program {
 public:
  // Copies all arrays. megakernel/program/checks.py must have checked them.
  explicit Program(const ProgramSource& source)
      : ranks(source.ranks),
        workers(source.workers),
        layers(source.dims->layers),
        counters_(source.counters),
        queues_(source.queues),
        phases_(source.phases, source.phases + int64_t{source.ranks} * (kMaxPhases + 1)),
        names_(source.names, source.names + kMaxPhases + 1) {
    dims_.assign(ranks, *source.dims);
    for (int r = 0; r < ranks; ++r) dims_[r].rank = r;
    for (int list = 0; list < kRecordLists; ++list) {
      const int32_t* offsets = source.offsets[list];
      const int64_t streams = int64_t{ranks} * (list == kQueues ? queues_ : workers);
      offsets_[list].assign(offsets, offsets + streams + 1);
      records_[list].assign(source.records[list], source.records[list] + int64_t{offsets[streams]} * kWords);
    }
    for (int i = 0; i < 3; ++i)
      totals_[i].assign(source.totals[i], source.totals[i] + int64_t{ranks} * counters_);
    values_ = std::vector<Counter>(int64_t{ranks} * (layers + 1) * counters_);
    claims_ = std::vector<Counter>(int64_t{layers} * ranks * queues_);
  }

  const int32_t ranks, workers, layers;

  // Returns the model's sizes, with `rank` as the rank to which they apply.
  const Dims& dims(int rank) const { return dims_[rank]; }

  // Returns the phase of a record, with the sizes that it has on `rank`.
  const Phase& phase(int rank, const int32_t* record) const {
    return phases_[int64_t{rank} * (kMaxPhases + 1) + record_phase(record)];
  }
  const char* name(const int32_t* record) const { return names_[record_phase(record)].c_str(); }

  const int32_t* record(int list, int32_t index) const {
    return records_[list].data() + int64_t{index} * kWords;
  }
  // Records [begin, end) of a list are those of one stream or queue. `stream` and `queue` number the streams
  // and queues of all ranks.
  int32_t begin(int list, int stream) const { return offsets_[list][stream]; }
  int32_t end(int list, int stream) const { return offsets_[list][stream + 1]; }
  int stream(int rank, int worker) const { return rank * workers + worker; }
  int queue(int rank, int index) const { return rank * queues_ + index; }

  // Returns which set ("block") of counters the instructions of a segment use. Every layer has its own block,
  // and there is one more after the last layer. The prologue uses the block of layer 0, the body that of
  // `layer`, and the epilogue the last one.
  int32_t block(int segment, int32_t layer) const {
    return segment == kPrologue ? 0 : segment == kBody ? layer : layers;
  }
  std::atomic<int32_t>& counter(int rank, int32_t block, int32_t index) {
    return values_[(int64_t{rank} * (layers + 1) + block) * counters_ + index].value;
  }
  int32_t total(int rank, int32_t block, int32_t index) const {
    return totals_[block == 0 ? 0 : block == layers ? 2 : 1][int64_t{rank} * counters_ + index];
  }
  // Returns the number of records that workers have claimed from a queue in `layer`. The number is not
  // reset between launches, so it grows from launch to launch, as counters do.
  std::atomic<int32_t>& claims(int queue, int32_t layer) {
    return claims_[int64_t{layer} * ranks * queues_ + queue].value;
  }

  uint32_t launches = 0;  // number of launches begun since the counters were last reset

  // Resets the counters and claims to the state before the first launch. No launch may be running.
  void reset() {
    launches = 0;
    for (Counter& c : values_) c.value.store(0, std::memory_order_relaxed);
    for (Counter& c : claims_) c.value.store(0, std::memory_order_relaxed);
  }

 private:
  const int32_t counters_, queues_;
  std::vector<Dims> dims_;
  std::vector<Phase> phases_;
  std::vector<std::string> names_;
  std::vector<int32_t> records_[kRecordLists], offsets_[kRecordLists], totals_[3];
  std::vector<Counter> values_;  // [rank][block][counter]
  std::vector<Counter> claims_;  // [layer][rank][queue]
};

}  // namespace mk
