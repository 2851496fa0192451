// The contents of a rank's last-level cache: entries such as a weight tile or a row block of an activation.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace mk::simulate {

// An entry is evicted when more bytes than the cache holds have been filled since the entry was last used.
// `filled` is the number of bytes filled so far.
class Cache {
 public:
  // `sizes` are the bytes of each entry; entries below `layered` have different contents in each layer.
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

  // A store puts bytes of an entry into the cache.
  void write(int32_t piece, double bytes, double filled) {
    Entry& e = touch(piece, filled);
    e.bytes = std::min(sizes_[piece], e.bytes + bytes);
    e.dirty = true;
  }

  // The bytes of stored entries that were evicted since the last call; an eviction is noticed at the next use
  // of the entry.
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
