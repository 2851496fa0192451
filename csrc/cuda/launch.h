// The arguments of a launch, which Python reads from this file (megakernel/library.py). The description of a
// pointer begins with the shape of the data: `tp` is the model's number of ranks, and `blocks` the number of
// thread blocks of this launch on this GPU.
#pragma once
#include "params.h"

namespace mk {

struct TensorMap;

// The wait in which a warp was stuck when its launch was aborted.
struct Diagnosis {
  int32_t set;       // 0: the warp was not stuck, and the other fields are unset
  int32_t segment;   // segment of the instruction that the warp executed; -1: between two instructions
  int32_t layer;     // layer of the instruction, in the body
  int32_t number;    // index of the instruction's record, as in a trace
  int32_t awaited;   // the kind of counter or barrier waited for, an Awaited
  int32_t index;     // index of the counter in its block, or ring slot of the page or instruction
  int32_t value;     // value of the counter; unused for a barrier
  int32_t expected;  // the counter value waited for, or the parity of the barrier phase waited for
};

constexpr int32_t kMostRanks = 14;  // record words can name so many
constexpr int32_t kMostCopies = 672;
static_assert(kMostRanks == kOwner && kMostRanks * kBuffers <= kMostCopies);

struct Params {
  const Dims* dims;            // [tp]: one Dims per rank, which differ in Dims.rank
  const Phase* phases;         // [tp][kMaxPhases + 1]: each rank's phases, indexed by phase number
  const int32_t* records[4];   // [n][kWords]: instructions of prologue, body, epilogue and queues
  const int32_t* offsets[4];   // [tp * (workers or queues) + 1]: where a stream or queue begins
  const int32_t* totals[3];    // [tp][counters]: a counter's signals: first, middle, last block
  const TensorMap* maps;       // [tp][kBuffers][kMaps]: set only for buffers copied through tensor maps
  uint64_t mapped;             // bit b is set if blocks use their own rank's tensor maps of buffer b
  uint64_t mapped_everywhere;  // bit b is set if blocks use every rank's tensor maps of buffer b
  const int32_t* step_words;   // the step table
  int32_t* abort;              // a value other than 0 makes all warps abort the launch
  Diagnosis* diagnoses;        // [blocks][warps]: for each warp, the wait in which it was stuck
  float* sample_scratch;       // [blocks][2][vocab]
  Interval* trace;             // [blocks][trace_capacity]
  int32_t* trace_counts;       // [blocks]: number of intervals, including those beyond trace_capacity
  uint64_t* clocks;            // [blocks][kClockStamps]
  uint64_t timeout_ns;         // a wait that lasts longer than this aborts the launch
  int32_t trace_capacity;
  uint32_t launch;          // number of launches since the counters were zeroed, including this one
  int32_t first_rank;       // the lowest rank that this grid runs
  int32_t ranks;            // number of ranks that this grid runs
  int32_t workers, queues;  // per rank
  int32_t counters;         // per counter block
  int32_t synchronise;      // 0: instructions neither wait nor signal, for launches of a single phase
  int32_t pipelined;        // 0: a block fetches an instruction only after its previous instruction has ended
  int32_t segments;         // bit s is set if segment s is run
  int32_t layer_begin, layer_end;  // the layers of the body to run
  // Addresses are passed by value, because reading the arguments takes less time than a load from memory.
  int32_t* counter_values[kMostRanks];  // each rank's counters, [layers + 1][counters]
  int32_t* claims[kMostRanks];          // each rank's claim counters, [layers][queues]
  void* buffers[kMostCopies];           // [tp][kBuffers]
  uint64_t layer_stride[kMostCopies];   // [tp][kBuffers]: bytes between layers; 0 if they share one copy

  MK_DIMS_FN int32_t* counters_of(int32_t rank) const { return counter_values[kOneRow ? 0 : rank]; }
  // Returns where a rank's copy of a buffer begins. If every layer has its own copy, `layer` selects it.
  MK_DIMS_FN void* at(int32_t rank, Buffer buffer, int32_t layer) const {
    const int32_t i = (kOneRow ? 0 : rank * kBuffers) + static_cast<int32_t>(buffer);
    return static_cast<char*>(buffers[i]) + static_cast<uint64_t>(layer) * layer_stride[i];
  }
};

}  // namespace mk
