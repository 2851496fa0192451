// What the threads of a warp or block do together: warp-wide exchanges, barriers, clock.
#pragma once
#include "world.h"

namespace ptx {

// Waits until all lanes of the warp have executed an instruction of this kind. The last lane to come calls
// together(arguments), where arguments[lane] is `mine` of that lane. If `aligned`, all lanes must execute the
// instruction at the same place in the code.
template <class Arguments, class F>
inline void meet(Thread& t, const char* kind, bool aligned, Arguments& mine, F&& together) {
  Meeting& m = t.warp->meeting;
  if (m.arrived == 0) {
    m.kind = kind, m.site = t.site;
  } else if (m.kind != kind) {
    world->fail(t, std::string("a lane comes to ") + kind + " while others of its warp are at " + m.kind +
                       ", " + kSites[m.site]);
  } else if (aligned && m.site != t.site) {
    world->fail(t, std::string("lanes execute ") + kind + " at different places, also at " + kSites[m.site]);
  }
  m.arguments[t.lane] = &mine;
  if (++m.arrived < kLanes) return world->block(kind);
  m.arrived = 0;
  Arguments* all[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) all[lane] = static_cast<Arguments*>(m.arguments[lane]);
  together(all);
  for (Thread* lane : t.warp->lanes)
    if (lane != &t) world->ready(*lane);
  world->sometimes_yield(4);
}

inline void check_mask(const Thread& t, uint32_t mask) {
  if (mask != 0xFFFFFFFF) world->fail(t, "only full masks of lanes are supported");
}

// Orders everything that the lanes of a warp have done or seen before everything that they do next.
inline void synchronise(Warp& warp) {
  uint32_t now = 0;
  Seen seen = warp.lanes[0]->knows->seen;
  for (const Thread* lane : warp.lanes) {
    now = std::max(now, lane->knows->now);
    seen.join(lane->knows->seen);
  }
  const bool used = std::any_of(std::begin(warp.lanes), std::end(warp.lanes), [&](const Thread* lane) {
    return lane->knows->touched || lane->knows->now != lane->knows->synced + 1;
  });
  if (used) seen.all = with(seen.all, warp.party, now);
  for (Thread* lane : warp.lanes) {
    Knowledge& k = *lane->knows;
    k.seen = seen;
    if (used) k.synced = now, k.now = now + 1, k.touched = false;
  }
}

Shuffled Thread::shuffle(bool butterfly, uint32_t value, uint32_t b, uint32_t c, uint32_t mask) {
  check_mask(*this, mask);
  struct {
    uint32_t value, source;
    Shuffled got;
  } mine{value, 0, {}};
  const uint32_t segment = c >> 8 & 31, clamp = c & 31, most = (lane & segment) | (clamp & ~segment);
  mine.source = butterfly ? lane ^ (b & 31) : (lane & segment) | (b & 31 & ~segment);
  mine.got.ok = mine.source <= most;
  if (!mine.got.ok) mine.source = lane;
  meet(*this, butterfly ? "shfl.bfly" : "shfl.idx", false, mine, [](auto all) {
    for (int i = 0; i < kLanes; ++i) all[i]->got.value = all[all[i]->source]->value;
  });
  return mine.got;
}

uint32_t Thread::ballot(bool value, uint32_t mask) {
  check_mask(*this, mask);
  uint32_t bits = value;
  meet(*this, "vote", false, bits, [](uint32_t** all) {
    uint32_t every = 0;
    for (int i = 0; i < kLanes; ++i) every |= *all[i] << i;
    for (int i = 0; i < kLanes; ++i) *all[i] = every;
  });
  return bits;
}

void Thread::sync_warp(uint32_t mask) {
  check_mask(*this, mask);
  meet(*this, "bar.warp.sync", false, mask, [this](auto) { synchronise(*warp); });
}

// bar.sync is barrier.sync.aligned: the lanes of a warp arrive together.
void Thread::barrier(uint32_t index, uint32_t threads) {
  if (index >= kNamedBarriers || threads % kLanes) return world->fail(*this, "no such barrier");
  if (threads == 0) threads = kThreads;
  NamedBarrier& b = block->named[index];
  uint64_t turn = 0;
  meet(*this, "bar.sync", true, turn, [&](uint64_t** all) {
    synchronise(*warp);
    if (b.arrived > 0 && b.threads != threads)
      world->fail(*this, "warps pass different numbers of threads to a barrier");
    b.threads = threads;
    b.seen.join(knows->seen);
    for (int i = 0; i < kLanes; ++i) *all[i] = b.turn;
    if ((b.arrived += kLanes) < threads) return;
    b.done = b.seen;
    b.seen = {};
    b.arrived = 0;
    ++b.turn;
    world->wake(b.waiting);
  });
  while (b.turn == turn) {
    b.waiting.push_back(this);
    world->block("bar.sync");
  }
  knows->seen.join(b.done);
}

// A thread that reads the wall clock is waiting for a counter, so it sleeps until a counter changes.
uint64_t Thread::wall_time() {
  world->sleeping.push_back(this);
  world->block("a change of a counter");
  return world->time += 32;
}

}  // namespace ptx
