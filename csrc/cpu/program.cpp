#include "program.h"

#include <stdexcept>
#include <string>

#include "../common/record.h"

namespace mk {

Program::Program(const ProgramSource& source)
    : dims(*source.dims), workers(source.workers), counters_(source.counters) {
  if (source.ranks != 1)
    throw std::runtime_error("the cpu backend runs programs of one rank; compile with tp=1");
  for (int s = 0; s < kSegments; ++s) {
    const int32_t* offsets = source.offsets[s];
    offsets_[s].assign(offsets, offsets + workers + 1);
    const int64_t words = int64_t{offsets[workers]} * kWords;
    records_[s].assign(source.records[s], source.records[s] + words);
    totals_[s].assign(source.totals[s], source.totals[s] + counters_);
    check(s);
  }
  values_ = std::make_unique<Counter[]>(int64_t{dims.layers + 1} * counters_);
}

void Program::reset_counters() {
  launches = 0;
  const int64_t n = int64_t{dims.layers + 1} * counters_;
  for (int64_t i = 0; i < n; ++i) values_[i].value.store(0, std::memory_order_relaxed);
}

void Program::check(int segment) const {
  const int64_t n = static_cast<int64_t>(records_[segment].size()) / kWords;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t* r = record(segment, static_cast<int32_t>(i));
    const auto fail = [&](const std::string& what) {
      throw std::runtime_error("record " + std::to_string(i) + " of segment " + std::to_string(segment) +
                               what);
    };
    bool known = false;
#define MK_KNOWN(name, Name, opcode) known |= record_opcode(r) == opcode;
    MK_INSTRUCTIONS(MK_KNOWN)
#undef MK_KNOWN
    if (!known) fail(" has the unknown opcode " + std::to_string(record_opcode(r)));
    for (int w = kWaitWord; w < kSignalWord + kSignals; ++w) {
      if (r[w] != 0 && word_counter(r[w]) >= counters_) fail(" names a counter beyond the block");
    }
    for (int w = kSignalWord; w < kSignalWord + kSignals; ++w) {
      if ((r[w] & kNext) && segment != kBody) fail(" signals the next layer from outside the body");
    }
  }
}

}  // namespace mk
