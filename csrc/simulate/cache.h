// Simulates the last-level cache of one rank (a GPU, or a group of CPU cores). An entry of the simulated
// cache is not a cache line but a larger piece of data, such as a weight tile.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace mk::simulate {

// Approximates an LRU cache. An entry is evicted when, since its last use, more bytes than the capacity have
// entered the cache. The parameter `filled` of all methods is the total of bytes that have entered so far.
class Cache {
 public:
  // `capacity`: size of the cache in bytes. `sizes`: size in bytes of each of the `pieces` entries. The first
  // `layered` entries, such as weights, have different contents in each layer of the model.
  Cache(double capacity, const double* sizes, int32_t pieces, int32_t layered)
      : capacity_(capacity), sizes_(sizes), layered_(layered), entries_(pieces) {}

  // Models a read of `bytes` bytes of entry number `piece`. Returns how many of these bytes come from memory,
  // because they were not in the cache. Afterwards all of them are in the cache.
  double read(int32_t piece, int32_t layer, double bytes, double filled) {
    Entry& e = touch(piece, filled);
    if (piece < layered_ && e.layer != layer) {
      e.bytes = 0.0;
      e.layer = layer;
    }
    bytes = std::min(bytes, sizes_[piece]);
    const double missing = std::max(0.0, bytes - e.bytes);
    e.bytes = std::max(bytes, e.bytes);
    return missing;
  }

  // Models a store, which puts `bytes` more bytes of entry `piece` into the cache.
  void write(int32_t piece, double bytes, double filled) {
    Entry& e = touch(piece, filled);
    e.bytes = std::min(sizes_[piece], e.bytes + bytes);
    e.dirty = true;
  }

  // Returns how many bytes have been written back to memory since the last call of this function. Bytes are
  // written back when an entry with stored data is evicted; the simulation notices this at the entry's next
  // use.
  double take_written_back() { return std::exchange(written_back_, 0.0); }

 private:
  struct Entry {
    double bytes = 0.0, touched = 0.0;
    int32_t layer = -1;
    bool dirty = false;
  };

  Entry& touch(int32_t piece, double filled) {
    Entry& e = entries_[piece];
    if (filled - e.touched > capacity_) {
      if (e.dirty) written_back_ += e.bytes;
      e.bytes = 0.0;
      e.dirty = false;
    }
    e.touched = filled;
    return e;
  }

  const double capacity_;
  const double* const sizes_;
  const int32_t layered_;
  std::vector<Entry> entries_;
  double written_back_ = 0.0;
};

}  // namespace mk::simulate
