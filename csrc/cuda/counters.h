// Instructions are ordered by counters in global memory. An instruction record has wait words, which name the
// counters to wait for, and signal words, which name the counters to add to (megakernel/isa/record.py). If a
// word has the INDEXED bit, its counters depend on the requests in the step.
#pragma once
#include "../common/index.h"
#include "block.h"

namespace mk {

// Returns the memory scope of accesses to counters: the GPU if all ranks run on this GPU, otherwise the
// system. All warps that access a counter must use the same scope, because the memory model treats accesses
// with different scopes as a race.
MK_FN Scope scope_of(const Params& params, const Sizes& d) {
  return kOneRow || params.ranks == d.tp ? Scope::kGpu : Scope::kSystem;
}

// Returns the address of a counter, and the value that it must reach in this launch. Counters are not reset
// between launches. So the value is the counter's total for one launch, times the number of launches so far.
MK_FN Need need_of(const Params& params, const Sizes& d, const Where& where, int32_t counter) {
  const int32_t totals = where.block == 0 ? 0 : where.block == d.layers ? 2 : 1;
  return {params.counters_of(d.rank) + static_cast<int64_t>(where.block) * params.counters + counter,
          params.launch * static_cast<uint32_t>(params.totals[totals][d.rank * params.counters + counter])};
}

// Waits for the counters that an instruction record's wait words name directly (without the INDEXED bit).
// Like wait_item and wait_rows, returns true once all counters have reached their values, or false if the
// launch was aborted.
template <class P>
MK_FN bool wait_words(P& p, const Params& params, const Sizes& d, const Task& task) {
  if (!params.synchronise) return true;
  return p.wait_counters(kWaits, scope_of(params, d), task.where, [&](int32_t i) {
    const int32_t word = task.record[kWaitWord + i];
    return word == 0 || (word & kIndexed) ? Need{} : need_of(params, d, task.where, word_counter(word));
  });
}

// Waits until the inputs of an attention work item (some rows and KV heads of a sequence) are written.
// Each combination of a row block (consecutive token rows) and a group of KV heads has a counter. The
// function waits for the counters of the item's inputs. The record's wait word 0 names the first one.
template <class P>
MK_FN bool wait_item(P& p, const Params& params, const Sizes& d, const StepView& s, const Task& task,
                     int32_t item) {
  const int32_t word = task.record[kWaitWord];
  if (!params.synchronise || !(word & kIndexed)) return true;
  const Attention& op = operands<Attention>(task.record);
  const int32_t group = s.item_kv_head[item] / op.group_heads;
  const int32_t groups = (s.item_kv_head[item] + s.item_kv_heads[item] - 1) / op.group_heads - group + 1;
  const int32_t corner = word_counter(word) + s.item_wait_block[item] * op.groups + group;
  return p.wait_counters(s.item_wait_blocks[item] * groups, scope_of(params, d), task.where, [&](int32_t i) {
    return need_of(params, d, task.where, corner + i / groups * op.groups + i % groups);
  });
}

// Waits until the inputs of the final norm are written. The final norm reads only the rows whose logits are
// needed. There is a counter for each row block (group of rows). The function waits for the counters of all
// rows that this rank normalises. Wait word 0 of the instruction's record names the counter of row block 0.
template <class P>
MK_FN bool wait_rows(P& p, const Params& params, const Sizes& d, const StepView& s, const Task& task) {
  const int32_t word = task.record[kWaitWord];
  if (!params.synchronise || !(word & kIndexed)) return true;
  const Run& op = operands<Run>(task.record);
  return p.wait_counters(op.rows, scope_of(params, d), task.where, [&](int32_t i) {
    const int32_t row = s.logit_rows[op.row + i];
    if (row < 0 || !norms_logit_row(d, s, op.row + i)) return Need{};
    return need_of(params, d, task.where, word_counter(word) + row / d.row_block);
  });
}

// Signals the end of an instruction: adds to the counters that its record's signal words name directly
// (without the INDEXED bit). The lanes divide the counters and the ranks among themselves. The constructor
// reads the words early, so that `send` does not have to wait for them.
template <class P>
class Signals {
 public:
  MK_FN Signals(P& p, const Params& params, const Sizes& d, const Task& task)
      : params_(params), scope_(scope_of(params, d)) {
    MK_UNROLL for (int32_t i = 0; i < kWords; ++i) {
      const int32_t lane = p.lane() + i * P::kLanes, word = task.record[kSignalWord + lane % kSignals];
      const int32_t rank = word_rank(word), block = task.where.block + (word & kNext ? 1 : 0);
      Told& told = told_[i];
      told.ranks = rank == kAllRanks ? all_ranks(d) : Ranks{rank, rank + 1};
      told.ranks.begin += lane / kSignals;
      if (word == 0 || (word & kIndexed) || !params.synchronise) told.ranks.end = 0;
      told.at = static_cast<int64_t>(block) * params.counters + word_counter(word);
    }
  }

  MK_FN void send(P& p) const {
    MK_UNROLL for (const Told& told : told_) {
      MK_LOOP for (int32_t rank = told.ranks.begin; rank < told.ranks.end; rank += kStep)
          p.signal(params_.counters_of(rank) + told.at, 1, scope_);
    }
  }

 private:
  static constexpr int32_t kWords = P::kLanes < kSignals ? kSignals / P::kLanes : 1;
  static constexpr int32_t kStep = P::kLanes < kSignals ? 1 : P::kLanes / kSignals;
  struct Told {
    Ranks ranks;  // this lane signals every kStep-th rank, starting with ranks.begin
    int64_t at;   // the counter's index among a rank's counters
  };
  const Params& params_;
  const Scope scope_;
  Told told_[kWords];
};

// Signals that the output rows of an attention work item, from `row` on, are final. Each row block
// (consecutive token rows) has one counter, and `count` is added to the counter of the row block that
// contains `row`. The record's signal word 0 names the first counter. Each lane signals other ranks.
template <class P>
MK_FN void signal_item(P& p, const Params& params, const Sizes& d, const Task& task, int32_t row,
                       int32_t count) {
  const int32_t word = task.record[kSignalWord], rank = word_rank(word);
  if (!(word & kIndexed) || !params.synchronise) return;
  const Ranks ranks = rank == kAllRanks ? all_ranks(d)
                      : rank == kOwner  ? residual_ranks(d, row)
                                        : Ranks{rank, rank + 1};
  const int64_t at =
      static_cast<int64_t>(task.where.block) * params.counters + word_counter(word) + row / d.row_block;
  MK_LOOP for (int32_t i = ranks.begin + p.lane(); i < ranks.end; i += P::kLanes)
      p.signal(params.counters_of(i) + at, count, scope_of(params, d));
}

}  // namespace mk
