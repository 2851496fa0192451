// An allocator that frees all of its memory at once.
#pragma once
#include <stdint.h>

#include <vector>

namespace mk {

// An allocator for weights. It maps large areas of huge pages and hands out parts of them, so that even small
// matrices are on huge pages. With 4 KiB pages, TLB misses would slow down reading the weights. Not
// thread-safe.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  // Returns zeroed memory that is aligned to 64 bytes. Throws std::bad_alloc if there is not enough memory.
  void* allocate(int64_t bytes);

 private:
  struct Mapping {
    void* address;
    int64_t bytes;
  };
  std::vector<Mapping> mappings_;
  char* next_ = nullptr;  // [next_, end_) is the unused rest of the last mapping
  char* end_ = nullptr;
};

}  // namespace mk
