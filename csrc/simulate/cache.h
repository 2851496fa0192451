// The contents of a rank's last-level cache: entries such as a weight tile or a row block of an activation.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace mk::simulate {

// An entry is evicted when, since its last use, more bytes have entered the cache than the cache holds.
// `filled` is the number of bytes that have entered the cache so far.
class Cache {
 public:
  // `sizes` has the size of each entry in bytes. Entries [0, layered) have different contents in each layer.
  Cache(double capacity, const double* sizes, int32_t pieces, int32_t layered)
      : capacity_(capacity), sizes_(sizes), layered_(layered), entries_(pieces) {}

  // Reads `bytes` of an entry; returns how many of them were not in the cache. Afterwards, all of them are.
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

  // Models a store: `bytes` more bytes of the entry are now in the cache.
  void write(int32_t piece, double bytes, double filled) {
    Entry& e = touch(piece, filled);
    e.bytes = std::min(sizes_[piece], e.bytes + bytes);
    e.dirty = true;
  }

  // Returns the number of bytes of stored entries that were evicted since the last call. An eviction is
  // noticed only at the next use of the entry.
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
