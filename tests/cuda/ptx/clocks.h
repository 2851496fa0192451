// Finds races: vector clocks say which access happens before which other, and `Shadow` has the last accesses
// to each byte of memory.
//
// Time is counted separately for each *party*. A party is a warp, an mbarrier, or the groups of a warp's bulk
// stores or wgmmas. The time of an mbarrier is its phase; asynchronous loads that complete on the mbarrier
// belong to it. A `Clock` is a set of accesses that have happened: for each party, all accesses up to a time.
// For a warp, a clock may also have later accesses of some lanes.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <array>
#include <compare>
#include <deque>
#include <iterator>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "machine.h"

namespace ptx {

constexpr int kLanes = 32;

class Clock {
 public:
  bool has(uint32_t party, uint32_t lane, uint32_t time) const {
    if (party < common_.size() && time <= common_[party]) return true;
    const Later wanted{party * kLanes + lane, time};
    const auto found = std::lower_bound(later_.begin(), later_.end(), wanted);
    return found != later_.end() && found->thread == wanted.thread;
  }
  bool includes(const Clock& other) const {
    const size_t both = std::min(common_.size(), other.common_.size());
    // The loops do not end early, so that the compiler makes vector instructions of them.
    bool misses = false;
    for (size_t p = 0; p < both; ++p) misses |= common_[p] < other.common_[p];
    for (size_t p = both; p < other.common_.size(); ++p) misses |= other.common_[p] > 0;
    return !misses && std::all_of(other.later_.begin(), other.later_.end(), [this](const Later& o) {
      return has(o.thread / kLanes, o.thread % kLanes, o.time);
    });
  }
  void include(const Clock& other) {
    if (common_.size() < other.common_.size()) common_.resize(other.common_.size());
    for (size_t p = 0; p < other.common_.size(); ++p) common_[p] = std::max(common_[p], other.common_[p]);
    add(other.later_);
  }
  void include(uint32_t party, uint32_t time) {
    if (common_.size() <= party) common_.resize(party + 1);
    common_[party] = std::max(common_[party], time);
    add({});
  }
  void include_lane(uint32_t party, uint32_t lane, uint32_t time) { add({{party * kLanes + lane, time}}); }

 private:
  struct Later {
    uint32_t thread, time;
    auto operator<=>(const Later&) const = default;
  };
  // Adds accesses of single lanes. Drops those that are no news.
  void add(const std::vector<Later>& others) {
    std::vector<Later> all;
    all.reserve(later_.size() + others.size());
    std::merge(later_.begin(), later_.end(), others.begin(), others.end(), std::back_inserter(all));
    later_.clear();
    for (size_t i = 0; i < all.size(); ++i) {
      const uint32_t party = all[i].thread / kLanes;
      const bool last = i + 1 == all.size() || all[i + 1].thread != all[i].thread;
      if (last && (party >= common_.size() || all[i].time > common_[party])) later_.push_back(all[i]);
    }
  }

  std::vector<uint32_t> common_;  // by party
  std::vector<Later> later_;      // in order, one for each lane
};

// A clock that several threads share, and which therefore never changes. Null: it includes no access.
using Known = std::shared_ptr<const Clock>;

// Returns a clock that includes all accesses of two clocks. Results are cached, because many threads join the
// same two clocks one after another.
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

// The accesses that happen before a thread's next access. `all` applies if the next access is an ordinary
// one. Only accesses before a proxy fence happen before an asynchronous access: `shared` applies if it is to
// shared memory, and `global` if it is to global memory.
struct Seen {
  Known all, shared, global;

  void join(const Seen& other) {
    all = ptx::join(all, other.all);
    shared = ptx::join(shared, other.shared);
    global = ptx::join(global, other.global);
  }
};

inline Known with(const Known& known, uint32_t party, uint32_t time) {
  auto out = known ? std::make_shared<Clock>(*known) : std::make_shared<Clock>();
  out->include(party, time);
  return out;
}

// The accesses that happen before a thread's next one, and the thread's place in the time of its warp.
struct Knowledge {
  Seen seen;
  uint32_t party, lane;  // of the warp, and of the thread
  uint32_t now = 1;      // time of the thread's accesses
  uint32_t synced = 0;   // `seen` includes all accesses of the warp up to this time
  bool touched = false;  // whether the thread has made an access at the time `now`

  bool has(uint32_t other, uint32_t other_lane, uint32_t time) const {
    if (other == party && (other_lane == lane || time <= synced)) return true;
    return seen.all && seen.all->has(other, other_lane, time);
  }
  // Returns a clock of all accesses before this point, also the thread's own, but none of its later ones.
  Known publish() {
    if (!touched && now == synced + 1) return seen.all;
    auto own = seen.all ? std::make_shared<Clock>(*seen.all) : std::make_shared<Clock>();
    own->include_lane(party, lane, touched ? now : now - 1);
    if (touched) ++now;
    touched = false;
    return own;
  }
};

// -- the last accesses to memory

struct Access {
  uint32_t time = 0;  // 0: no access
  uint16_t party = 0, site = 0, task = 0;
  uint8_t lane = 0;
  bool write : 1 = false, async : 1 = false, global : 1 = false;
  Scope scope : 4 = kNone;  // kNone: a weak access. Bulk additions count as strong accesses.
};

// Reads that several lanes of a warp make at the same time. `lanes` is a bit mask.
struct Reader {
  Access access;
  uint32_t lanes = 0;
};

// The last write of a byte, and the reads since then, except those that happen before another of the reads.
struct Cell {
  Access write;
  Reader reader;
  std::unique_ptr<std::vector<Reader>> more;
};

// The cells of all memory. The bytes of a 32-bit word share a cell until an access touches only some of them.
class Shadow {
 public:
  template <class F>
  void for_cells(uint64_t address, uint32_t bytes, F&& f) {
    const uint64_t end = address + bytes;
    Words* words = nullptr;
    for (uint64_t word = address / 4; word * 4 < end; ++word) {
      if (!words || word % kWords == 0) words = &page_of(word);
      Word& w = (*words)[word % kWords];
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
  Words& page_of(uint64_t word) {
    const uint64_t page = word / kWords;
    auto& [number, words] = cached_[page % cached_.size()];
    if (!words || number != page) {
      std::unique_ptr<Words>& found = pages_[page];
      if (!found) found = std::make_unique<Words>();
      number = page;
      words = found.get();
    }
    return *words;
  }

  std::unordered_map<uint64_t, std::unique_ptr<Words>> pages_;
  std::array<std::pair<uint64_t, Words*>, 1024> cached_{};
};

}  // namespace ptx
