// The context of an instruction's body (the code that does its work), and the eight consumer warps
// as a team.
#pragma once
#include "../../common/record.h"
#include "../platform.h"

namespace mk {

MK_FN float minus_infinity() { return bits_to_float(0xFF800000u); }

// An instruction of a stream: its record and the record's phase.
struct Task {
  int32_t record[kWords];
  Where where;
  Phase phase;
  // For a worker of two SMs: the SM that the record is for, and the number of empty pages that follow those
  // of attention's items, so that both rings continue in step.
  int32_t sm, empty;

  MK_FN bool is(Operation operation) const { return phase.operation == operation; }
  MK_FN bool end() const { return record[0] == 0; }  // no instruction: the stream has ended
};

// The layer whose weights a phase uses in layer `layer`: `ahead` layers further on, but at most the
// last.
MK_FN int32_t weight_layer(const Phase& phase, const Sizes& d, int32_t layer) {
  return lower_of(layer + phase.ahead, d.layers - 1);
}

// Shared memory of a block's consumer warps. Nothing in it outlives a body.
struct Scratch {
  alignas(16) unsigned char rows[kNormBytes];  // bf16 rows that a matmul has normalised
  uint64_t gathered[2][kConsumerWarps];
  float squares[2][kConsumerWarps][8];  // dots: sums over the warp's columns of a head, by row
  int32_t last;                         // attention: whether this worker merges a split
  int32_t listed;                       // sample: logits in the list
};

// Pointers into the launch's parameters and the block's shared memory, for one consumer warp.
struct Call {
  const Params* params;
  const Sizes* dims;     // of the rank
  const StepView* step;  // as the rank sees it
  Scratch* shared;
  const Task* task;
  int32_t block;  // of the grid
  int32_t warp;   // 0 .. kConsumerWarps - 1

  MK_FN const Phase& phase() const { return task->phase; }

  // A rank's copy of a buffer, or the part for the task's layer if the buffer has layers.
  template <class T>
  MK_FN T* copy(Buffer buffer, int rank) const {
    return static_cast<T*>(params->at(rank, buffer, task->where.layer));
  }
  template <class T>
  MK_FN T* at(Buffer buffer) const {
    return copy<T>(buffer, dims->rank);
  }
  // The address of weights or of a bias; null if there are none.
  template <class T>
  MK_FN const T* weights(Buffer buffer) const {
    if (buffer == Buffer::kNone) return nullptr;
    return static_cast<T*>(params->at(dims->rank, buffer, weight_layer(phase(), *dims, task->where.layer)));
  }
};

// The value of one lane of the warp, which has 32 lanes, or 1 on the host.
MK_FN int32_t shuffle(int32_t value, [[maybe_unused]] int lane) {
#if defined(__CUDA_ARCH__)
  return __shfl_sync(0xFFFFFFFFu, value, lane);
#else
  return value;
#endif
}

// The value of the lane whose number is this one's XOR the mask.
template <class T>
MK_FN T shuffle_xor(T value, [[maybe_unused]] int mask) {
#if defined(__CUDA_ARCH__)
  return __shfl_xor_sync(0xFFFFFFFFu, value, mask);
#else
  return value;
#endif
}

// A reduction with the same result on every lane, by a tree of a fixed shape.
template <class P, class T, class F>
MK_FN T reduce_lanes(T value, F combine) {
  MK_LOOP for (int mask = P::kLanes / 2; mask > 0; mask /= 2) value =
      combine(value, shuffle_xor(value, mask));
  return value;
}

// The consumer warps as one team: each contributes a value, and all receive the values of all.
template <class P>
class Team {
 public:
  // Waits until all warps have left the previous body.
  MK_FN Team(P& p, const Call& call) : p_(p), gathered_(call.shared->gathered), warp_(call.warp) {
    p_.consumer_sync();
  }

  // Returns the warps' values, in order; a warp may read them until its next call. Calls use two arrays in
  // turn, so that one barrier per call is enough: before a warp writes an array again, it passes the barrier
  // of the call in between, which every warp reaches only after it has read the array.
  MK_FN const uint64_t* gather(uint64_t mine) {
    uint64_t* slots = gathered_[phase_];
    phase_ ^= 1;
    if (p_.lane() == 0) slots[warp_] = mine;
    p_.consumer_sync();
    return slots;
  }

  // A reduction over all lanes of all warps; `combine(a, b)` combines two values. The bits of the result do
  // not depend on timing.
  template <class F>
  MK_FN uint64_t reduce(uint64_t mine, F combine) {
    const uint64_t* slots = gather(reduce_lanes<P>(mine, combine));
    uint64_t total = slots[0];
    MK_UNROLL for (int w = 1; w < kConsumerWarps; ++w) total = combine(total, slots[w]);
    return total;
  }

  // A sum over lanes, then warps, in a fixed order.
  MK_FN float sum(float mine) {
    const float lanes = reduce_lanes<P>(mine, [](float a, float b) { return a + b; });
    const uint64_t* warps = gather(float_to_bits(lanes));
    float total = 0.0f;
    MK_UNROLL for (int w = 0; w < kConsumerWarps; ++w) total +=
        bits_to_float(static_cast<uint32_t>(warps[w]));
    return total;
  }

 private:
  P& p_;
  uint64_t (*gathered_)[kConsumerWarps];
  int phase_ = 0;
  const int warp_;
};

}  // namespace mk
