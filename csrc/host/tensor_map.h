// What stands in for a tensor map and the bulk copy engine: boxes of [kBoxRows rows][128 bytes] between
// memory and pages, in the 128-byte swizzle.
#pragma once
#include <string.h>

#include "../cuda/plan.h"
#include "../cuda/tensor_core.h"

namespace mk {

struct HostMap {
  char* base;
  int64_t row_bytes, matrix_bytes;
  int32_t inner, rows, matrices;  // elements of a row, rows, matrices
  int32_t item;                   // bytes of an element: 2, or 4 for float32
  int32_t shared;                 // 1: its boxes may hold what others store meanwhile, and nobody uses
};
static_assert(sizeof(HostMap) <= kMapBytes);

inline HostMap host_map(const TensorMap& map) {
  HostMap out;
  memcpy(&out, map.bytes, sizeof out);
  return out;
}

// One element of a box: its place in memory, null outside the tensor, and in the page.
template <class F>
inline void for_elements(const HostMap& map, int x, int y, int z, F&& f) {
  const int per_row = 128 / map.item;
  for (int r = 0; r < kBoxRows; ++r) {
    const bool row_inside = y + r >= 0 && y + r < map.rows && z >= 0 && z < map.matrices;
    char* row = row_inside ? map.base + z * map.matrix_bytes + (y + r) * map.row_bytes : nullptr;
    for (int e = 0; e < per_row; ++e) {
      const bool inside = row_inside && x + e < map.inner;
      f(inside ? row + static_cast<int64_t>(x + e) * map.item : nullptr, tile_offset(r, e * map.item));
    }
  }
}

// Element by element: a race detector sees every one.
template <class T>
inline void load_box(void* to, const HostMap& map, int x, int y, int z) {
  for_elements(map, x, y, z, [&](const char* from, uint32_t at) {
    *reinterpret_cast<T*>(static_cast<char*>(to) + at) = from ? *reinterpret_cast<const T*>(from) : T{};
  });
}

template <class T>
inline void store_box(const HostMap& map, int x, int y, int z, const void* from) {
  for_elements(map, x, y, z, [&](char* to, uint32_t at) {
    if (to) *reinterpret_cast<T*>(to) = *reinterpret_cast<const T*>(static_cast<const char*>(from) + at);
  });
}

inline void load_box(void* to, const HostMap& map, int x, int y, int z) {
  map.item == 2 ? load_box<uint16_t>(to, map, x, y, z) : load_box<uint32_t>(to, map, x, y, z);
}

inline void store_box(const HostMap& map, int x, int y, int z, const void* from) {
  map.item == 2 ? store_box<uint16_t>(map, x, y, z, from) : store_box<uint32_t>(map, x, y, z, from);
}

// Of float32.
inline void add_box(const HostMap& map, int x, int y, int z, const void* from) {
  for_elements(map, x, y, z, [&](char* to, uint32_t at) {
    if (to)
      *reinterpret_cast<float*>(to) += *reinterpret_cast<const float*>(static_cast<const char*>(from) + at);
  });
}

}  // namespace mk
