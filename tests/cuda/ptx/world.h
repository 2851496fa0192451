// A launch: its grids on one or several GPUs, their blocks, warps and threads, and the order in which these
// run. Each GPU thread is a fibre. Only one runs at a time, until it must wait for others; a seed decides
// which one is next, and when an asynchronous copy happens.
#pragma once
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "../../../csrc/cuda/block.h"
#include "../fibres.h"
#include "../host/tensor_map.h"
#include "clocks.h"
#include "regions.h"

namespace ptx {

using mk::kThreads, mk::kWarps;
constexpr uint32_t kReserved = 1024;  // shared memory below this offset belongs to the system
constexpr uint32_t kSpan = 1 << 18;   // distance between the shared memories of blocks
constexpr int kNamedBarriers = 16;

struct DeviceBarrier {
  uint64_t state;
};
using Memory = mk::BlockMemory<DeviceBarrier>;

using Threads = std::vector<Thread*>;

// An mbarrier. `open` has the accesses that the current phase's arrivals release; `done` has those of all
// earlier phases.
struct Mbarrier {
  uint32_t expected, pending, party = 0;  // 0: no copy has used it yet
  int64_t bytes = 0;
  uint32_t phase = 0;
  Seen open, done;
  Known completed;  // copies of earlier phases
  Access init;
  bool fenced = false;  // whether fence.mbarrier_init has followed
  Threads waiting;
};

struct NamedBarrier {
  uint32_t arrived = 0, threads = 0;
  uint64_t turn = 0;
  Seen seen, done;
  Threads waiting;
};

// A group of a warp's bulk stores: how many have not read shared memory yet, or not written global memory.
struct BulkGroup {
  int unread = 0, unwritten = 0;
};

struct Meeting {
  const char* kind = nullptr;
  int site = 0, arrived = 0;
  void* arguments[kLanes];
};

struct Warp {
  int index;
  Thread* lanes[kLanes];
  Meeting meeting;
  uint32_t party, read_party, write_party, wgmma_party = 0;  // 0: there is none yet
  Thread* storer = nullptr;
  std::vector<BulkGroup> groups{1};  // the last group is not committed yet
  bool wgmma_fenced = false;
  uint32_t wgmma_groups = 0, wgmma_done = 0;  // committed, waited for
  Known multiplications;                      // the accesses of the groups that were waited for
  struct Result {
    float value;
    uint32_t group;
  };
  std::vector<Result> results[kLanes];                          // for each lane, of wgmmas that may still run
  std::vector<std::tuple<int, uint64_t, uint64_t>> multiplied;  // code site and descriptors of each wgmma
};

struct Grid {
  const mk::Params* params;
  mk::Params copy;
  int device, blocks;
};

struct Block {
  Grid* grid;
  uint32_t index;  // in the grid
  char* memory;    // offset 0 of its shared memory
  Warp warps[kWarps];
  std::map<uint32_t, Mbarrier> barriers;  // by offset
  NamedBarrier named[kNamedBarriers];
  std::map<uint64_t, std::vector<Access>> maps;  // for each tensor map, who has acquired it
  int live = kThreads, copies = 0;               // threads that have not ended, and bulk copies in flight
};

struct Party {
  Block* block;
  std::string name;
};

enum class Copies : int32_t { kRandom, kEarly, kLate };

// How a launch runs. The class Schedule of ptx_world.py has the same layout.
struct Schedule {
  uint64_t seed;
  int32_t copies;          // a Copies
  int32_t unfair;          // 0: no; 1: some warps mostly run first; 2: some blocks do
  int32_t races;           // whether to look for races
  int32_t planted;         // the number of the planted fault that is active; 0: none
  uint64_t abort_at;       // the host aborts the launch after this many switches between threads; 0: never
  uint64_t limit;          // the launch fails after this many switches
  const Regions* regions;  // null: accesses are not compared with declarations
};

class World {
 public:
  World(const Schedule& schedule, std::vector<Grid>& grids) : schedule(schedule), grids_(grids) {
    make_blocks();
  }

  // Runs the launch. Returns one line for each thing that went wrong; empty if nothing did.
  std::string run();

  // -- for threads
  uint32_t draw(uint32_t below) {
    random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
    return static_cast<uint32_t>((random_ >> 32) * below >> 32);
  }
  void ready(Thread& thread) {
    thread.waits = "";
    runnable_.push_back(&thread);
  }
  void wake(Threads& waiting) {
    Threads woken;
    woken.swap(waiting);
    for (Thread* thread : woken) ready(*thread);
    if (!woken.empty()) idle_ = 0;
  }
  // Lets others run until something wakes the thread, which must be in a list of waiting threads.
  void block(const char* what) {
    current->waits = what;
    Fibre::pass();
  }
  void yield() {
    ready(*current);
    Fibre::pass();
  }
  void sometimes_yield(uint32_t one_in) {
    if (draw(one_in) == 0) yield();
  }
  void later(std::function<void()> copy) { copies_.push_back(std::move(copy)); }
  void fail(const std::string& text) {
    if (failures_.size() < 40) failures_.insert(text);
  }
  void fail(const Thread& thread, const std::string& text) { fail(name(thread) + ": " + text); }
  std::string name(const Thread& thread) const;
  std::string name(const Access& access, uint32_t lanes) const;

  uint32_t party(Block& block, const std::string& name) {
    parties_.push_back({&block, name});
    return static_cast<uint32_t>(parties_.size() - 1);
  }
  uint32_t party(const Warp& warp, const std::string& part) {
    return party(*parties_[warp.party].block, parties_[warp.party].name + part);
  }
  int32_t task_of(const mk::Where& where);
  bool is_in(mk::Buffer buffer, uint64_t address) const {
    const Region* found =
        schedule.regions ? schedule.regions->buffer_at(static_cast<int64_t>(address)) : nullptr;
    return found && found->kinds == static_cast<int64_t>(buffer);
  }
  // Reports an access to a buffer that the thread's instruction does not declare.
  void check_global(Thread& thread, uint64_t address, uint32_t bytes, bool write);
  // Calls f(part, size) for each part of the `bytes` bytes at `address` for which the thread's instruction
  // declares one of the kinds of access in the mask `kinds`. Returns whether there is such a part.
  template <class F>
  bool for_declared(const Thread& thread, int64_t kinds, uint64_t address, uint32_t bytes, F&& f) const;
  // Records an access, and reports a race if it conflicts with an earlier access that is not known to happen
  // before it. before(access, lane) says whether an earlier access happens before this one.
  template <class Before>
  void touch(const Access& access, Block& block, uint64_t address, uint32_t bytes, Before&& before);
  Block* block_at(uint64_t generic) {
    const uint64_t offset = generic - reinterpret_cast<uint64_t>(memory_);
    return offset < blocks_.size() * uint64_t{kSpan} ? blocks_[offset / kSpan].get() : nullptr;
  }

  const Schedule schedule;
  uint64_t switches = 0;  // between threads, so far
  Thread* current = nullptr;
  uint64_t time = uint64_t{1} << 40;  // nanoseconds
  Threads sleeping;

  // The accesses that a release of an address makes visible to a thread that acquires from it.
  struct Released {
    Order order;
    Block* block;
    Seen seen;
  };
  std::unordered_map<uint64_t, std::vector<Released>> released;

 private:
  std::pair<const Region*, const Region*> declared(const Thread& thread) const;
  void make_blocks();
  void make_threads(Block& block);
  void run_thread(Thread& thread);
  Thread& choose();
  bool pass_time();
  void race(const Access& access, const Access& earlier, uint32_t lanes, uint64_t address);
  void note_ends();

  std::vector<Grid>& grids_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::deque<Thread> threads_;
  std::deque<Fibre> fibres_;
  std::deque<Knowledge> knowledge_;
  char *memory_ = nullptr, *stacks_ = nullptr;
  uint64_t random_ = 0;
  Threads runnable_;
  std::vector<std::function<void()>> copies_;
  int live_ = 0, idle_ = 0;
  std::set<std::string> failures_;
  std::set<std::tuple<int, int, bool, bool>> races_;  // races already reported, by their code sites
  std::vector<Party> parties_;
  std::vector<mk::Where> tasks_{mk::between()};
  std::map<std::tuple<int, int, int>, int32_t> task_numbers_;
  Shadow shadow_;
};

inline World* world = nullptr;

template <class F>
bool World::for_declared(const Thread& t, int64_t kinds, uint64_t address, uint32_t bytes, F&& f) const {
  if (!schedule.regions) return f(address, bytes), true;
  const int64_t from = static_cast<int64_t>(address);
  const int layer = tasks_[static_cast<size_t>(t.task)].layer;
  const auto [begin, end] = declared(t);
  bool any = false;
  for (const Region* region = begin; region != end; ++region) {
    if (!(region->kinds & kinds)) continue;
    const auto [low, high] = region->overlap(from, from + bytes, layer);
    if (low == high) continue;
    any = true;
    f(static_cast<uint64_t>(low), static_cast<uint32_t>(high - low));
  }
  return any;
}

// Whether a scope that a thread of block `a` uses includes the threads of block `b`.
inline bool includes(Scope scope, const Block& a, const Block& b) {
  switch (scope) {
    case kNone:
      return false;
    case kCta:
      return &a == &b;
    case kGpu:
      return a.grid->device == b.grid->device;
    case kSystem:
      return true;
  }
  return false;
}

template <class Before>
void World::touch(const Access& access, Block& block, uint64_t address, uint32_t bytes, Before&& before) {
  if (!schedule.races) return;
  const auto strong = [&](const Access& other) {
    Block& there = *parties_[other.party].block;
    return access.scope != kNone && other.scope != kNone && includes(access.scope, block, there) &&
           includes(other.scope, there, block);
  };
  const auto read_before = [&](const Reader& reader) {
    for (uint32_t left = reader.lanes; left; left &= left - 1)
      if (!before(reader.access, static_cast<uint32_t>(std::countr_zero(left)))) return false;
    return true;
  };
  shadow_.for_cells(address, bytes, [&](Cell& cell) {
    if (cell.write.time && !before(cell.write, cell.write.lane) && !strong(cell.write))
      race(access, cell.write, 1u << cell.write.lane, address);
    if (access.write) {
      const auto check = [&](const Reader& reader) {
        if (reader.access.time && !read_before(reader) && !strong(reader.access))
          race(access, reader.access, reader.lanes, address);
      };
      check(cell.reader);
      if (cell.more)
        for (const Reader& reader : *cell.more) check(reader);
      cell.write = access;
      cell.reader = {};
      if (cell.more) cell.more->clear();  // its memory is used again
      return;
    }
    const auto same = [&](const Access& a) {
      return a.time == access.time && a.party == access.party && a.async == access.async &&
             a.scope == access.scope;
    };
    const auto replaceable = [&](const Reader& r) {
      return r.access.async == access.async && read_before(r);
    };
    const Reader mine{access, 1u << access.lane};
    if (same(cell.reader.access)) {
      cell.reader.lanes |= mine.lanes;
    } else if (!cell.reader.access.time || replaceable(cell.reader)) {
      cell.reader = mine;
    } else {
      if (!cell.more) cell.more = std::make_unique<std::vector<Reader>>();
      for (Reader& reader : *cell.more) {
        if (!same(reader.access)) continue;
        reader.lanes |= mine.lanes;
        return;
      }
      std::erase_if(*cell.more, replaceable);
      cell.more->push_back(mine);
    }
  });
}

}  // namespace ptx
