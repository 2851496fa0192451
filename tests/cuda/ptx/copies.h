// Bulk copies, which run asynchronously: a copy is checked when it starts, and performed some time later.
#pragma once
#include "memory.h"

namespace ptx {

// Returns an asynchronous access that thread `t` starts. It is complete once `party` reaches `time`.
inline Access async_access(const Thread& t, bool write, uint32_t party, uint32_t time, bool global,
                           Scope scope = kNone) {
  Access out = access_at(t, write, scope, party, time);
  out.lane = 0, out.async = true, out.global = global;
  return out;
}

// Records an asynchronous access. The only accesses that happen before it are asynchronous ones that have
// completed, and ordinary ones that a proxy fence separates from it.
inline void touch_async(const Thread& t, const Access& access, uint64_t address, uint32_t bytes) {
  const Known& fenced = access.global ? t.knows->seen.global : t.knows->seen.shared;
  world->touch(access, *t.block, address, bytes, [&](const Access& earlier, uint32_t lane) {
    if (earlier.async) return t.knows->has(earlier.party, 0, earlier.time);
    return fenced && fenced->has(earlier.party, lane, earlier.time);
  });
}

constexpr const char* kBulkWait = "bulk stores";

// -- tensor maps

struct Box {
  mk::HostMap map;
  mk::Corner corner{};
};

inline Box box_of(Thread& t, uint64_t address, std::initializer_list<int32_t> at, int dimensions) {
  Box out;
  memcpy(&out.map, reinterpret_cast<const void*>(address), sizeof out.map);
  std::copy(at.begin(), at.end(), out.corner.at);
  const auto& acquired = t.block->maps[address];
  if (std::none_of(acquired.begin(), acquired.end(),
                   [&](const Access& a) { return t.knows->has(a.party, a.lane, a.time); }))
    world->fail(t, "a tensor map is used that the block has not acquired");
  if (!out.map.base || out.map.bytes() == 0 || out.map.item == 0) {
    world->fail(t, "an empty tensor map is used");
    out.map = {};
    return out;
  }
  for (int d = dimensions; d < mk::kMapDimensions; ++d)
    if (out.map.sizes[d] != 1) world->fail(t, "a tensor map has more dimensions than the instruction");
  return out;
}

// Calls f(address, bytes, offset) for each row of the part of a box that lies inside the tensor. `offset` is
// the row's offset in the box's page of shared memory, before the swizzle.
template <class F>
inline void for_rows(const Box& box, F&& f) {
  const mk::HostMap& m = box.map;
  const int32_t begin = std::max(box.corner.at[0], 0),
                end = std::min(box.corner.at[0] + m.box[0], m.sizes[0]);
  if (begin >= end) return;
  const int rows = static_cast<int>(m.bytes()) / m.item / m.box[0];
  for (int row = 0; row < rows; ++row) {
    const char* at = m.base + begin * m.strides[0];
    bool inside = true;
    for (int d = 1, left = row; d < mk::kMapDimensions; left /= m.box[d++]) {
      const int32_t place = box.corner.at[d] + left % m.box[d];
      inside = inside && place >= 0 && place < m.sizes[d];
      at += place * m.strides[d];
    }
    const int32_t place = row * m.box[0] + begin - box.corner.at[0];
    if (inside)
      f(reinterpret_cast<uint64_t>(at), static_cast<uint32_t>((end - begin) * m.item),
        static_cast<uint32_t>(place * m.item));
  }
}

inline void check_page(const Thread& t, uint32_t offset, const mk::HostMap& map) {
  if (offset % (map.swizzled ? 1024 : 128)) world->fail(t, "a box in shared memory is misaligned");
}

// -- loads

inline std::string name_of(const Block& block, uint32_t barrier) {
  static const char* const names[] = {"counter", "full",   "ready",   "empty",  "fetched",
                                      "inputs",  "loaded", "outputs", "retired"};
  const mk::BarrierName name = mk::name_of(*reinterpret_cast<const Memory*>(block.memory + kReserved),
                                           *reinterpret_cast<const DeviceBarrier*>(block.memory + barrier));
  return std::string("barrier ") + names[static_cast<int>(name.what)] + " " + std::to_string(name.slot) +
         " of block " + std::to_string(block.index);
}

// Starts a load into a page. The mbarrier counts the bytes that arrive. sources(f) calls f(address, bytes,
// offset in the page, whether it may be used) for each range to read; fetch(page) copies them.
template <class Sources, class Fetch>
inline void load(Thread& t, uint32_t offset, uint32_t bytes, uint32_t barrier, bool swizzled,
                 Sources&& sources, Fetch&& fetch) {
  if (!check_shared(t, offset, bytes)) return;
  Block* const block = t.block;
  Mbarrier& b = barrier_at(t, barrier);
  if (!b.fenced) world->fail(t, "an mbarrier is used for copies whose initialisation no fence follows");
  if (!b.party) b.party = world->party(*block, "a copy for " + name_of(*block, barrier));
  const auto overwritten = block->barriers.lower_bound(offset);
  if (overwritten != block->barriers.end() && overwritten->first < offset + bytes)
    return world->fail(t, "a bulk copy overwrites an mbarrier");
  char* to = block->memory + offset;
  touch_async(t, async_access(t, true, b.party, b.phase + 1, false), reinterpret_cast<uint64_t>(to), bytes);
  // Memory that the instruction does not declare to read arrives as NaN, because results must not depend on
  // it. V arrives as the largest bf16 number instead, because attention multiplies masked rows of V by 0,
  // and NaN times 0 is NaN.
  std::vector<bool> unused(bytes);
  bool any = false, values = false;
  sources([&](uint64_t from, uint32_t size, uint32_t place, bool used) {
    std::fill_n(unused.begin() + place, size, true);
    if (!used) return;
    any |= world->for_declared(t, kReads | kLoads, from, size, [](uint64_t, uint32_t) {});
    world->for_declared(t, kReads, from, size, [&](uint64_t part, uint32_t length) {
      touch_async(t, async_access(t, false, b.party, b.phase + 1, true), part, length);
    });
    world->for_declared(t, kReads | kUsed, from, size, [&](uint64_t part, uint32_t length) {
      std::fill_n(unused.begin() + place + static_cast<ptrdiff_t>(part - from), length, false);
    });
    values = world->is_in(mk::Buffer::V_CACHE, from);
  });
  if (!any) world->fail(t, "loads memory of which its instruction declares nothing");
  memset(to, 0xFF, bytes);  // NaN until the copy completes
  ++block->copies;
  world->later([=, &b] {
    fetch(to);
    for (uint32_t i = 0; i < bytes; i += 2)
      if (unused[i]) put<uint16_t>(to + (swizzled ? mk::swizzle(i) : i), values ? 0x7F7F : 0x7FFF);
    --block->copies;
    b.bytes -= bytes;
    settle(b);
  });
}

// Whether a row of a box may be used. Each row of keys is an element of a KV head, and boxes are as high as a
// multiple of kBoxRows. So the last box of a head may also have rows of another head or another KV page. The
// instruction may declare these too, but for another attention item.
inline bool in_head(const Thread& t, const Box& box, uint32_t place) {
  if (!world->is_in(mk::Buffer::K_CACHE, reinterpret_cast<uint64_t>(box.map.base))) return true;
  const int head = reinterpret_cast<const mk::Params*>(t.parameters())->dims->head_dim;
  const int row = static_cast<int>(place) / (box.map.box[0] * box.map.item) % box.map.box[1];
  return box.corner.at[1] % head + row < head;
}

void Thread::load_box(uint32_t to, uint64_t map, std::initializer_list<int32_t> at, int dimensions,
                      uint32_t barrier) {
  const Box box = box_of(*this, map, at, dimensions);
  if (!box.map.base) return;
  check_page(*this, to, box.map);
  load(
      *this, to, box.map.bytes(), barrier, box.map.swizzled,
      [&](const auto& each) {
        for_rows(box, [&](uint64_t from, uint32_t size, uint32_t place) {
          each(from, size, place, in_head(*this, box, place));
        });
      },
      [box](char* page) { mk::load_box(page, box.map, box.corner); });
}

void Thread::load_bytes(uint32_t to, uint64_t from, uint32_t bytes, uint32_t barrier) {
  if (to % 16 || from % 16 || bytes % 16 || bytes == 0) return world->fail(*this, "a misaligned bulk copy");
  load(
      *this, to, bytes, barrier, false, [&](const auto& each) { each(from, bytes, 0, true); },
      [=](char* page) { memcpy(page, reinterpret_cast<const void*>(from), bytes); });
}

void Thread::prefetch_box(uint64_t map, std::initializer_list<int32_t> at, int dimensions) {
  box_of(*this, map, at, dimensions);
}

// -- stores

void Thread::store_box(uint64_t map, std::initializer_list<int32_t> at, int dimensions, uint32_t from,
                       bool add) {
  const Box box = box_of(*this, map, at, dimensions);
  if (!box.map.base) return;
  const uint32_t bytes = box.map.bytes();
  check_page(*this, from, box.map);
  if (!check_shared(*this, from, bytes)) return;
  if (add && box.map.item != 4) world->fail(*this, "an addition to elements that are not float32");
  if (warp->storer && warp->storer != this) world->fail(*this, "two lanes of a warp start bulk stores");
  Warp* const w = warp;
  if (!w->storer) {
    w->storer = this;
    w->read_party = world->party(*w, ", source of its bulk stores");
    w->write_party = world->party(*w, ", its bulk stores");
  }
  const size_t group = w->groups.size() - 1;
  const uint32_t time = static_cast<uint32_t>(group + 1);
  char* const page = block->memory + from;
  touch_async(*this, async_access(*this, false, w->read_party, time, false), reinterpret_cast<uint64_t>(page),
              bytes);
  for_rows(box, [&](uint64_t to, uint32_t size, uint32_t) {
    world->check_global(*this, to, size, true);
    touch_async(*this, async_access(*this, true, w->write_party, time, true, add ? kGpu : kNone), to, size);
  });
  ++w->groups[group].unread, ++w->groups[group].unwritten, ++block->copies;
  Thread* const self = this;
  const auto wake = [self] {
    if (self->waits == kBulkWait) world->ready(*self);
  };
  world->later([=] {
    auto read = std::make_shared<std::vector<char>>(page, page + bytes);
    --w->groups[group].unread, --self->block->copies;
    wake();
    world->later([=] {
      (add ? mk::add_box : mk::store_box)(box.map, box.corner, read->data());
      --w->groups[group].unwritten;
      wake();
    });
  });
}

void Thread::commit_bulk() { warp->groups.emplace_back(); }

void Thread::wait_bulk(uint32_t pending, bool read) {
  if (warp->storer != this) return;
  const size_t committed = warp->groups.size() - 1, end = committed - std::min<size_t>(pending, committed);
  const auto complete = [&] {
    return std::all_of(warp->groups.begin(), warp->groups.begin() + static_cast<ptrdiff_t>(end),
                       [read](const BulkGroup& g) { return g.unread == 0 && (read || g.unwritten == 0); });
  };
  while (!complete()) world->block(kBulkWait);
  const uint32_t time = static_cast<uint32_t>(end);
  if (time == 0) return;
  knows->seen.all = with(knows->seen.all, warp->read_party, time);
  if (!read) knows->seen.all = with(knows->seen.all, warp->write_party, time);
}

}  // namespace ptx
