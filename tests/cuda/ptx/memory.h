// Accesses to memory by threads: addresses, memory order, fences and mbarriers.
#pragma once
#include "../../../csrc/cuda/watchdog.h"
#include "world.h"

namespace ptx {

// -- addresses

uint64_t Thread::time() { return world->time += 32; }
uint32_t Thread::shared_memory() const { return kReserved; }
uint64_t Thread::parameters() const { return reinterpret_cast<uint64_t>(&block->grid->copy); }

uint64_t Thread::generic(uint32_t address) { return reinterpret_cast<uint64_t>(block->memory) + address; }

// Returns whether a range lies in the shared memory of the block, and reports an error if it does not.
inline bool check_shared(const Thread& t, uint32_t offset, uint32_t bytes) {
  if (offset >= kReserved && offset + bytes <= kReserved + mk::kSharedBytes) return true;
  world->fail(t, "an address is outside the block's shared memory");
  return false;
}

// -- loads, stores, atomics

inline Access access_at(const Thread& t, bool write, Scope scope, uint32_t party, uint32_t time) {
  Access out;
  out.time = time, out.party = party, out.lane = t.lane;
  out.site = t.site, out.task = t.task;
  out.write = write, out.scope = scope;
  return out;
}
inline Access access_by(const Thread& t, bool write, Scope scope) {
  return access_at(t, write, scope, t.knows->party, t.knows->now);
}

// Whether an address is in `late`, where each warp records the wait that holds it up. The lanes of a warp
// overwrite each other's record. This race does no harm (device.cuh explains why), so it is not reported.
inline bool is_late_record(const Thread& t, uint64_t address) {
  const auto& late = reinterpret_cast<const Memory*>(t.block->memory + kReserved)->late;
  return address - reinterpret_cast<uint64_t>(&late) < sizeof late;
}

// Checks and records an ordinary access of a thread. Returns the address on the host.
inline char* access(Thread& t, uint64_t address, uint32_t bytes, bool write, Scope scope) {
  char* at = reinterpret_cast<char*>(address);
  if (address % bytes) world->fail(t, "a misaligned access to memory");
  if (address - t.parameters() < sizeof(mk::Params)) {
    if (write) world->fail(t, "a store to the kernel's parameters");
    return at;
  }
  if (const Block* owner = world->block_at(address)) {
    const uint32_t offset = static_cast<uint32_t>(at - owner->memory);
    if (!check_shared(t, offset, bytes)) return const_cast<char*>(owner->memory) + kReserved;
    if (owner != t.block) world->fail(t, "an access to another block's shared memory");
    if (owner->barriers.contains(offset & ~7u)) world->fail(t, "an ordinary access to an mbarrier");
    if (owner->live == 0) world->fail(t, "an access to the shared memory of a block that has ended");
  } else {
    world->check_global(t, address, bytes, write);
  }
  if (is_late_record(t, address)) return at;
  t.knows->touched = true;
  world->touch(
      access_by(t, write, scope), *t.block, address, bytes,
      [&t](const Access& earlier, uint32_t lane) { return t.knows->has(earlier.party, lane, earlier.time); });
  return at;
}

inline void acquire(Thread& t, uint64_t address, Order order) {
  const auto found = world->released.find(address);
  if (found == world->released.end()) return;
  for (const World::Released& from : found->second)
    if (includes(order.scope, *t.block, *from.block) && includes(from.order.scope, *from.block, *t.block))
      t.knows->seen.join(from.seen);
}

inline void release(Thread& t, uint64_t address, Order order) {
  Seen seen = t.knows->seen;
  seen.all = t.knows->publish();
  std::vector<World::Released>& all = world->released[address];
  for (World::Released& old : all) {
    // Releases whose scopes include the same threads share an entry.
    if (old.order.scope != order.scope || !includes(order.scope, *t.block, *old.block)) continue;
    old.seen.join(seen);
    return;
  }
  all.push_back({order, t.block, seen});
}

const char* Thread::read(uint64_t address, uint32_t bytes, Order order) {
  if (order.scope != kNone) world->sometimes_yield(8);
  const char* at = access(*this, address, bytes, false, order.scope);
  if (order.kind & kAcquire) acquire(*this, address, order);
  return at;
}

char* Thread::write(uint64_t address, uint32_t bytes, Order order) {
  char* at = access(*this, address, bytes, true, order.scope);
  if (order.scope != kNone) {
    world->released.erase(address);
    if (order.kind & kRelease) release(*this, address, order);
    world->wake(world->sleeping);
  }
  return at;
}

// Atomic operations continue the release sequences of earlier ones.
char* Thread::update(uint64_t address, uint32_t bytes, Order order) {
  world->sometimes_yield(4);
  char* at = access(*this, address, bytes, true, order.scope);
  if (order.kind & kAcquire) acquire(*this, address, order);
  if (order.kind & kRelease) release(*this, address, order);
  world->wake(world->sleeping);
  return at;
}

// -- fences

void Thread::fence_barriers() {
  for (auto& [offset, barrier] : block->barriers)
    if (barrier.init.party == knows->party && barrier.init.lane == lane) barrier.fenced = true;
}

// Proxy fences: every access before the fence happens before the asynchronous accesses after it.
void Thread::fence_shared() { knows->seen.shared = join(knows->seen.shared, knows->publish()); }
void Thread::fence_global() { knows->seen.global = join(knows->seen.global, knows->publish()); }

void Thread::acquire_map(uint64_t map, uint32_t bytes) {
  if (map % 64 || bytes != mk::kMapBytes)
    world->fail(*this, "a fence for something that is not a tensor map");
  knows->touched = true;
  block->maps[map].push_back(access_by(*this, false, kNone));
}

// -- mbarriers

inline Mbarrier& barrier_at(const Thread& t, uint32_t address) {
  static Mbarrier none;
  const auto found = t.block->barriers.find(address);
  if (found == t.block->barriers.end()) {
    world->fail(t, "no mbarrier has been initialised there");
    return none = {};
  }
  Mbarrier& b = found->second;
  if (!t.knows->has(b.init.party, b.init.lane, b.init.time))
    world->fail(t, "nothing orders the mbarrier's use after its initialisation");
  return b;
}

// Completes the barrier's phase if no arrivals and no bytes are missing.
inline void settle(Mbarrier& b) {
  if (b.pending > 0 || b.bytes != 0) return;
  ++b.phase;
  b.pending = b.expected;
  if (b.party) b.completed = with(nullptr, b.party, b.phase);
  b.done.join(b.open);
  b.open = {};
  world->wake(b.waiting);
}

void Thread::init(uint32_t offset, uint32_t arrivals) {
  if (offset % 8 || !check_shared(*this, offset, 8))
    return world->fail(*this, "an mbarrier at an invalid address");
  if (arrivals == 0 || arrivals >= 1u << 20)
    world->fail(*this, "an mbarrier with an invalid number of arrivals");
  if (block->barriers.contains(offset)) world->fail(*this, "an mbarrier is initialised twice");
  Mbarrier& b = block->barriers[offset] = {};
  b.expected = b.pending = arrivals;
  knows->touched = true;
  b.init = access_by(*this, true, kNone);
}

void Thread::arrive(uint32_t address, uint32_t count, uint32_t bytes, bool releases) {
  world->sometimes_yield(8);
  Mbarrier& b = barrier_at(*this, address);
  b.bytes += bytes;
  if (b.bytes >= 1 << 20) world->fail(*this, "an mbarrier expects too many bytes");
  if (count > b.pending) return world->fail(*this, "more arrivals at an mbarrier than its phase has");
  if (releases) {
    Seen own = knows->seen;
    own.all = knows->publish();
    b.open.join(own);
  }
  b.pending -= count;
  settle(b);
}

// If the barrier is `fetched` of an instruction slot, the thread works on the slot's instruction from now on.
inline void note_task(Thread& t, uint32_t offset) {
  const auto& memory = *reinterpret_cast<const Memory*>(t.block->memory + kReserved);
  for (const auto& slot : memory.slots) {
    if (reinterpret_cast<const char*>(&slot.fetched) != t.block->memory + offset) continue;
    t.task = slot.task.end() ? 0 : world->task_of(slot.task.where);
  }
}

// mbarrier.try_wait: waits for the phase with this parity, but not for ever. Returns whether it is complete.
bool Thread::wait(uint32_t address, uint32_t parity, bool acquires) {
  Mbarrier& b = barrier_at(*this, address);
  if (parity > 1) world->fail(*this, "the parity of a phase is neither 0 nor 1");
  if ((b.phase & 1) == parity) {
    if (world->draw(16) == 0) {
      world->yield();
    } else {
      b.waiting.push_back(this);
      world->block("an mbarrier");
    }
    if ((b.phase & 1) == parity) return false;
  }
  knows->seen.all = join(knows->seen.all, b.completed);
  if (acquires) knows->seen.join(b.done);
  note_task(*this, address);
  return true;
}

}  // namespace ptx
