// The shared memory of a thread block. Instructions load data through a ring (a circular buffer) of kPages
// pages of 16 KiB, and some also store results through it. Page n of a block, counted from 0 over all
// instructions, lies in slot n % kPages of the ring, and uses phase n / kPages of the slot's mbarriers:
//   full    both loader warps have arrived for the page, and the bytes that one of them requested are in it.
//           For an output page, `full` means that the consumer warps may write it
//   ready   output pages only: the consumer warps have written the page
//   empty   all consumer warps have released the page; a warp releases a page when it no longer needs the
//           page, but the storer warp releases an output page on behalf of all consumer warps
//
// Which pages an instruction uses, and in which order, depends on the instruction alone (plan.h). Every role
// (loader, consumer, storer) can therefore list the same pages without communicating.
//
// One loader warp loads weights and another loads inputs. For every page, both wait until it is empty and
// both arrive at its `full` barrier, although only one of them fills it. This keeps each loader within kPages
// pages (the whole ring) of the other loader and of the consumer warps. Without this limit a wait could go
// wrong: it tests only the parity of a barrier's phase, so it would confuse phases that are two apart. No
// barrier is ever re-initialised.
//
// A block works on up to kSlots instructions at once. Instruction j uses the shared-memory slot j % kSlots,
// with its description (the task) and these barriers, which complete one phase per instruction:
//   fetched  the controller warp has written the task (of experts, after it has waited for the counters)
//   inputs   the input loader has seen that the instruction's inputs are written
//   loaded   both loaders have requested all of the instruction's loads
//   outputs  the consumer warps have issued and fenced all of their stores
//   retired  no warp needs the slot any longer (loaders, storer and consumer warps)
//
// With Dims.sms = 2, a worker (which executes one instruction stream) is a pair of SMs with a thread block
// each. Both blocks run the same instructions, but divide each one's rows or attention work items. Both need
// the same pages of weights, so only one block loads such a page, and writes it to the rings of both. A slot
// of the ring is therefore refilled only when the consumer warps of both blocks have released it. The
// controller warp of SM 0 serves both blocks. Each block has its own `fetched` barriers, but `loaded` and
// `retired` exist only in SM 0, where warps of both blocks arrive. Neither block exits before both have
// finished, because until then the other block may access its shared memory.
//
// A wait that lasts a millisecond is recorded in `late` (watchdog.h). A wait that exceeds the timeout aborts
// the launch.
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

// A wait that has lasted a millisecond. The waiting warp records it, to help find the cause of a hang.
struct Late {
  const void* what;  // the barrier or counter that the warp waits for; null if there is no such wait
  uint32_t parity;   // parity of the barrier phase for which the warp waits
  Where where;
};

template <class Barrier>
struct BlockMemory {
  unsigned char pages[kPages][kPageBytes];  // aligned to 1024 bytes on the device
  Barrier full[kPages], ready[kPages], empty[kPages];
  SlotMemory<Barrier> slots[kSlots];
  Barrier parted;            // completes once all loader warps of the worker have finished
  uint32_t passed[kSms][2];  // [SM][loader]: number of pages that the loader had processed when it ended

  // For workers of two SMs, where one SM loads each page of weights for both. Entry s is for the newest page
  // in slot s of the ring: the size of its weights in bytes, negative if the other SM loads them, or 0 if the
  // page has no weights.
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

// Returns which SM of its worker a block runs on.
template <class Barrier>
MK_FN int sm_of(const BlockMemory<Barrier>& block) {
  return kSms == 1 ? 0 : block.index % kSms;
}

// Returns the instruction slot of instruction j of a block; slot_parity returns the parity of its barriers'
// phase.
MK_FN constexpr int slot_of(uint32_t j) { return static_cast<int>(j % kSlots); }
MK_FN constexpr uint32_t slot_parity(uint32_t j) { return j / kSlots & 1; }

// Where a page lies in the ring.
struct Page {
  int slot;
  // The parity of the mbarrier phase that this page uses; it alternates each time the page's slot in the ring
  // is reused. Before a loader fills the page, it waits for the previous phase of the barrier `empty`.
  uint32_t parity;
};
MK_FN constexpr Page page_of(uint32_t n) { return {static_cast<int>(n % kPages), n / kPages & 1}; }

// Tells the loaders that `count` consumer warps of the block no longer need the page in slot `slot` of the
// ring. It arrives `count` times and not once with a count. With two SMs per worker, warps that release the
// slot's next page may already arrive at the other SM's barrier between this warp's two calls. Then the phase
// completes before all of this warp's arrivals, and the rest count for the next phase. A single arrival that
// exceeds its phase would break the barrier.
template <class P>
MK_FN void release_page(P& p, Block<P>& block, int slot, int count = 1) {
  p.arrive(block.empty[slot], count);
  if constexpr (kSms > 1) p.arrive_at(1 - sm_of(block), block.empty[slot], count);
}

}  // namespace mk
