#include "program.h"

namespace mk {

Program::Program(const ProgramSource& source)
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

void Program::reset() {
  launches = 0;
  for (Counter& c : values_) c.value.store(0, std::memory_order_relaxed);
  for (Counter& c : claims_) c.value.store(0, std::memory_order_relaxed);
}

}  // namespace mk
