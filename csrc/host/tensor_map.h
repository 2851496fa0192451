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

// Calls f(in memory, in the page) for each element of a box, of type T; in memory null outside the tensor.
// Element by element: a race detector sees every one.
template <class T, class F>
inline void for_elements(void* page, const HostMap& map, int x, int y, int z, F&& f) {
  for (int r = 0; r < kBoxRows; ++r) {
    const bool row_inside = y + r >= 0 && y + r < map.rows && z >= 0 && z < map.matrices;
    char* row = row_inside ? map.base + z * map.matrix_bytes + (y + r) * map.row_bytes : nullptr;
    for (int e = 0; e < 128 / map.item; ++e) {
      const bool inside = row_inside && x + e < map.inner;
      f(inside ? reinterpret_cast<T*>(row) + x + e : nullptr,
        reinterpret_cast<T*>(static_cast<char*>(page) + tile_offset(r, e * map.item)));
    }
  }
}

template <class F>
inline void for_elements_of_any(void* page, const HostMap& map, int x, int y, int z, F&& f) {
  map.item == 2 ? for_elements<uint16_t>(page, map, x, y, z, f)
                : for_elements<uint32_t>(page, map, x, y, z, f);
}

inline void load_box(void* to, const HostMap& map, int x, int y, int z) {
  for_elements_of_any(to, map, x, y, z, [](auto* from, auto* at) { *at = from ? *from : 0; });
}

inline void store_box(const HostMap& map, int x, int y, int z, const void* from) {
  for_elements_of_any(const_cast<void*>(from), map, x, y, z, [](auto* to, const auto* at) {
    if (to) *to = *at;
  });
}

// Of float32.
inline void add_box(const HostMap& map, int x, int y, int z, const void* from) {
  for_elements<float>(const_cast<void*>(from), map, x, y, z, [](float* to, const float* at) {
    if (to) *to += *at;
  });
}

}  // namespace mk
