#include "cache.h"

#include <algorithm>

namespace mk::simulate {

Cache::Entry& Cache::touch(int32_t piece, double filled) {
  Entry& e = entries_[piece];
  if (filled - e.touched > capacity_) {
    if (e.dirty) written_back_ += e.bytes;
    e.bytes = 0.0;
    e.dirty = false;
  }
  e.touched = filled;
  return e;
}

double Cache::read(int32_t piece, int32_t layer, double bytes, double filled) {
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

void Cache::write(int32_t piece, double bytes, double filled) {
  Entry& e = touch(piece, filled);
  e.bytes = std::min(sizes_[piece], e.bytes + bytes);
  e.dirty = true;
}

double Cache::take_written_back() {
  const double bytes = written_back_;
  written_back_ = 0.0;
  return bytes;
}

}  // namespace mk::simulate
