#include "program.h"

#include <stdexcept>

namespace mk {
namespace {

constexpr const char* kListNames[] = {"the prologue", "the body", "the epilogue", "the queues"};

// Checks one list of instruction records. The list has the records of all streams (or queues), one stream
// after another; `offsets` says where each stream begins. Throws unless the offsets ascend from 0 to the
// number of records, because later code relies on this.
void check_offsets(const ProgramSource& source, int list, int64_t streams) {
  const int32_t* offsets = source.offsets[list];
  bool good = offsets[0] == 0 && offsets[streams] == source.lengths[list];
  for (int64_t s = 0; s < streams; ++s) good = good && offsets[s] <= offsets[s + 1];
  if (!good)
    throw std::runtime_error(std::string("the offsets of ") + kListNames[list] +
                             " are not in order: they must ascend from 0 to the number of records, " +
                             std::to_string(source.lengths[list]));
}

// Returns whether the range [first, first + count) is valid and within [0, end).
bool inside(int32_t first, int32_t count, int32_t end) {
  return first >= 0 && count >= 0 && int64_t{first} + count <= end;
}

// Formats a range for an error message.
std::string range(int32_t first, int32_t count, int32_t end) {
  return ": [" + std::to_string(first) + ", " + std::to_string(int64_t{first} + count) + ") of " +
         std::to_string(end);
}

}  // namespace

Program::Program(const ProgramSource& source)
    : ranks(source.ranks),
      workers(source.workers),
      layers(source.dims->layers),
      counters_(source.counters),
      queues_(source.queues),
      phases_(source.phases, source.phases + int64_t{source.ranks} * (kMaxPhases + 1)),
      names_(source.names, source.names + kMaxPhases + 1) {
  if (ranks != source.dims->tp)
    throw std::runtime_error("its streams are for " + std::to_string(ranks) +
                             " ranks, but its sizes say tp=" + std::to_string(source.dims->tp));
  dims_.assign(ranks, *source.dims);
  for (int r = 0; r < ranks; ++r) dims_[r].rank = r;
  for (int list = 0; list < kRecordLists; ++list) {
    const int32_t* offsets = source.offsets[list];
    const int64_t streams = int64_t{ranks} * (list == kQueues ? queues_ : workers);
    check_offsets(source, list, streams);
    offsets_[list].assign(offsets, offsets + streams + 1);
    records_[list].assign(source.records[list], source.records[list] + int64_t{offsets[streams]} * kWords);
  }
  for (int list = 0; list < kRecordLists; ++list) check(list);
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

// Throws if the execution of a record would access memory outside a buffer, or outside an array of the
// program or of a step table.
void Program::check(int list) const {
  const int streams = list == kQueues ? queues_ : workers;
  for (int s = 0; s < ranks * streams; ++s) {
    for (int32_t i = begin(list, s); i < end(list, s); ++i) {
      const std::string what = wrong(list, s / streams, record(list, i));
      if (!what.empty())
        throw std::runtime_error("record " + std::to_string(i) + " of " + kListNames[list] + what);
    }
  }
}

std::string Program::wrong(int list, int rank, const int32_t* r) const {
  if (record_phase(r) > kMaxPhases || phase(0, r).operation == Operation{})
    return " is of phase " + std::to_string(record_phase(r)) + ", which the program does not have";
  const Operation operation = phase(rank, r).operation;
  const bool attends = operation == Operation::kAttention;
  for (int w = kWaitWord; w < kSignalWord + kSignals; ++w) {
    if (r[w] == 0) continue;
    const bool waits = w < kSignalWord;
    int64_t members = 1;
    if (r[w] & kIndexed) {
      const bool picks =
          attends || (waits && operation == Operation::kNorm && phase(rank, r).rows == Rows::kLogit);
      if (!picks || w != (waits ? kWaitWord : kSignalWord))
        return " lets the step table pick a counter: INDEXED is not allowed in word " + std::to_string(w);
      members = dims_[rank].row_blocks();
      if (attends && waits) members *= operands<Attention>(r).groups;
    }
    if (word_counter(r[w]) < 0 || word_counter(r[w]) + members > counters_)
      return " names a counter beyond the block of " + std::to_string(counters_) + " counters";
    if (waits) continue;
    const int32_t to = word_rank(r[w]);
    if ((r[w] & kNext) && list != kBody && list != kQueues)
      return " signals the next layer, which only records of the body and the queues may do";
    if (to >= ranks && to != kAllRanks && !(to == kOwner && (r[w] & kIndexed)))
      return " signals rank " + std::to_string(to) + " of " + std::to_string(ranks);
  }
  if (operation != Operation::kDrain) return wrong_operands(rank, r);
  if (list != kBody) return " is a drain, which only the streams of the body may contain";
  const Drain& op = operands<Drain>(r);
  if (!inside(op.queue, 1, queues_) ||
      !inside(0, op.end, end(kQueues, queue(rank, op.queue)) - begin(kQueues, queue(rank, op.queue))))
    return " drains records that do not exist: " + std::to_string(op.end) + " records of queue " +
           std::to_string(op.queue);
  return "";
}

// Returns an error message if the operands of a record are invalid, otherwise an empty string. The record may
// not be a drain. A join has no operands.
std::string Program::wrong_operands(int rank, const int32_t* r) const {
  const Dims& d = dims_[rank];
  const Phase& p = phase(rank, r);
  if (p.operation == Operation::kJoin) return "";
  if (p.operation == Operation::kAttention) {
    const Attention& op = operands<Attention>(r);
    if (!inside(op.slot, 1, d.attention_slots))
      return " has an attention slot that the step table lacks: slot " + std::to_string(op.slot) + " of " +
             std::to_string(d.attention_slots);
    if (op.group_heads < 1 || op.groups < 1 || int64_t{op.group_heads} * op.groups < d.rank_kv_heads())
      return " has groups that do not cover the rank's KV heads: " + std::to_string(op.groups) +
             " groups of " + std::to_string(op.group_heads) + " for " + std::to_string(d.rank_kv_heads()) +
             " heads";
    return "";
  }
  // Operations whose operands are a Run are checked here, too: the fields of a Run are the first two of a
  // Tile.
  const Tile& op = operands<Tile>(r);
  const bool logits = p.rows == Rows::kLogit || p.rows == Rows::kSampled;
  if (op.rows < 1) return " has no rows";
  const int32_t row_end = logits ? d.logit_rows : d.tokens;
  if (!inside(op.row, op.rows, row_end))
    return " has rows outside its step" + range(op.row, op.rows, row_end);
  const bool reduces = p.operation == Operation::kReduce;
  const bool experts = p.operation == Operation::kExperts;
  if (experts && !inside(operands<ExpertTile>(r).place, 1, d.places()))
    return " has a place that rows lack" + range(operands<ExpertTile>(r).place, 1, d.places());
  if (p.operation == Operation::kRoute && d.experts > kMostExperts)
    return " chooses among " + std::to_string(d.experts) + " experts, more than " +
           std::to_string(kMostExperts);
  if (reduces || experts || p.operation == Operation::kMatmul) {
    if (op.cols < 1) return " has no columns";
    const int32_t col_end = reduces ? d.hidden : p.width;
    if (!inside(op.col, op.cols, col_end))
      return " has columns outside its output" + range(op.col, op.cols, col_end);
  }
  const int32_t unit = p.head_norm != Buffer::kNone || d.quantised_kv ? d.head_dim : 2;
  if (p.result == Result::kHeads && (op.col % unit || op.cols % unit))
    return " cuts a head or a RoPE pair: its columns must start and end at multiples of " +
           std::to_string(unit);
  return "";
}

}  // namespace mk
