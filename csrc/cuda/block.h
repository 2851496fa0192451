// The shared memory of a thread block. Instructions load data through a ring (a circular buffer) of kRing
// pages of 16 KiB. Page n of a block, counted from 0 over all instructions, lies in slot n % kRing of the
// ring, and uses phase n / kRing of the slot's mbarriers:
//   full    the bytes that one of the two loader warps has requested are in the page
//   empty   all consumer warps have released the page (no longer need it), and the loader that did not
//           fill it has arrived
//
// Matmuls on tensor cores use the ring differently, once no page is in use: as kStages stages of
// kStepPages pages, for operands and results. Stages are numbered like pages, and have these barriers:
//   full[0], full[1]  the bytes that the weight loader or the input loader has requested are in the stage; if
//                     it is for results, the consumer warps may write it
//   ready             results only: the consumer warps have written the stage
//   empty             all consumer warps have released the stage, or the storer warp on their behalf
//
// Each role (loader, consumer, storer) computes by itself which pages an instruction uses (plan.h).
//
// One loader warp loads weights and another loads inputs. Both wait until the slot of a page is empty.
// Then one loader fills the page, and the other only arrives at `empty`. So no loader gets more than
// kRing pages ahead of the other loader or of a consumer warp. The waits need this limit because they
// test only the parity of a barrier's phase: they cannot distinguish phases that are two apart. No
// barrier is ever re-initialised.
//
// A block works on up to kSlots instructions at once. The description of instruction j (its Task) is in
// `slots[j % kSlots]`, with these barriers, which complete one phase per instruction:
//   fetched  the controller warp has written the task; for experts, it has first waited for the counters
//   inputs   the input loader has seen that the instruction's inputs are written
//   loaded   both loaders have requested all of the instruction's loads
//   outputs  the consumer warps have issued and fenced all of their stores
//   retired  no warp needs the slot any longer (loaders, storer and consumer warps)
#pragma once
#include "ops/call.h"

namespace mk {

constexpr int kWarps = kThreads / 32;
static_assert(kConsumerWarp + kConsumerWarps == kWarps);
constexpr int kRetiring = 3 + kConsumerWarps;

template <class Barrier>
struct StageMemory {
  Barrier full[2], ready, empty;
};

template <class Barrier>
struct SlotMemory {
  Barrier fetched, inputs, loaded, outputs, retired;
  Task task;
};

// A wait that has lasted a millisecond, as the waiting warp records it (watchdog.h).
struct Late {
  const void* what;  // the barrier or counter that the warp waits for; null if there is no such wait
  uint32_t parity;   // parity of the barrier phase for which the warp waits
  Where where;
};

// How far the weight loader has prefetched weights into the L2 cache (loaders.h). It will next prefetch
// weight page `page` of instruction `j`. `pages` counts the pages that are prefetched but not yet
// loaded. `since` is the time of the last prefetch. `begin`, for traces, is the time at which the loader
// requested the current instruction's first page, or 0 before that.
struct BlockAhead {
  uint32_t j, since;
  int32_t page, pages;
  uint64_t begin;
};

template <class Barrier>
struct BlockMemory {
  unsigned char pages[kRing][kPageBytes];  // aligned to 1024 bytes on the device
  Scratch scratch;
  Barrier full[kPages], empty[kPages];
  StageMemory<Barrier> stages[kStages];
  SlotMemory<Barrier> slots[kSlots];
  Late late[kWarps];
  BlockAhead ahead;
  uint64_t begun;  // traces: when the consumers began the instruction; kept here to save registers
  int32_t traced;  // traces: the number of intervals that the block has recorded
  Sizes dims;
  StepView step;
  int32_t rank, worker, index;  // index: the block's number in its grid
};

template <class P>
using Slot = SlotMemory<typename P::Barrier>;
template <class P>
using Block = BlockMemory<typename P::Barrier>;

// For instruction j of a block: its index in `slots`, and the phase parity for waits on its barriers.
MK_FN constexpr int slot_of(uint32_t j) { return static_cast<int>(j % kSlots); }
MK_FN constexpr uint32_t slot_parity(uint32_t j) { return j / kSlots & 1; }

// Where a page lies in the ring, and the parity of the barrier phase that belongs to the page. Before a
// loader fills the page, it waits until the previous phase of the slot's barrier `empty` is complete.
struct Page {
  int slot;
  uint32_t parity;
};
MK_FN constexpr Page page_of(uint32_t n) { return {static_cast<int>(n % kRing), n / kRing & 1}; }

static_assert(kStages * kStepPages <= kRing, "the ring must have room for all stages");
MK_FN constexpr Page stage_of(uint32_t n) { return {static_cast<int>(n % kStages), n / kStages & 1}; }

}  // namespace mk
