// Finds the token rows of an `experts` instruction in ROUTES, the router's choices. The controller waits
// for the counters and reads ROUTES, so no other role waits. It hands over the instruction in parts. A
// part covers no more token rows than dot products can process, and uses those that chose the expert.
#pragma once
#include "ops/call.h"
#include "ops/memory.h"

namespace mk {

// The operands of one part of an `experts` instruction. They replace those in the instruction's record.
struct ExpertPart {
  int32_t row, rows;  // first token row of the part; how many of its rows have chosen the expert
  int32_t col, cols;
  int32_t expert;   // number among the rank's experts
  uint32_t chosen;  // bit i is set if token row `row` + i has chosen the expert
};

MK_FN bool is_experts(const Task& task) { return kHasExperts && task.is(Operation::kExperts); }
MK_FN const ExpertPart& part_of(const Task& task) { return operands<ExpertPart>(task.record); }

// The most rows that dot products process at once, if a row fits in one piece (kPiece elements). A build
// for tensor cores uses dot products for experts only, with fewer rows, so that its code stays short.
constexpr int kDotRows = kOneRow ? 1 : kUnits == Units::kTensor ? 8 : kDotInputPages * kPieces;
static_assert(kDotRows <= 32, "a warp has one lane, and ExpertPart::chosen one bit, for each row");

// Returns the maximum number of rows that dot products can process if a row has `inner` elements.
MK_FN int32_t most_dot_rows(int32_t inner) {
  return lower_of(kDotRows, kDotInputPages * kPieces / ceil_div(inner, kPiece));
}

// Reads the router's choices (ROUTES). An invalid expert number causes no access outside the buffers.
struct Routes {
  const int32_t* experts;       // [rows][count]
  int32_t count;                // experts per token
  int32_t first, rank_experts;  // the rank's experts: the first and their number
  bool by_expert;

  MK_FN Routes(const Params& params, const Sizes& d)
      : experts(static_cast<const int32_t*>(params.at(d.rank, Buffer::ROUTES, 0))),
        count(d.experts_per_token),
        first(d.first_expert()),
        rank_experts(d.rank_experts()),
        by_expert(d.by_expert()) {}

  MK_FN int32_t at(int32_t row, int32_t place) const {
    return load_int(experts + int64_t{row} * count + place);
  }
  MK_FN bool own(int32_t expert) const {
    return static_cast<uint32_t>(expert) - static_cast<uint32_t>(first) < static_cast<uint32_t>(rank_experts);
  }
  MK_FN bool has(int32_t row, int32_t expert) const {
    bool found = false;
    MK_LOOP for (int32_t place = 0; place < count; ++place) found |= at(row, place) == expert;
    return found;
  }
  // Returns the i-th of the part's token rows that have chosen the expert.
  MK_FN int32_t token(const Task& task, int32_t i) const {
    int32_t row = part_of(task).row;
    uint32_t chosen = part_of(task).chosen;
    MK_LOOP for (; !(chosen & 1) || i-- > 0; chosen >>= 1)++ row;
    return row;
  }
  // Returns the output row for the part's i-th token. Each expert of a token has its own output row.
  MK_FN int32_t result(const Task& task, int32_t i) const {
    const int32_t row = token(task, i), expert = first + part_of(task).expert;
    int32_t place = 0;
    MK_LOOP for (; place < count - 1 && at(row, place) != expert;)++ place;
    return row * count + place;
  }
  // Returns the part's i-th input row. For gate and up, all experts of a token read the same row.
  MK_FN int32_t input(const Task& task, int32_t i) const {
    return task.phase.matrices == 2 ? token(task, i) : result(task, i);
  }
};

// Replaces the `experts` record in `task` by its next part. `done` counts the token rows in earlier
// parts. Returns `done` plus the new part's rows, or 0 for the last part. Only the last part signals.
template <class P>
MK_FN int32_t choose_rows(P& p, const Routes& routes, Task& task, int32_t done) {
  const ExpertTile& op = operands<ExpertTile>(task.record);
  const int32_t left = op.rows - done, row = op.row + done;
  const int32_t rows = lower_of(left, routes.by_expert ? most_dot_rows(task.phase.inner) : 1);
  const int32_t expert = routes.by_expert ? routes.first + op.place : routes.at(row, op.place);
  const bool own = routes.own(expert);
  const uint32_t chosen = ballot(rows, [&](int32_t i) { return own && routes.has(row + i, expert); });
  p.sync_warp();
  if (p.lane() == 0) {
    auto& part = *reinterpret_cast<ExpertPart*>(task.record + kOperandWord);
    part.row = row;
    part.rows = count_bits(chosen);
    part.expert = own ? expert - routes.first : 0;
    part.chosen = chosen;
    MK_LOOP for (int32_t i = kSignalWord; rows < left && i < kSignalWord + kSignals; ++i) task.record[i] = 0;
  }
  return rows < left ? done + rows : 0;
}

}  // namespace mk
