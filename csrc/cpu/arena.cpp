#include "arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace mk {
namespace {

constexpr int64_t kHuge = int64_t{2} << 20;
constexpr int64_t kLeast = 16 * kHuge;  // minimum bytes of a mapping
constexpr int64_t kAlign = 64;

int64_t rounded(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

Arena::~Arena() {
  for (const Mapping& m : mappings_) munmap(m.address, m.bytes);
}

void* Arena::allocate(int64_t bytes) {
  const int64_t size = rounded(std::max<int64_t>(bytes, 1), kAlign);
  if (end_ - next_ < size) {
    // The mapping has one huge page more than requested, so that the part in use can start at
    // a multiple of kHuge.
    const int64_t wanted = std::max(rounded(size, kHuge), kLeast) + kHuge;
    mappings_.reserve(mappings_.size() + 1);
    void* p = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    mappings_.push_back({p, wanted});
#if defined(__linux__)
    madvise(p, wanted, MADV_HUGEPAGE);
#endif
    next_ = reinterpret_cast<char*>(rounded(reinterpret_cast<int64_t>(p), kHuge));
    end_ = static_cast<char*>(p) + wanted;
  }
  char* found = next_;
  next_ += size;
  return found;
}

}  // namespace mk
