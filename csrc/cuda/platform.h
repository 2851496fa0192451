// What the roles ask of the machine below them: a class P, one object per warp. The device implements it by
// PTX (device.cuh), the host by fibres and by threads (csrc/host), so that the roles that run are the roles
// that are tested.
//
// All members are warp-collective: every lane calls, one lane acts. A warp of the host has one lane.
//
//   static constexpr int kLanes, kTrace
//   int lane();                              0 .. kLanes - 1
//   int warp();                              0 .. kWarps - 1, of the block
//
//   void forget()                            what follows from lane() and warp() is worked out anew from here
//                                            on, not kept in registers that other instructions need
//
//   struct Barrier                           in shared memory; phases count from 0 and alternate in parity
//   void init(Barrier&, int arrivals)        before sync_block()
//   void sync_block()                        all warps of the worker's blocks, at their begin and end
//   bool wait(Barrier&, uint32_t parity, const Where&)
//                                            until the phase of that parity has completed, then acquires
//                                            (block). A fresh barrier counts as past parity 1. False: the
//                                            launch was aborted
//   bool wait_always(Barrier&, parity, const Where& = between())
//                                            the same (both blocks), whether aborted or not; false: long
//                                            after an abort it has not completed, and never will
//   void arrive(Barrier&, int count = 1)     releases (block) what the warp did before
//   void arrive_at(int sm, Barrier&, int count = 1)
//                                            the same at the barrier of that place in the block of an SM of
//                                            the worker: what the warp has read may be written again from
//                                            there
//   void hand_over_at(int sm, Barrier&)      arrives there; releases (both blocks) what the warp did before
//   T& at_sm(int sm, T&)                     what lies at that place of shared memory in that block
//   void expect(Barrier&, uint32_t bytes)    arrives once, and the phase waits for so many bytes of loads
//
//   void acquire_map(const TensorMap&)       before the block's first copies by it, and sync_block()
//   void load_tile(void* to, const TensorMap&, int x, int y, int z, Barrier&)
//   void load_tile_for_all(..)               a tile to the same place in all blocks of the worker, whose
//   barriers
//                                            of that place each get its bytes
//   void load_columns(void* to, const TensorMap&, int piece, int a, int b, int z, Barrier&)
//   void load_bytes(void* to, const void* from, uint32_t bytes, Barrier&)
//                                            of one lane, asynchronous. A tile is a box of rows of 128 bytes,
//                                            kBoxRows or as its map has them, in the 128-byte swizzle, zero
//                                            outside the tensor, as columns are: the coordinates of their box
//                                            behind the first, which is 0; bytes are a multiple of 16, so are
//                                            addresses
//   void prefetch_columns(const TensorMap&, int piece, int a, int b, int z)
//                                            what load_columns will load, into the last shared cache
//   void store_tile(const TensorMap&, int x, int y, int z, const void* from)
//   void add_tile(..)                        the same, float32 +=; asynchronous, until
//   void commit()                            what this warp has stored since the last is a group
//   void wait_read(int pending)              all but the last `pending` groups have read their pages
//   void wait_stores()                       all stores of this warp can be seen by all who see what it
//                                            does next
//   void fence_async()                       this warp's generic accesses before later asynchronous ones
//   void fence_pages()                       the same of shared memory alone
//
//                                            Both note what they wait for when it takes a while, and abort a
//                                            launch that keeps them waiting for too long (watchdog.h)
//   bool wait_counters(int n, Scope, const Where&, F need)
//                                            until the counters of need(0 .. n - 1) hold (each a Need; lanes
//                                            share them), then acquires once (scope). False: aborted, by
//                                            itself too when it takes too long
//   void signal(int32_t*, int count, Scope)  of one lane: adds, after all that its warp has seen (release)
//   int claim(int32_t*, uint32_t base, int end)
//                                            takes the next of [0, end), counted from `base`; -1: all are
//                                            taken
//   int arrive_acq_rel(int32_t*)             adds 1, gives the value before
//   void sync_warp()                         what one lane did before, all lanes see
//   void consumer_sync()                     the consumer warps of the block
//   bool aborted()                           polls
//   void reads(const void* page, bool generic), writes(void* page)
//                                            what follows reads the page (generically or by tensor cores),
//                                            writes it generically: the host checks it, nothing on the device
//
//   uint64_t now()                           ticks of the trace, 0 where kTrace is 0
//   void trace(const Where&, Role, IntervalKind, uint64_t begin)     an interval that ends now
//   void stall(uint64_t ns)                  both only where kTrace is not 0
//
// After an abort nothing waits for data: waits return false at once, and every role runs through what the
// controller had published, without loads, bulk stores and signals, up to the end that the controller
// publishes. So all warps of a block still meet at the same barriers. Where one of them does not come, or a
// load never ends, the others wait a while longer, and leave.
#pragma once
#include "arithmetic.h"
#include "params.h"

namespace mk {

// SMs of a worker: two are neighbours in the grid and form a cluster (block.h). -DMK_SMS builds for programs
// with this Dims.sms.
#if defined(MK_SMS)
constexpr int kSms = MK_SMS;
#else
constexpr int kSms = 1;
#endif

// Written by the host for the bulk copy engine or for its stand-in.
struct alignas(64) TensorMap {
  unsigned char bytes[kMapBytes];
};

// Who must see a signal or be seen by a wait: the ranks of one grid, or other devices too.
enum class Scope { kGpu, kSystem };

// An instruction of a stream.
struct alignas(16) Where {
  int32_t segment, layer, number;  // number: as in a trace
  int32_t block;                   // of counters
};
MK_FN constexpr Where between() { return {-1, 0, 0, 0}; }  // two instructions

// A counter that an instruction needs.
struct Need {
  const int32_t* value;  // null: nothing
  uint32_t target;       // satisfied once value - target >= 0
};

}  // namespace mk
