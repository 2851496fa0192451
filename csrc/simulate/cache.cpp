#include "cache.h"

#include <algorithm>

namespace mk::simulate {

Cache::Cache(double capacity, const double* sizes, int32_t pieces, int32_t layered)
    : capacity_(capacity), sizes_(sizes), layered_(layered), entries_(pieces) {}

double Cache::read(int32_t piece, int32_t layer, double bytes) {
  Entry& e = entries_[piece];
  if (piece < layered_ && e.layer != layer) {
    held_ -= e.bytes;
    e.bytes = 0.0;
    e.layer = layer;
  }
  bytes = std::min(bytes, sizes_[piece]);
  const double missing = std::max(0.0, bytes - e.bytes);
  touch(piece);
  grow(piece, std::max(bytes, e.bytes));
  return missing;
}

void Cache::write(int32_t piece, double bytes) {
  Entry& e = entries_[piece];
  e.dirty = true;
  touch(piece);
  grow(piece, std::min(sizes_[piece], e.bytes + bytes));
}

double Cache::take_written_back() {
  const double bytes = written_back_;
  written_back_ = 0.0;
  return bytes;
}

void Cache::unlink(int32_t piece) {
  const Entry& e = entries_[piece];
  (e.newer < 0 ? newest_ : entries_[e.newer].older) = e.older;
  (e.older < 0 ? oldest_ : entries_[e.older].newer) = e.newer;
}

void Cache::touch(int32_t piece) {
  if (newest_ == piece) return;
  Entry& e = entries_[piece];
  if (e.newer >= 0) unlink(piece);  // else it is not held
  e.newer = -1;
  e.older = newest_;
  (newest_ < 0 ? oldest_ : entries_[newest_].newer) = piece;
  newest_ = piece;
}

void Cache::grow(int32_t piece, double to) {
  held_ += to - entries_[piece].bytes;
  entries_[piece].bytes = to;
  while (held_ > capacity_ && oldest_ != newest_) {
    const int32_t leaving = oldest_;
    Entry& e = entries_[leaving];
    unlink(leaving);
    e.newer = e.older = -1;
    held_ -= e.bytes;
    if (e.dirty) written_back_ += e.bytes;
    e.bytes = 0.0;
    e.dirty = false;
  }
}

}  // namespace mk::simulate
