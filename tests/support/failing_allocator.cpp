// A library for LD_PRELOAD that replaces `new` and aligned_alloc, with which the native library allocates.
// After fail_allocation(n), n allocations succeed, the next one fails, and all later ones succeed.
#include <stdlib.h>

#include <atomic>
#include <cstddef>
#include <new>

namespace {

std::atomic<long> left{-1};  // allocations that succeed before one fails; negative: none fails

bool fails() { return left.load() >= 0 && left.fetch_sub(1) == 0; }

void* take(size_t align, size_t bytes) {
  void* p = nullptr;
  if (fails() || posix_memalign(&p, align, bytes ? bytes : 1)) throw std::bad_alloc();
  return p;
}

}  // namespace

extern "C" void fail_allocation(long number) { left = number; }

extern "C" long allocations_left() { return left; }

extern "C" void* aligned_alloc(size_t align, size_t bytes) {
  void* p = nullptr;
  return fails() || posix_memalign(&p, align, bytes) ? nullptr : p;
}

void* operator new(size_t bytes) { return take(alignof(std::max_align_t), bytes); }
void* operator new[](size_t bytes) { return take(alignof(std::max_align_t), bytes); }
void* operator new(size_t bytes, std::align_val_t align) { return take(static_cast<size_t>(align), bytes); }
void* operator new[](size_t bytes, std::align_val_t align) { return take(static_cast<size_t>(align), bytes); }
void operator delete(void* p) noexcept { free(p); }
void operator delete[](void* p) noexcept { free(p); }
void operator delete(void* p, size_t) noexcept { free(p); }
void operator delete[](void* p, size_t) noexcept { free(p); }
void operator delete(void* p, std::align_val_t) noexcept { free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { free(p); }
void operator delete[](void* p, size_t, std::align_val_t) noexcept { free(p); }
