// The controller warp reads its worker's stream of instructions and hands each one to the other warps. It
// also claims instructions from queues that all workers of a rank share.
#pragma once
#include "counters.h"
#include "plan.h"

namespace mk {

template <class P>
class Controller {
 public:
  MK_FN Controller(P& p, Block<P>& block, const Params& params) : p_(p), block_(block), params_(params) {}

  MK_FN void run() {
    walk();
    publish(nullptr, between());
  }

 private:
  MK_FN bool walk() {
    MK_LOOP for (int32_t segment = kPrologue; segment <= kEpilogue; ++segment) {
      if (!(params_.segments >> segment & 1)) continue;
      const bool body = segment == kBody;
      MK_LOOP for (int32_t layer = body ? params_.layer_begin : 0; layer < (body ? params_.layer_end : 1);
                   ++layer) {
        if (!run_segment({segment, layer, 0, segment == kEpilogue ? block_.dims.layers : layer}))
          return false;
      }
    }
    return true;
  }

  MK_FN bool run_segment(Where where) {
    const int32_t* offsets = params_.offsets[where.segment] + block_.rank * params_.workers + block_.worker;
    MK_LOOP for (where.number = offsets[0]; where.number < offsets[1]; ++where.number) {
      const int32_t* record = params_.records[where.segment] + static_cast<int64_t>(where.number) * kWords;
      if (phase_of(record).operation == Operation::kDrain && !drain(operands<Drain>(record), where))
        return false;
      if (aborted()) return false;
      publish(record, where);
    }
    return true;
  }

  // Runs a drain instruction: claims instructions from a queue that workers share, and hands each one to
  // this block's other warps. Ends when the queue's first op.end instructions have all been claimed. A
  // worker claims late, so that work goes to a worker that is free. Before a claim, it waits until its
  // previous instruction has requested all loads, and earlier ones are finished. So the previous
  // instruction no longer waits for counters, and the claimed one runs soon.
  MK_FN bool drain(const Drain& op, const Where& where) {
    const int32_t stream = block_.rank * params_.queues + op.queue;
    const int32_t first = params_.offsets[kQueues][stream];
    const uint32_t length = params_.offsets[kQueues][stream + 1] - first;
    const int32_t body = params_.offsets[kBody][block_.dims.tp * params_.workers];
    int32_t* claims = params_.claims[block_.rank] + where.layer * params_.queues + op.queue;
    while (true) {
      if (aborted()) return false;
      if (!wait_for_room(kClaimSlots, where)) return false;
      if (published_ > 0 && !wait_for(published_ - 1, &Slot<P>::loaded, where)) return false;
      const int32_t item = p_.claim(claims, (params_.launch - 1) * length, op.end);
      if (item < 0) return true;
      Where claimed = where;
      claimed.number = body + first + item;
      publish(params_.records[kQueues] + static_cast<int64_t>(first + item) * kWords, claimed);
    }
  }

  // Waits until fewer than n of the instructions handed to the other warps are unfinished. Returns false if
  // the launch is aborted during the wait. `where` identifies the next instruction, for the watchdog.
  MK_FN bool wait_for_room(uint32_t n, const Where& where) {
    if (!params_.pipelined) n = 1;
    if (published_ < n) return true;
    return wait_for(published_ - n, &Slot<P>::retired, where);
  }
  MK_FN bool wait_for(uint32_t j, typename P::Barrier Slot<P>::* what, const Where& where) {
    return p_.wait_always(block_.slots[slot_of(j)].*what, slot_parity(j), where);
  }

  // Returns whether the launch was aborted. Lane 0 decides, so that all lanes take the same branch.
  MK_FN bool aborted() { return shuffle(p_.aborted(), 0) != 0; }

  // Returns the parameters of an instruction's phase (the model's operation, isa.h).
  MK_FN const Phase& phase_of(const int32_t* record) const {
    return params_.phases[block_.rank * (kMaxPhases + 1) + (record ? record_phase(record) : 0)];
  }

  // Hands an instruction's record to the other warps. The record of an `experts` instruction is handed
  // over in several parts (routes.h). A null record marks the end of the stream.
  MK_FN void publish(const int32_t* record, const Where& where) {
    int32_t done = 0;
    MK_LOOP do { done = publish_part(record, where, done); }
    while (kHasExperts && done > 0);
  }

  // Hands a record to the other warps; of an `experts` record, only the next part. `done` counts the
  // token rows in its earlier parts. Returns `done` plus the new part's rows, or 0 if no rows are left.
  MK_FN int32_t publish_part(const int32_t* record, const Where& where, [[maybe_unused]] int32_t done) {
    if (!wait_for_room(kSlots, where)) return 0;
    [[maybe_unused]] const uint64_t begin = p_.now();
    Slot<P>& slot = block_.slots[slot_of(published_)];
    describe(slot.task, record, where);
    int32_t next = 0;
    if constexpr (kHasExperts) {
      p_.sync_warp();
      if (is_experts(slot.task)) {
        if (!wait_words(p_, params_, block_.dims, slot.task)) return 0;
        next = choose_rows(p_, Routes(params_, block_.dims), slot.task, done);
      }
    }
    p_.arrive(slot.fetched);
    if (record) p_.trace(where, Role::CONTROLLER, IntervalKind::FETCH, begin);
    ++published_;
    return next;
  }

  MK_FN void describe(Task& task, const int32_t* record, const Where& where) {
    for (int i = p_.lane(); i < kWords; i += P::kLanes) task.record[i] = record ? record[i] : 0;
    if (p_.lane() == 0) task.where = where;
    const auto* from = reinterpret_cast<const int32_t*>(&phase_of(record));
    auto* to = reinterpret_cast<int32_t*>(&task.phase);
    for (int i = p_.lane(); i < static_cast<int>(sizeof(Phase) / 4); i += P::kLanes) to[i] = from[i];
  }

  P& p_;
  Block<P>& block_;
  const Params& params_;
  uint32_t published_ = 0;
};

}  // namespace mk
