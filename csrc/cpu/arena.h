// Memory that is freed all at once.
#pragma once
#include <stdint.h>

#include <vector>

namespace mk {

// Maps large areas and hands out parts of them, so that small matrices also lie on huge pages. With 4 KiB
// pages, reads wait for address translation. Not thread-safe.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  // Zeroed memory aligned to 64 bytes. Throws std::bad_alloc.
  void* allocate(int64_t bytes);

 private:
  struct Mapping {
    void* address;
    int64_t bytes;
  };
  std::vector<Mapping> mappings_;
  char* next_ = nullptr;  // the unused rest of the last mapping
  char* end_ = nullptr;
};

}  // namespace mk
