// The interface between the hardware and the code of the warp roles (controller, loaders, consumers, storer):
// a class P with one object per warp. device.cuh implements it in PTX for the GPU. tests/cuda/host implements
// it with fibres (user-space threads), so that tests on the CPU run the same code quickly.
//
// Unless stated otherwise, all lanes of a warp call a function together, and one lane does the work. On the
// host a warp has one lane.
//
//   static constexpr int kLanes, kTrace
//   int lane(), warp(): 0 .. kLanes - 1 in the warp; 0 .. kWarps - 1 in the block
//   void forget(): makes the compiler recompute what it derived from lane() and warp(), from here on
//
// struct Barrier is a barrier in shared memory. Its phases are numbered from 0, so that their parity
// alternates.
//   void init(Barrier&, int arrivals): sets how many arrivals complete a phase; called before
//     sync_block()
//   void sync_block(), consumer_sync(): synchronise all warps of the block, or its consumer warps
//   bool wait(Barrier&, uint32_t parity, const Where&): waits until the phase with that parity has
//     completed, then acquires. For a new barrier, a wait for parity 1 returns at once. Returns false
//     after an abort
//   bool wait(Barrier&, uint32_t parity, const Where&, F idle): calls idle() again and again, and ends also
//     when idle() returns true. wait_always has this form, too
//   bool test(Barrier&, uint32_t parity): returns whether the phase has completed, and then acquires.
//     One lane may call it
//   bool passed(uint32_t& since, uint32_t ns): whether this time has passed since it last returned true
//   bool wait_always(Barrier&, parity, const Where& = between()): waits also after an abort. Returns
//     false if the phase is still incomplete long after the abort, when it can no longer complete
//   void arrive(Barrier&, int count = 1): releases the warp's earlier writes at block scope. The first
//     `count` lanes arrive once each; on the host, the one lane arrives `count` times
//   void expect(Barrier&, uint32_t bytes): arrives once. The phase then also waits for loads of this
//     many bytes
//
// Bulk copies are asynchronous, and one lane starts each. Sizes and addresses are multiples of 16 bytes.
//   void acquire_map(const TensorMap&): makes the map, which the host wrote, visible to bulk copies. It
//     is called before the block's first copies with the map, and before sync_block()
//   void load_tile(void* to, const TensorMap&, int x, int y, int z, Barrier&): loads a box of 128-byte
//     rows with the 128-byte swizzle: kBoxRows rows, or as many as the map says. Elements outside the
//     tensor become zero
//   void load_columns(void* to, const TensorMap&, int piece, int a, int b, int z, Barrier&): loads an
//     unswizzled box of five dimensions, whose coordinates are 0, piece, a, b and z
//   void prefetch_columns(const TensorMap&, int piece, int a, int b, int z): .. into the L2 cache
//   void load_bytes(void* to, const void* from, uint32_t bytes, Barrier&)
//   void store_tile(const TensorMap&, int x, int y, int z, const void* from, bool add): stores a tile, or
//     adds it (float32) to memory
//   void wait_read(): waits until all of this warp's stores have read their pages
//   void wait_stores(): waits until the warp's stores are visible to any thread that sees what it does
//     next
//   void fence_async(): orders this warp's ordinary accesses (generic proxy) before later asynchronous
//     ones (async proxy); fence_pages() does so only for shared memory
//
//   bool wait_counters(int n, Scope, const Where&, F need): waits until the counters need(0) to
//     need(n - 1), each a Need, have reached their targets, then acquires. The lanes divide the
//     counters among themselves. Returns false after an abort. Like `wait`, it records a wait of over a
//     millisecond, and aborts the launch if the wait exceeds the time limit (watchdog.h)
//   void signal(int32_t*, int count, Scope): adds `count` to a counter, and releases all that the warp
//     has written or observed. One lane calls it
//   int claim(int32_t*, uint32_t base, int end): takes the next number in [0, end) from a counter whose
//     value was `base` before the launch; returns -1 if all numbers are taken
//   int arrive_acq_rel(int32_t*): adds 1 with acquire and release, and returns the previous value
//   bool all(bool): returns whether all lanes pass true
//   void sync_warp(): makes earlier writes of one lane visible to all lanes
//   bool aborted(): polls whether the launch was aborted
//
//   uint64_t now(): returns the time in ticks of the trace, or 0 if kTrace is 0
//   void trace(const Where&, Role, IntervalKind, uint64_t begin): records an interval that ends now, if
//     kTrace is not 0
//
// After an abort, waits for data return false at once. The warps still go through all instructions that the
// controller has handed to them, so that they meet at the same barriers, but do no loads, bulk stores or
// signals. If a warp or a load never arrives at a barrier, the others exit after a time limit.
#pragma once
#include "arithmetic.h"
#include "launch.h"

namespace mk {

// The options of a build (megakernel/runtime/cuda/compile.py). Without them, as on the CPU, a build has
// all code, and Dims.units decides whether matmuls use CUDA cores or tensor cores.
#ifndef MK_UNITS
#define MK_UNITS 0
#define MK_EXPERTS 1
#define MK_WIDE 1
#define MK_ABLATION 0
#endif
constexpr Units kUnits = static_cast<Units>(MK_UNITS);

// Whether the build has the code for layers with experts, and for attention sinks, which only models
// with experts have. Without this code, the controller hands over every instruction faster.
constexpr bool kHasExperts = MK_EXPERTS;

// Whether the build has the code for wide norms and heads, rounding without a norm, caps of scores and
// logits, and scales of heads after RoPE. Wide norms cover all heads of q or of k, and wide heads have
// over kHeadPart elements. Few models need this code, and builds without it need fewer registers.
constexpr bool kWide = MK_WIDE;

// The work that a build for benchmarks leaves out (params.h). The results of such a build are meaningless, so
// instructions also do not wait for each other's results.
constexpr Ablation kAblation = static_cast<Ablation>(MK_ABLATION);

// A build for one row has the sizes of one model as constants (isa.h).
// It has no code for several rows or ranks, or for features that the model does not use.
#if defined(MK_ONE_ROW)
constexpr bool kBiases = MK_BIASES, kHeadNorms = MK_HEAD_NORMS;
constexpr int kMostHidden = MK_SIZE_HIDDEN, kMostGroup = MK_SIZE_HEADS / MK_SIZE_KV_HEADS;
constexpr int kMostInner = higher_of(kMostHidden, higher_of(MK_SIZE_FFN, MK_SIZE_HEADS* MK_SIZE_HEAD_DIM));
#else
constexpr bool kBiases = true, kHeadNorms = true;
constexpr int kMostHidden = 8192, kMostGroup = kQueryTile, kMostInner = 0;
#endif
// The number of pages in the ring. A build for one row has one page less. It keeps all input rows of matmuls
// outside the ring, in the first kCopyBytes of Scratch.
constexpr int kRing = kOneRow ? kRowPages : kPages, kRowBytes = kNormBytes + (kPages - kRing) * kPageBytes;
// Whether the consumer warps share the work on each attention tile. One token row has few tiles.
constexpr bool kTogether = kOneRow && !kWide;

// An encoded tensor map, which describes a tensor in global memory to the bulk copy engine (TMA) or, in tests
// on the CPU, to the code that emulates the engine. The host writes it.
struct alignas(64) TensorMap {
  unsigned char bytes[kMapBytes];
};

// The memory scope of signals and of waits: kGpu if all ranks of the program run in this grid, kSystem if
// other devices take part.
enum class Scope { kGpu, kSystem };

// The position of an instruction in the program.
struct alignas(16) Where {
  int32_t segment, layer, number;  // number: index of the instruction's record, as in a trace

  // Index of the instruction's block of counters. There is one for each layer, and one for the epilogue.
  int32_t block;
};
MK_FN constexpr Where between() { return {-1, 0, 0, 0}; }  // between two instructions

// A counter for which an instruction waits, and the value that it must reach.
struct Need {
  const int32_t* value;  // null: no wait
  uint32_t target;       // the wait is over once *value - target >= 0, as signed 32-bit
};

}  // namespace mk
