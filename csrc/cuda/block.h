// The shared memory of a thread block. Instructions load data through a ring (a circular buffer) of kRing
// pages of 16 KiB. Page n of a block, counted from 0 over all instructions, lies in slot n % kRing of the
// ring, and uses phase n / kRing of the slot's mbarriers:
//   full    the bytes that one of the two loader warps has requested are in the page
//   empty   all consumer warps have released the page, and the other loader has passed it. A warp releases a
//           page when it no longer needs the page
//
// Matmuls on tensor cores use the ring as kStages stages of kStepPages pages instead, for operands and
// results, once no page is in use. Stages are numbered and placed like pages, and have these barriers:
//   full[0], full[1]  the bytes that the weight loader or the input loader has requested are in the stage; if
//                     it is for results, the consumer warps may write it
//   ready             results only: the consumer warps have written the stage
//   empty             all consumer warps have released the stage, or the storer warp on their behalf
//
// Every role lists an instruction's pages itself (plan.h).
//
// One loader warp loads weights and another loads inputs. For a page, both wait until its slot is empty,
// although only one of them fills it; the other one passes it. This keeps each loader within kRing pages
// (the whole ring) of the other loader and of the consumer warps. Without this limit a wait could go wrong:
// it tests only the parity of a barrier's phase, so it would confuse phases that are two apart. No barrier is
// ever re-initialised.
//
// A block works on up to kSlots instructions at once. Instruction j uses the shared-memory slot j % kSlots,
// with its description (the task) and these barriers, which complete one phase per instruction:
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

// How far the weight loader has prefetched into the L2 cache (loaders.h). It prefetches page `page` of
// the weights of instruction j next. `pages` is the number of pages prefetched but not loaded yet, and
// `since` the time of the last prefetch. `begin`, for traces, is the time at which the loader requested
// the first page of the current instruction; 0: not yet.
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
  uint64_t begun;  // traces: when the consumers began the instruction; here, because registers are short
  int32_t traced;  // traces: the number of intervals that the block has recorded
  Sizes dims;
  StepView step;
  int32_t rank, worker, index;  // index: the block's number in its grid
};

template <class P>
using Slot = SlotMemory<typename P::Barrier>;
template <class P>
using Block = BlockMemory<typename P::Barrier>;

// Instruction j of a block uses slot slot_of(j), and waits on its barriers use parity slot_parity(j).
MK_FN constexpr int slot_of(uint32_t j) { return static_cast<int>(j % kSlots); }
MK_FN constexpr uint32_t slot_parity(uint32_t j) { return j / kSlots & 1; }

// Where a page lies in the ring.
struct Page {
  int slot;
  uint32_t
      parity;  // of the phase of the slot's barriers. A loader first waits for `empty` of the phase before
};
MK_FN constexpr Page page_of(uint32_t n) { return {static_cast<int>(n % kRing), n / kRing & 1}; }

static_assert(kStages * kStepPages <= kRing, "the ring must have room for all stages");
MK_FN constexpr Page stage_of(uint32_t n) { return {static_cast<int>(n % kStages), n / kStages & 1}; }

}  // namespace mk
