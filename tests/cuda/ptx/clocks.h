// Happens-before by vector clocks, and the last accesses to each byte of memory.
//
// Time is counted per *party*: a warp, an mbarrier (whose time is its phase; asynchronous loads that complete
// on it belong to the phase) or a warp's bulk or wgmma groups. The lanes of a warp share the warp's time but
// are apart until they synchronise: `Clock` knows a party up to a common time and, of a warp, single lanes
// for longer.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "machine.h"

namespace ptx {

constexpr int kLanes = 32;

class Clock {
 public:
  uint32_t common(uint32_t party) const { return party < common_.size() ? common_[party] : 0; }
  bool has(uint32_t party, uint32_t lane, uint32_t time) const {
    if (time <= common(party)) return true;
    const Lanes* lanes = find(party);
    return lanes && time <= lanes->time[lane];
  }
  bool includes(const Clock& other) const {
    for (uint32_t p = 0; p < other.common_.size(); ++p)
      if (common(p) < other.common_[p]) return false;
    for (const Lanes& o : other.lanes_)
      for (uint32_t lane = 0; lane < kLanes; ++lane)
        if (o.time[lane] > o.base && !has(o.party, lane, o.time[lane])) return false;
    return true;
  }
  void include(const Clock& other) {
    if (common_.size() < other.common_.size()) common_.resize(other.common_.size());
    for (uint32_t p = 0; p < other.common_.size(); ++p) common_[p] = std::max(common_[p], other.common_[p]);
    for (const Lanes& o : other.lanes_) {
      Lanes& own = lanes_of(o.party);
      for (uint32_t lane = 0; lane < kLanes; ++lane) own.time[lane] = std::max(own.time[lane], o.time[lane]);
    }
    tidy();
  }
  void include(uint32_t party, uint32_t time) {
    if (common_.size() <= party) common_.resize(party + 1);
    common_[party] = std::max(common_[party], time);
    tidy();
  }
  void include_lane(uint32_t party, uint32_t lane, uint32_t time) {
    lanes_of(party).time[lane] = std::max(lanes_of(party).time[lane], time);
    tidy();
  }

 private:
  struct Lanes {
    uint32_t party, base = 0;
    std::array<uint32_t, kLanes> time{};
  };
  const Lanes* find(uint32_t party) const {
    for (const Lanes& lanes : lanes_)
      if (lanes.party == party) return &lanes;
    return nullptr;
  }
  Lanes& lanes_of(uint32_t party) {
    for (Lanes& lanes : lanes_)
      if (lanes.party == party) return lanes;
    lanes_.push_back({party});
    return lanes_.back();
  }
  // Raises the common times to what is known of all lanes, and forgets lanes of which nothing more is known.
  void tidy() {
    std::erase_if(lanes_, [this](Lanes& lanes) {
      const auto [low, high] = std::minmax_element(lanes.time.begin(), lanes.time.end());
      if (*low > common(lanes.party)) {
        if (common_.size() <= lanes.party) common_.resize(lanes.party + 1);
        common_[lanes.party] = *low;
      }
      lanes.base = common(lanes.party);
      return *high <= lanes.base;
    });
  }

  std::vector<uint32_t> common_;
  std::vector<Lanes> lanes_;
};

// Clocks never change once shared. Null: nothing is known.
using Known = std::shared_ptr<const Clock>;

// Returns what two clocks know together. Threads mostly join the same clocks one after another, so results
// are kept.
inline Known join(const Known& a, const Known& b) {
  if (a == b || !b) return a;
  if (!a) return b;
  struct Kept {
    Known a, b, out;
  };
  static std::array<Kept, 256> kept;
  Kept& entry =
      kept[(reinterpret_cast<uintptr_t>(a.get()) / 16 * 31 + reinterpret_cast<uintptr_t>(b.get()) / 16) %
           kept.size()];
  if (entry.a != a || entry.b != b) {
    Known out = a->includes(*b) ? a : b->includes(*a) ? b : nullptr;
    if (!out) {
      auto both = std::make_shared<Clock>(*a);
      both->include(*b);
      out = both;
    }
    entry = {a, b, out};
  }
  return entry.out;
}

// What happens before a thread's next access. `shared` and `global` are the part that a proxy fence separates
// from it, so that even an asynchronous access to shared or global memory comes later.
struct Seen {
  Known all, shared, global;

  void join(const Seen& other) {
    all = ptx::join(all, other.all);
    shared = ptx::join(shared, other.shared);
    global = ptx::join(global, other.global);
  }
};

inline Known with(const Known& known, uint32_t party, uint32_t time) {
  if (known && known->common(party) >= time) return known;
  auto out = known ? std::make_shared<Clock>(*known) : std::make_shared<Clock>();
  out->include(party, time);
  return out;
}

// What a thread knows, and its place in its warp's time.
struct Knowledge {
  Seen seen;
  uint32_t party, lane;  // its warp, and itself in it
  uint32_t now = 1;      // time of its accesses
  uint32_t synced = 0;   // it knows all accesses of its warp up to this time
  bool touched = false;  // it has made an access at the time `now`

  bool has(uint32_t other, uint32_t other_lane, uint32_t time) const {
    if (other == party && (other_lane == lane || time <= synced)) return true;
    return seen.all && seen.all->has(other, other_lane, time);
  }
  // Returns all that happens before this point, including the thread's own accesses. Later accesses are not
  // in it.
  Known publish() {
    Known out = with(seen.all, party, synced);
    if (!touched && now == synced + 1) return out;
    auto own = std::make_shared<Clock>(*out);
    own->include_lane(party, lane, touched ? now : now - 1);
    if (touched) ++now;
    touched = false;
    return own;
  }
};

// -- the last accesses to memory

struct Access {
  bool write, async;
  Scope scope;  // of a strong access; bulk additions count as strong too
  uint16_t site, task;
  uint32_t party, lane, time;
  bool global;
};

struct Stamp {
  uint32_t time = 0;  // 0: no access
  uint16_t party = 0, site = 0, task = 0;
  uint8_t async : 1 = 0, scope : 3 = 0;
  uint8_t lane = 0;

  Stamp() = default;
  explicit Stamp(const Access& a)
      : time(a.time),
        party(static_cast<uint16_t>(a.party)),
        site(a.site),
        task(a.task),
        async(a.async),
        scope(a.scope),
        lane(static_cast<uint8_t>(a.lane)) {}
};

// A read by the lanes in a mask, at the same time.
struct Reader {
  Stamp stamp;
  uint32_t lanes = 0;
};

// The last write of a byte, and the reads since then that do not happen before one another.
struct Cell {
  Stamp write;
  Reader reader;
  std::unique_ptr<std::vector<Reader>> more;
};

// Cells of all memory. Bytes of a word share a cell until an access touches a part of it.
class Shadow {
 public:
  template <class F>
  void for_cells(uint64_t address, uint32_t bytes, F&& f) {
    const uint64_t end = address + bytes;
    for (uint64_t word = address / 4; word * 4 < end; ++word) {
      Word& w = at(word);
      const bool whole = word * 4 >= address && word * 4 + 4 <= end;
      if (whole && !w.bytes) {
        f(w.cell);
        continue;
      }
      if (!w.bytes) split(w);
      for (uint64_t byte = std::max(address, word * 4); byte < std::min(end, word * 4 + 4); ++byte)
        f((*w.bytes)[byte % 4]);
    }
  }
  void clear() {
    pages_.clear();
    cached_.fill({});
  }

 private:
  struct Word {
    Cell cell;
    std::unique_ptr<std::array<Cell, 4>> bytes;
  };
  static constexpr uint64_t kWords = 256;
  using Words = std::array<Word, kWords>;

  static void split(Word& word) {
    word.bytes = std::make_unique<std::array<Cell, 4>>();
    for (Cell& cell : *word.bytes) {
      cell.write = word.cell.write;
      cell.reader = word.cell.reader;
      if (word.cell.more) cell.more = std::make_unique<std::vector<Reader>>(*word.cell.more);
    }
  }
  Word& at(uint64_t word) {
    const uint64_t page = word / kWords;
    auto& [number, words] = cached_[page % cached_.size()];
    if (!words || number != page) {
      std::unique_ptr<Words>& found = pages_[page];
      if (!found) found = std::make_unique<Words>();
      number = page;
      words = found.get();
    }
    return (*words)[word % kWords];
  }

  std::unordered_map<uint64_t, std::unique_ptr<Words>> pages_;
  std::array<std::pair<uint64_t, Words*>, 1024> cached_{};
};

}  // namespace ptx
