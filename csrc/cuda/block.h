// Shared memory of a block.
//
// Every page of a launch passes through one ring: page n of a block, counted from 0 over all of its
// instructions, lies in slot n % kPages, and phase n / kPages of the slot's barriers is the page's:
//
//   full    both loaders, each as it comes by, and the bytes of the loads of the one that fills the page.
//           Of an output page: it may be written
//   ready   output pages only: the consumer warps have written it
//   empty   all consumer warps, each when it needs the page no more; of an output page the storer, for all
//           of them
//
// Which pages an instruction takes, and in which order, is a function of the instruction alone (plan.h), so
// the roles walk the same pages without a word. Nothing is ever re-initialised. A barrier tells two
// neighbouring phases apart, no more: so both loaders wait for every page to be free and arrive at it,
// whoever fills it, and neither is ever more than a lap ahead of the other or of the consumers.
//
// Instruction j of a block has slot j % kSlots; its barriers complete one phase per instruction:
//
//   fetched  the controller: the slot's task is there
//   inputs   the input loader: what the instruction reads has been written
//   loaded   both loaders: all its loads have been asked for
//   outputs  the consumer warps: all their stores have been issued, and fenced
//   retired  both loaders, the storer and the consumer warps: the slot may be written again
//
// A worker may be two SMs, each with a block, which run the same instructions: each takes its part of an
// instruction's rows, of attention every other item. Page n is for the same in both. Of weights, which both
// need, one of them loads page n for both, so a slot is empty when the consumer warps of both blocks have
// released it, and neither ring gets more than a lap ahead of the other. The controller of SM 0 serves both:
// `fetched` is arrived at in each block, `loaded` and `retired` are of SM 0, where all roles of both arrive.
// No block ends before both have come to their end, since the other may still reach into it.
//
// A wait that lasts too long is noted in `late` (watchdog.h), and ends the launch.
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
  const void* what;  // a barrier of the block, or a counter; null: none does
  uint32_t parity;   // of the barrier's phase
  Where where;
};

template <class Barrier>
struct BlockMemory {
  unsigned char pages[kPages][kPageBytes];  // on the device at multiples of 1024 bytes
  Barrier full[kPages], ready[kPages], empty[kPages];
  SlotMemory<Barrier> slots[kSlots];
  Barrier parted;                // the loaders of the worker have come to their end
  uint32_t passed[kSms][2];      // pages that they have come by
  int32_t shared[kSharedPages];  // of the last page in each slot: bytes of weights for both blocks that this
                                 // one has asked for; negative: that the other one asks for
  Late late[kWarps];
  Sizes dims;
  StepView step;
  Scratch scratch;
  int32_t rank, worker, index;  // index: of the block in its grid
};

template <class P>
using Slot = SlotMemory<typename P::Barrier>;
template <class P>
using Block = BlockMemory<typename P::Barrier>;

// Which SM of its worker a block is.
template <class Barrier>
MK_FN int sm_of(const BlockMemory<Barrier>& block) {
  return kSms == 1 ? 0 : block.index % kSms;
}

// Instruction j of a block, as its roles reach it.
MK_FN constexpr int slot_of(uint32_t j) { return static_cast<int>(j % kSlots); }
MK_FN constexpr uint32_t slot_parity(uint32_t j) { return j / kSlots & 1; }

// Page n of a block.
struct Page {
  int slot;
  uint32_t parity;  // of its phases; of the phase of `empty` before it, the other
};
MK_FN constexpr Page page_of(uint32_t n) { return {static_cast<int>(n % kPages), n / kPages & 1}; }

// A block needs the page in a slot no more, as far as `count` of its consumer warps are concerned.
template <class P>
MK_FN void release_page(P& p, Block<P>& block, int slot, int count = 1) {
  p.arrive(block.empty[slot], count);
  if constexpr (kSms > 1) p.arrive_at(1 - sm_of(block), block.empty[slot], count);
}

}  // namespace mk
