// An allocator that frees all of its memory at once.
#pragma once
#include <stdint.h>
#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <vector>

namespace mk {

inline int64_t rounded_up(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

// An allocator for weights. It maps large areas of huge pages and hands out parts of them, so that even small
// matrices are on huge pages. With 4 KiB pages, TLB misses would slow down reading the weights. Not
// thread-safe.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    for (const Mapping& m : mappings_) munmap(m.address, m.bytes);
  }

  // Returns zeroed memory that is aligned to kAlign bytes. Throws std::bad_alloc if there is not enough
  // memory.
  void* allocate(int64_t bytes) {
    const int64_t size = rounded_up(std::max<int64_t>(bytes, 1), kAlign);
    if (end_ - next_ < size) {
      // The mapping has one huge page more than requested, so that the part in use can start at
      // a multiple of kHuge.
      const int64_t wanted = std::max(rounded_up(size, kHuge), kLeast) + kHuge;
      mappings_.reserve(mappings_.size() + 1);
      void* p = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (p == MAP_FAILED) throw std::bad_alloc();
      mappings_.push_back({p, wanted});
#if defined(__linux__)
      madvise(p, wanted, MADV_HUGEPAGE);
#endif
      next_ = reinterpret_cast<char*>(rounded_up(reinterpret_cast<int64_t>(p), kHuge));
      end_ = static_cast<char*>(p) + wanted;
    }
    char* found = next_;
    next_ += size;
    return found;
  }

  static constexpr int64_t kAlign = 64;

 private:
  static constexpr int64_t kHuge = int64_t{2} << 20;
  static constexpr int64_t kLeast = 16 * kHuge;  // minimum bytes of a mapping

  struct Mapping {
    void* address;
    int64_t bytes;
  };
  std::vector<Mapping> mappings_;
  char* next_ = nullptr;  // [next_, end_) is the unused rest of the last mapping
  char* end_ = nullptr;
};

}  // namespace mk
