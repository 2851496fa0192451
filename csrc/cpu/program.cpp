#include "program.h"

#include <stdexcept>

namespace mk {

Program::Program(const ProgramSource& source)
    : ranks(source.ranks),
      workers(source.workers),
      layers(source.dims->layers),
      counters_(source.counters),
      queues_(source.queues),
      phases_(source.phases, source.phases + int64_t{source.ranks} * (kMaxPhases + 1)),
      names_(source.names, source.names + kMaxPhases + 1) {
  if (ranks != source.dims->tp)
    throw std::runtime_error("it has " + std::to_string(ranks) +
                             " ranks of streams for tp = " + std::to_string(source.dims->tp));
  dims_.assign(ranks, *source.dims);
  for (int r = 0; r < ranks; ++r) dims_[r].rank = r;
  for (int list = 0; list < kRecordLists; ++list) {
    const int32_t* offsets = source.offsets[list];
    const int64_t streams = int64_t{ranks} * (list == kQueues ? queues_ : workers);
    offsets_[list].assign(offsets, offsets + streams + 1);
    records_[list].assign(source.records[list], source.records[list] + int64_t{offsets[streams]} * kWords);
  }
  for (int list = 0; list < kRecordLists; ++list) check(list);
  for (int i = 0; i < 3; ++i)
    totals_[i].assign(source.totals[i], source.totals[i] + int64_t{ranks} * counters_);
  const int64_t rank_values = int64_t{layers + 1} * counters_;
  if (source.values == nullptr) own_values_ = std::make_unique<Counter[]>(ranks * rank_values);
  for (int r = 0; r < ranks; ++r)
    values_.push_back(source.values ? source.values[r] : own_values_.get() + r * rank_values);
  claims_ = std::make_unique<Counter[]>(int64_t{layers} * ranks * queues_);
}

void Program::reset(int first, int end) {
  launches = 0;
  const int64_t n = int64_t{layers + 1} * counters_;
  for (int r = first; r < end; ++r) {
    for (int64_t i = 0; i < n; ++i) values_[r][i].value.store(0, std::memory_order_relaxed);
    for (int q = queue(r, 0); q < queue(r + 1, 0); ++q) {
      for (int layer = 0; layer < layers; ++layer) claims(q, layer).store(0, std::memory_order_relaxed);
    }
  }
}

void Program::check(int list) const {
  const int64_t n = static_cast<int64_t>(records_[list].size()) / kWords;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t* r = record(list, static_cast<int32_t>(i));
    const auto fail = [&](const std::string& what) {
      static constexpr const char* kNames[] = {"the prologue", "the body", "the epilogue", "the queues"};
      throw std::runtime_error("record " + std::to_string(i) + " of " + kNames[list] + what);
    };
    if (record_phase(r) > kMaxPhases || phase(0, r).operation == Operation{})
      fail(" is of phase " + std::to_string(record_phase(r)) + ", which the program does not have");
    for (int w = kWaitWord; w < kSignalWord + kSignals; ++w) {
      if (r[w] != 0 && word_counter(r[w]) >= counters_) fail(" names a counter beyond the block");
    }
    for (int w = kSignalWord; w < kSignalWord + kSignals; ++w) {
      const int32_t rank = word_rank(r[w]);
      if ((r[w] & kNext) && list != kBody && list != kQueues)
        fail(" signals the next layer from outside the body");
      if (r[w] != 0 && rank >= ranks && rank != kAllRanks && !(rank == kOwner && (r[w] & kIndexed)))
        fail(" signals rank " + std::to_string(rank) + " of " + std::to_string(ranks));
    }
    if (phase(0, r).operation != Operation::kDrain) continue;
    if (list != kBody) fail(" is a drain outside the body's streams");
    const Drain& op = operands<Drain>(r);
    int rank = 0;
    while (i >= end(kBody, stream(rank, workers - 1))) ++rank;
    if (op.queue < 0 || op.queue >= queues_ ||
        op.end > end(kQueues, queue(rank, op.queue)) - begin(kQueues, queue(rank, op.queue)))
      fail(" drains what is not in a queue");
  }
}

}  // namespace mk
