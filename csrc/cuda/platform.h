// The contract between the roles and the machine below them: a class P with one object per warp. The device
// implements it in PTX (device.cuh), the host with fibres and with threads (csrc/host), so that the tests
// run the same roles as the GPU.
//
// All members are warp-collective: every lane calls, one lane acts. On the host a warp has one lane.
//
//   static constexpr int kLanes, kTrace
//   int lane();                              0 .. kLanes - 1
//   int warp();                              0 .. kWarps - 1, in the block
//
//   void forget()                            makes the compiler recompute values derived from lane() and
//                                            warp() from here on, instead of keeping them in registers
//
//   struct Barrier                           lies in shared memory; its phases are numbered from 0, so that
//                                            their parity alternates
//   void init(Barrier&, int arrivals)        is called before sync_block()
//   void sync_block()                        synchronises all warps of the worker's blocks, at their
//                                            beginning and end
//   bool wait(Barrier&, uint32_t parity, const Where&)
//                                            waits until the phase with that parity has completed, then
//                                            acquires at block scope. A new barrier has completed parity 1.
//                                            Returns false if the launch was aborted
//   bool wait_always(Barrier&, parity, const Where& = between())
//                                            does the same, acquires from both blocks of the worker,
//                                            and goes on waiting after an abort. Returns false if
//                                            the phase is still incomplete long after the abort; it
//                                            will then never complete
//   void arrive(Barrier&, int count = 1)     arrives, and releases at block scope what the warp did before
//   void arrive_at(int sm, Barrier&, int count = 1)
//                                            arrives at the corresponding barrier of an SM of the worker.
//                                            That SM may then overwrite what this warp has read
//   void hand_over_at(int sm, Barrier&)      arrives like arrive_at and releases, for both blocks, what the
//                                            warp did before
//   T& at_sm(int sm, T&)                     returns the corresponding object in the shared memory of an SM
//                                            of the worker
//   void expect(Barrier&, uint32_t bytes)    arrives once; the phase also waits for this many bytes of
//                                            loads
//
//   void acquire_map(const TensorMap&)       is called before the block's first copies by the map, and
//                                            before sync_block()
//   void load_tile(void* to, const TensorMap&, int x, int y, int z, Barrier&)
//   void load_tile_for_all(..)               loads a tile to the same place in all blocks of the worker;
//                                            the corresponding barrier of each block counts the bytes
//   void load_columns(void* to, const TensorMap&, int piece, int a, int b, int z, Barrier&)
//   void load_bytes(void* to, const void* from, uint32_t bytes, Barrier&)
//                                            is called by one lane, like the other loads. All loads are
//                                            asynchronous. A tile is a box of kBoxRows rows, or as many as
//                                            its map has, of 128 bytes in the 128-byte swizzle, with zeros
//                                            outside the tensor. Columns are a box of five dimensions that
//                                            is not swizzled; its coordinates are 0, piece, a, b and z.
//                                            Bytes and addresses are multiples of 16
//   void prefetch_columns(const TensorMap&, int piece, int a, int b, int z)
//                                            prefetches into the L2 cache what load_columns would load
//   void store_tile(const TensorMap&, int x, int y, int z, const void* from)
//   void add_tile(..)                        store or add (float32) a tile, asynchronously
//   void commit()                            makes a group of this warp's stores since the last commit
//   void wait_read(int pending)              waits until all but the last `pending` groups have read their
//                                            pages
//   void wait_stores()                       waits until everyone who sees this warp's next actions also
//                                            sees all of its stores
//   void fence_async()                       orders this warp's generic accesses before later asynchronous
//                                            ones
//   void fence_pages()                       does the same for shared memory alone
//
//   bool wait_counters(int n, Scope, const Where&, F need)
//                                            waits until the counters need(0) .. need(n - 1), each a Need,
//                                            are satisfied, then acquires. The lanes divide the counters
//                                            among themselves. Returns false if the launch was aborted. Like
//                                            `wait`, it records a wait that takes a while, and aborts the
//                                            launch if it takes too long (watchdog.h)
//   void signal(int32_t*, int count, Scope)  is called by one lane: adds, and releases what its warp has
//                                            seen
//   int claim(int32_t*, uint32_t base, int end)
//                                            takes the next number of [0, end) from a counter that
//                                            began at `base`; -1 if all are taken
//   int arrive_acq_rel(int32_t*)             adds 1 and returns the value before
//   void sync_warp()                         makes what one lane did before visible to all lanes
//   void consumer_sync()                     synchronises the consumer warps of the block
//   bool aborted()                           polls whether the launch was aborted
//   void reads(const void* page, bool generic), writes(void* page)
//                                            declare that the following code reads the page (generically or
//                                            with tensor cores) or writes it generically. The host checks
//                                            this; the device does nothing
//
//   uint64_t now()                           is the time in ticks of the trace; 0 if kTrace is 0
//   void trace(const Where&, Role, IntervalKind, uint64_t begin)
//                                            records an interval that ends now, if kTrace is not 0
//   void stall(uint64_t ns)                  waits, if kTrace is not 0
//
// After an abort nothing waits for data. Waits return false at once. Every role runs through the instructions
// that the controller has published, without loads, bulk stores or signals, until it meets the end of the
// stream, which the controller publishes too. All warps of a block therefore still meet at the same barriers.
// If one of them does not arrive, or a load never ends, the others wait a while longer and leave.
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

// Describes a tensor to the bulk copy engine or, in tests on the CPU, to its stand-in. The host
// writes it.
struct alignas(64) TensorMap {
  unsigned char bytes[kMapBytes];
};

// How far a signal must be visible, and how far away a wait sees signals: within one grid, or on other
// devices too.
enum class Scope { kGpu, kSystem };

// An instruction of a stream.
struct alignas(16) Where {
  int32_t segment, layer, number;  // number: as in a trace
  int32_t block;                   // the block of counters that it uses
};
MK_FN constexpr Where between() { return {-1, 0, 0, 0}; }  // between two instructions

// A counter that an instruction needs.
struct Need {
  const int32_t* value;  // null: nothing
  uint32_t target;       // satisfied once value - target >= 0
};

}  // namespace mk
