// Shared memory of a block.
//
// Every page of a launch passes through one ring: page n of a block, counted from 0 over all of its instructions, lies
// in slot n % kPages, and phase n / kPages of the slot's barriers is the page's:
//
//   full    whoever fills the page: one arrival, and the bytes of its loads. Of an output page the weight loader
//           arrives at once: it may be written
//   ready   output pages only: the consumer warps have written it
//   empty   all consumer warps, each when it needs the page no more; of an output page the storer, for all of them
//
// Which pages an instruction takes, and in which order, is a function of the instruction alone (plan.h), so the roles
// walk the same pages without a word. Nothing is ever re-initialised. A barrier tells two neighbouring phases apart,
// no more: so every role that fills or frees pages waits for each page before, also where another role fills it.
//
// Instruction j of a block has slot j % kSlots; its barriers complete one phase per instruction:
//
//   fetched  the controller: the slot's task is there
//   inputs   the input loader: what the instruction reads has been written
//   outputs  the consumer warps: all their stores have been issued, and fenced
//   retired  both loaders, the storer and the consumer warps: the slot may be written again
#pragma once
#include "../common/record.h"
#include "ops/call.h"
#include "platform.h"

namespace mk {

constexpr int kSlots = 4;
constexpr int kWarps = kThreads / 32;
constexpr int kConsumerWarp = kWarps - kConsumerWarps;  // the first of them
enum : int { kControllerWarp, kWeightWarp, kStorerWarp, kInputWarp };
constexpr int kRetiring = 3 + kConsumerWarps;

struct Task {
  int32_t record[kWords];
  Where where;

  MK_FN int opcode() const { return record_opcode(record); }
  MK_FN bool is(Opcode other) const { return opcode() == static_cast<int32_t>(other); }
  MK_FN bool end() const { return record[0] == 0; }  // no instruction: the stream has ended
};

template <class P>
struct Slot {
  typename P::Barrier fetched, inputs, outputs, retired;
  Task task;
};

// What a loader has filled: its pages up to `page`, and of each slot whether its last page before that was its own.
struct Filled {
  uint32_t page = 0, mine = 0;

  MK_FN void pass(int slot, bool own) {
    mine = own ? mine | 1u << slot : mine & ~(1u << slot);
    ++page;
  }
  // Number of the last page in the slot that it has filled; 0 where none, else one more.
  MK_FN uint32_t last(int slot) const {
    return mine >> slot & 1 ? page - (page - 1 - slot) % kPages : 0;
  }
};

template <class P>
struct alignas(1024) Block {
  unsigned char pages[kPages][kPageBytes];
  typename P::Barrier full[kPages], ready[kPages], empty[kPages];
  Slot<P> slots[kSlots];
  typename P::Barrier parted;  // both loaders have come to their end
  Filled filled[2];
  Dims dims;
  StepView step;
  Scratch scratch;
  int32_t rank, worker, index;  // index: of the block in its grid
};

// Instruction j of a block, as its roles reach it.
MK_FN constexpr int slot_of(uint32_t j) { return static_cast<int>(j % kSlots); }
MK_FN constexpr uint32_t slot_parity(uint32_t j) { return j / kSlots & 1; }

// Page n of a block.
struct Page {
  int slot;
  uint32_t parity;  // of its phases; of the phase of `empty` before it, the other
};
MK_FN constexpr Page page_of(uint32_t n) { return {static_cast<int>(n % kPages), n / kPages & 1}; }

}  // namespace mk
