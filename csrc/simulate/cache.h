// What a rank's last shared cache holds, by pieces: a weight tile, a row block of an activation.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace mk::simulate {

// A piece is there until as many bytes as the cache holds have come into it since the piece was last touched:
// least recently used, for pieces that come and go while they are read. `filled` is how many bytes have come
// so far.
class Cache {
 public:
  // `sizes`: bytes of each piece; pieces below `layered` are others in each layer.
  Cache(double capacity, const double* sizes, int32_t pieces, int32_t layered)
      : capacity_(capacity), sizes_(sizes), layered_(layered), entries_(pieces) {}

  // Bytes of a read that are not there. They are afterwards.
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

  // Puts more of a piece there.
  void write(int32_t piece, double bytes, double filled) {
    Entry& e = touch(piece, filled);
    e.bytes = std::min(sizes_[piece], e.bytes + bytes);
    e.dirty = true;
  }

  // Bytes of pieces stored there that had to leave, since the last call: noticed when a piece is next
  // touched.
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
