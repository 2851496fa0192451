// The memory that each instruction of the program declares to access. ptx_regions.py fills these structures.
#pragma once
#include <stdint.h>

#include <algorithm>

namespace ptx {

struct Region {
  int64_t base, rows, width, stride, layer_stride, kinds;

  // Returns the part of the addresses [from, to) that lies in the region of a layer; empty if there is none.
  // [from, to) must overlap with one row only.
  std::pair<int64_t, int64_t> overlap(int64_t from, int64_t to, int layer) const {
    const int64_t begin = base + layer * layer_stride;
    if (to <= begin) return {from, from};
    const int64_t row = std::max<int64_t>(from - begin, 0) / stride;
    for (int64_t r = row; r < std::min(row + 2, rows); ++r) {
      const int64_t low = std::max(from, begin + r * stride), high = std::min(to, begin + r * stride + width);
      if (low < high) return {low, high};
    }
    return {from, from};
  }
};

constexpr int64_t kReads = 1, kWrites = 2, kLoads = 4, kUsed = 8;

struct Regions {
  const Region* regions;
  const int64_t* starts[3];
  const Region* buffers;
  int64_t count;

  const Region* buffer_at(int64_t address) const {
    const Region* found = std::find_if(buffers, buffers + count, [address](const Region& b) {
      return address >= b.base && address < b.base + b.width;
    });
    return found == buffers + count ? nullptr : found;
  }
};

}  // namespace ptx
