// The context of an instruction's body (the code that does the instruction's work), and a class for values
// that the eight consumer warps exchange.
#pragma once
#include "../../common/record.h"
#include "../platform.h"
#include "memory.h"

namespace mk {

MK_FN float minus_infinity() { return bits_to_float(0xFF800000u); }

// An instruction: its encoded record, its place in the program, and the parameters of its phase (operation).
struct Task {
  int32_t record[kWords];
  Where where;
  Phase phase;

  MK_FN bool is(Operation operation) const { return phase.operation == operation; }
  MK_FN bool end() const { return record[0] == 0; }  // no instruction: the stream has ended
};

// If `phase` runs in layer `layer`, returns the layer whose weights the phase uses: phase.ahead layers
// later, or the last layer if there are fewer.
MK_FN int32_t weight_layer(const Phase& phase, const Sizes& d, int32_t layer) {
  return lower_of(layer + phase.ahead, d.layers - 1);
}

// Shared memory that a block's consumer warps use within an instruction. Its contents are not kept for the
// next instruction.
struct Scratch {
  alignas(16) unsigned char rows[kRowBytes];  // bf16 rows that a matmul has normalised or copied
  uint64_t gathered[2][kConsumerWarps];
  float squares[2][kConsumerWarps][8];  // dots.h: a warp's sum of squares over its columns of a head, by row
  int32_t last;    // attention: whether this block was the last, and so merges partial results
  int32_t listed;  // sample.h: number of logits copied to the list of candidates
};

// The KV blocks from `begin` to `end` - 1.
struct KvBlocks {
  int32_t begin, end;
};

// An attention work item, as the step's tables describe it. `position` is the position of its first row.
// `blocks` are the KV blocks that it reads: none if all come before the layer's sliding window.
struct ItemWork {
  int32_t seq, kv_head, kv_heads, split, position;
  KvBlocks blocks;
};

// How many groups of eight columns a lane of a norm keeps in registers. With 256 lanes, this covers rows of
// 8,192 columns. Further columns are read twice: for the sum of squares, then for the result.
constexpr int kNormHeld = lower_of(4, ceil_div(kMostHidden, 8 * 32 * kConsumerWarps));

struct NormPart {
  Eight part[kNormHeld];
};

// Values that a warp looks up before the instruction's inputs are written, and keeps in registers.
struct Early {
  Operation operation;
  bool normed;  // whether the instruction normalises rows: a norm, or a matmul with a norm (dots.h)
  Result result;
  const float* norm;  // if so, the norm's weights
  // Only in builds for one row:
  const void* input;       // of a norm or matmul: its row of inputs
  void* output;            // of a matmul: where its row of results begins
  int32_t row;             // of a norm: as normed_row returns it
  NormPart weights;        // of a norm, or of a matmul that normalises its row
  int32_t position, page;  // of a QKV projection: the row's position and KV page; no page: -1
  int32_t begin, end;      // of attention: its items
  ItemWork first;          // its first item
};

// Pointers into the launch's parameters and the block's shared memory, for one consumer warp.
struct Call {
  const Params* params;
  const Sizes* dims;     // the sizes on this rank
  const StepView* step;  // the launch's step table
  Scratch* shared;
  const Task* task;
  int32_t block;  // number in the grid
  int32_t warp;   // 0 .. kConsumerWarps - 1
  Early early{};

  MK_FN const Phase& phase() const { return task->phase; }

  // Returns the address of a rank's copy of a buffer. If the buffer has layers, this is the address of
  // the task's layer in that copy.
  template <class T>
  MK_FN T* copy(Buffer buffer, int rank) const {
    return static_cast<T*>(params->at(rank, buffer, task->where.layer));
  }
  template <class T>
  MK_FN T* at(Buffer buffer) const {
    return copy<T>(buffer, dims->rank);
  }
  // Returns the address of row 0 of a matmul's results on a rank.
  template <class T>
  MK_FN T* output(int rank) const {
    return kOneRow ? static_cast<T*>(early.output) : copy<T>(phase().output, rank);
  }
  // Returns the address of weights or of a bias, or null if the phase has none.
  template <class T>
  MK_FN const T* weights(Buffer buffer) const {
    if (buffer == Buffer::kNone) return nullptr;
    return static_cast<T*>(params->at(dims->rank, buffer, weight_layer(phase(), *dims, task->where.layer)));
  }
};

// Returns the `value` that lane number `lane` of the warp passes. A warp has 32 lanes, or 1 on the host.
MK_FN int32_t shuffle(int32_t value, [[maybe_unused]] int lane) {
#if defined(__CUDA_ARCH__)
  return __shfl_sync(0xFFFFFFFFu, value, lane);
#else
  return value;
#endif
}

// Returns a word whose bit i says whether found(i) is true, for i below `count`, which is at most 32.
// All lanes of the warp must call it together. They divide the bits among themselves.
template <class F>
MK_FN uint32_t ballot(int32_t count, const F& found) {
#if defined(__CUDA_ARCH__)
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  return __ballot_sync(0xFFFFFFFFu, lane < count && found(lane));
#else
  uint32_t bits = 0;
  for (int32_t i = 0; i < count; ++i) bits |= uint32_t{found(i)} << i;
  return bits;
#endif
}

// Returns the value of the lane whose number is this lane's number XOR the mask.
template <class T>
MK_FN T shuffle_xor(T value, [[maybe_unused]] int mask) {
#if defined(__CUDA_ARCH__)
  return __shfl_xor_sync(0xFFFFFFFFu, value, mask);
#else
  return value;
#endif
}

// Combines the values of all lanes of the warp in a tree of a fixed shape, and returns the same result on
// every lane.
template <class P, class T, class F>
MK_FN T reduce_lanes(T value, F combine) {
  MK_LOOP for (int mask = P::kLanes / 2; mask > 0; mask /= 2) value =
      combine(value, shuffle_xor(value, mask));
  return value;
}

// Exchanges values among the consumer warps: each warp contributes one value, and every warp receives
// the values of all warps.
template <class P>
class Team {
 public:
  // Waits until all consumer warps have finished the previous instruction. With `met`, does not wait,
  // because the caller knows that they have.
  MK_FN Team(P& p, const Call& call, bool met = false)
      : p_(p), gathered_(call.shared->gathered), warp_(call.warp) {
    if (!met) p_.consumer_sync();
  }

  // Exchanges one value per warp: returns an array of all eight values, valid until the warp's next call. Two
  // arrays are used in turn. So one barrier per call is enough: an array is overwritten only after the next
  // call's barrier, and by then every warp has read the array.
  MK_FN const uint64_t* gather(uint64_t mine) {
    uint64_t* slots = gathered_[phase_];
    phase_ ^= 1;
    if (p_.lane() == 0) slots[warp_] = mine;
    p_.consumer_sync();
    return slots;
  }

  // Combines the values of all lanes of all warps with `combine(a, b)` and returns the result. The bits of
  // the result do not depend on timing.
  template <class F>
  MK_FN uint64_t reduce(uint64_t mine, F combine) {
    const uint64_t* slots = gather(reduce_lanes<P>(mine, combine));
    uint64_t total = slots[0];
    MK_UNROLL for (int w = 1; w < kConsumerWarps; ++w) total = combine(total, slots[w]);
    return total;
  }

  // Returns the sum of the values of all lanes of all warps. The order of the additions is fixed: first over
  // the lanes of each warp, then over the warps.
  MK_FN float sum(float mine) {
    MK_UNROLL for (int mask = P::kLanes / 2; mask > 0; mask /= 2) mine += shuffle_xor(mine, mask);
    const uint64_t* warps = gather(float_to_bits(mine));
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
