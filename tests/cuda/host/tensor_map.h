// Stands in for tensor maps and the bulk copy engine: copies boxes between memory and pages.
#pragma once
#include <string.h>

#include "../../../csrc/cuda/plan.h"
#include "../../../csrc/cuda/tensor_core.h"

namespace mk {

constexpr int kMapDimensions = 5;

// The host's replacement for a tensor map. Dimension 0 is the innermost; unused ones have size and box 1.
struct HostMap {
  char* base;
  int64_t strides[kMapDimensions];  // bytes
  int32_t sizes[kMapDimensions], box[kMapDimensions];
  int32_t item;      // bytes of an element: 2, or 4 for float32
  int32_t swizzled;  // 1: rows of a box have 128 bytes and use the 128-byte swizzle

  uint32_t bytes() const {
    int32_t n = item;
    for (int32_t size : box) n *= size;
    return static_cast<uint32_t>(n);
  }
};
static_assert(sizeof(HostMap) <= kMapBytes);

// Where a box begins.
struct Corner {
  int32_t at[kMapDimensions];
};

inline HostMap host_map(const TensorMap& map) {
  HostMap out;
  memcpy(&out, map.bytes, sizeof out);
  return out;
}

// Calls f(address in memory, address in the page) for each element, of type T, of a box. The address in
// memory is null outside the tensor.
template <class T, class F>
inline void for_elements(void* page, const HostMap& map, const Corner& corner, F&& f) {
  const int elements = static_cast<int>(map.bytes()) / map.item;
  for (int n = 0; n < elements; ++n) {
    char* at = map.base;
    bool inside = true;
    for (int i = 0, left = n; i < kMapDimensions; left /= map.box[i++]) {
      const int32_t place = corner.at[i] + left % map.box[i];
      inside = inside && place >= 0 && place < map.sizes[i];
      at += place * map.strides[i];
    }
    const uint32_t byte = static_cast<uint32_t>(n * map.item);
    f(inside ? reinterpret_cast<T*>(at) : nullptr,
      reinterpret_cast<T*>(static_cast<char*>(page) + (map.swizzled ? swizzle(byte) : byte)));
  }
}

template <class F>
inline void for_elements_of_any(void* page, const HostMap& map, const Corner& corner, F&& f) {
  map.item == 2 ? for_elements<uint16_t>(page, map, corner, f) : for_elements<uint32_t>(page, map, corner, f);
}

inline void load_box(void* to, const HostMap& map, const Corner& corner) {
  for_elements_of_any(to, map, corner, [](auto* from, auto* at) { *at = from ? *from : 0; });
}

inline void store_box(const HostMap& map, const Corner& corner, const void* from) {
  for_elements_of_any(const_cast<void*>(from), map, corner, [](auto* to, const auto* at) {
    if (to) *to = *at;
  });
}

// Of float32.
inline void add_box(const HostMap& map, const Corner& corner, const void* from) {
  for_elements<float>(const_cast<void*>(from), map, corner, [](float* to, const float* at) {
    if (to) *to += *at;
  });
}

}  // namespace mk
