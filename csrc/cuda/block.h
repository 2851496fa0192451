// Shared memory of a block.
//
// Every page of a launch passes through one ring. Page n of a block, counted from 0 over all of its
// instructions, lies in slot n % kPages, and uses phase n / kPages of the slot's barriers:
//
//   full    both loaders have passed the page, and the bytes that one of them requested have arrived. An
//           output page is full when it may be written
//   ready   output pages only: the consumer warps have written the page
//   empty   all consumer warps have released the page, each when it no longer needs it; the storer releases
//           an output page on behalf of all of them
//
// Which pages an instruction takes, and in which order, is a function of the instruction alone (plan.h), so
// the roles walk the same pages without communicating. No barrier is ever re-initialised, and a wait can
// distinguish a phase only from its neighbours. Both loaders therefore wait until a page is free and then
// arrive at it, whichever of them fills it. So neither is ever more than one lap of the ring ahead of the
// other or of the consumers.
//
// Instruction j of a block uses slot j % kSlots; the slot's barriers complete one phase per instruction:
//
//   fetched  the controller has written the slot's task
//   inputs   the input loader has seen that the instruction's inputs are written
//   loaded   both loaders have requested all of its loads
//   outputs  the consumer warps have issued and fenced all of their stores
//   retired  both loaders, the storer and the consumer warps no longer need the slot
//
// A worker may be two SMs with a block each, which run the same instructions: each block takes its part of an
// instruction's rows, or every second attention item. Page n serves the same purpose in both. A page of
// weights, which both need, is loaded by one of the two for both. A slot is therefore empty when the consumer
// warps of both blocks have released it, and neither ring gets more than one lap ahead of the other. The
// controller of SM 0 serves both blocks: `fetched` exists in each block, `loaded` and `retired` only in SM 0,
// where the roles of both blocks arrive. No block ends before both have finished, because the other one may
// still access its memory.
//
// A wait that lasts too long is recorded in `late` (watchdog.h) and ends the launch.
#pragma once
#include "ops/call.h"

namespace mk {

constexpr int kWarps = kThreads / 32;
static_assert(kConsumerWarp + kConsumerWarps == kWarps);
constexpr int kRetiring = 3 + kConsumerWarps;
constexpr int kSharedPages = kSms > 1 ? kPages : 1;

template <class Barrier>
struct SlotMemory {
  Barrier fetched, inputs, loaded, outputs, retired;
  Task task;
};

// A wait that lasts too long.
struct Late {
  const void* what;  // a barrier of the block, or a counter; null if no wait is too long
  uint32_t parity;   // parity of the barrier's phase
  Where where;
};

template <class Barrier>
struct BlockMemory {
  unsigned char pages[kPages][kPageBytes];  // aligned to 1024 bytes on the device
  Barrier full[kPages], ready[kPages], empty[kPages];
  SlotMemory<Barrier> slots[kSlots];
  Barrier parted;            // the loaders of the worker have finished
  uint32_t passed[kSms][2];  // pages that each loader has passed
  // For the latest page in each slot: the bytes of weights that this block's loader has requested for both
  // blocks; negative if the other block's loader requests them.
  int32_t shared[kSharedPages];
  Late late[kWarps];
  Sizes dims;
  StepView step;
  Scratch scratch;
  int32_t rank, worker, index;  // index: the block's number in its grid
};

template <class P>
using Slot = SlotMemory<typename P::Barrier>;
template <class P>
using Block = BlockMemory<typename P::Barrier>;

// Which SM of its worker a block runs on.
template <class Barrier>
MK_FN int sm_of(const BlockMemory<Barrier>& block) {
  return kSms == 1 ? 0 : block.index % kSms;
}

// The slot of instruction j of a block.
MK_FN constexpr int slot_of(uint32_t j) { return static_cast<int>(j % kSlots); }
MK_FN constexpr uint32_t slot_parity(uint32_t j) { return j / kSlots & 1; }

// Page n of a block.
struct Page {
  int slot;
  uint32_t parity;  // parity of its phases; the preceding phase of `empty` has the other parity
};
MK_FN constexpr Page page_of(uint32_t n) { return {static_cast<int>(n % kPages), n / kPages & 1}; }

// Releases a slot on behalf of `count` consumer warps of the block.
template <class P>
MK_FN void release_page(P& p, Block<P>& block, int slot, int count = 1) {
  p.arrive(block.empty[slot], count);
  if constexpr (kSms > 1) p.arrive_at(1 - sm_of(block), block.empty[slot], count);
}

}  // namespace mk
