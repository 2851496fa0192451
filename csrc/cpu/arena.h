// Memory that is freed all at once.
#pragma once
#include <stdint.h>

#include <vector>

namespace mk {

// Maps large pieces and hands out parts of them, so that small matrices lie on huge pages as well: with pages
// of 4 KiB, reads of them wait for address translation. Not thread-safe.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  // Zeroed memory at a multiple of 64 bytes. Throws std::bad_alloc.
  void* allocate(int64_t bytes);

 private:
  struct Mapping {
    void* address;
    int64_t bytes;
  };
  std::vector<Mapping> mappings_;
  char* next_ = nullptr;  // of the last mapping, what is left
  char* end_ = nullptr;
};

}  // namespace mk
