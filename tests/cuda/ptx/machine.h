// What translated PTX calls: arithmetic, and one GPU thread's access to memory and to other threads.
#pragma once
#include <stdint.h>
#include <string.h>

#include <bit>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <type_traits>

class Fibre;

namespace ptx {

// -- registers: an operand's type may differ from its register's

template <class To, class From>
inline To as(From value) {
  if constexpr (std::is_floating_point_v<To> && !std::is_same_v<To, From>) {
    using Bits = std::conditional_t<sizeof(To) == 4, uint32_t, uint64_t>;
    return std::bit_cast<To>(as<Bits>(value));
  } else if constexpr (std::is_floating_point_v<From> && !std::is_same_v<To, From>) {
    using Bits = std::conditional_t<sizeof(From) == 4, uint32_t, uint64_t>;
    return static_cast<To>(std::bit_cast<Bits>(value));
  } else {
    return static_cast<To>(value);
  }
}
template <class Register, class Value>
inline void set(Register& to, Value value) {
  to = as<Register>(value);
}
template <class T>
inline T get(const char* at) {
  T value;
  memcpy(&value, at, sizeof value);
  return value;
}
template <class T>
inline void put(char* at, T value) {
  memcpy(at, &value, sizeof value);
}

// -- arithmetic whose result C++ does not define, or defines differently

template <class T>
using Unsigned = std::make_unsigned_t<T>;
template <class T>
inline T add(T a, T b) {
  return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
}
inline float add(float a, float b) { return a + b; }
template <class T>
inline T sub(T a, T b) {
  return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
}
template <class T>
inline T mul(T a, T b) {
  return static_cast<T>(static_cast<Unsigned<T>>(a) * static_cast<Unsigned<T>>(b));
}
inline int32_t high(int32_t a, int32_t b) { return static_cast<int32_t>(int64_t{a} * b >> 32); }
template <class T>
inline T quotient(T a, T b) {
  if (b == 0) return static_cast<T>(-1);
  return std::is_signed_v<T> && b == static_cast<T>(-1) ? sub(T{0}, a) : static_cast<T>(a / b);
}
inline int32_t remainder_of(int32_t a, int32_t b) { return b == 0 || b == -1 ? (b == 0 ? a : 0) : a % b; }
template <class T>
inline T left(T a, uint32_t n) {
  return n >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << n);
}
template <class T>
inline T right(T a, uint32_t n) {
  if (n < 8 * sizeof(T)) return static_cast<T>(a >> n);
  if constexpr (std::is_signed_v<T>) return a < 0 ? T{-1} : T{0};
  return T{0};
}
template <class T>
inline T insert(T from, T into, uint32_t position, uint32_t length) {
  position &= 0xFF, length &= 0xFF;
  const T ones = length >= 8 * sizeof(T) ? static_cast<T>(-1) : static_cast<T>((T{1} << length) - 1);
  const T mask = left(ones, position);
  return static_cast<T>((into & ~mask) | (left(from, position) & mask));
}

template <class T, class From>
inline T truncated(From value) {
  if (std::isnan(value)) return 0;
  const From low = static_cast<From>(std::numeric_limits<T>::min());
  const From high = std::ldexp(From{1}, std::numeric_limits<T>::digits);
  if (value < low) return std::numeric_limits<T>::min();
  return value >= high ? std::numeric_limits<T>::max() : static_cast<T>(value);
}
inline float saturated(float value) { return value > 0.0f ? (value < 1.0f ? value : 1.0f) : 0.0f; }
inline float flushed(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? 0.0f * value : value; }
inline uint16_t bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return 0x7FFF;
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
// Returns a * b + c, rounded down. In double, the product is exact, and so is `error`, the error of the sum.
inline float fma_down(float a, float b, float c) {
  const double p = double{a} * b, s = p + c, back = s - p, error = (p - (s - back)) + (c - back);
  const float out = static_cast<float>(s);
  const bool above = out > s || (out == s && error < 0);
  return above ? std::nextafter(out, -std::numeric_limits<float>::infinity()) : out;
}

// -- other threads and memory

enum Scope : uint8_t { kNone, kCta, kGpu, kSystem };  // kNone: a weak access
constexpr uint8_t kAcquire = 1, kRelease = 2;
struct Order {
  Scope scope = kNone;
  uint8_t kind = 0;
};
constexpr Order kWeak{};

struct Shuffled {
  uint32_t value;
  bool ok;
};

struct Block;
struct Warp;
struct Knowledge;
struct Region;

// A GPU thread. Addresses in shared memory have 32 bits, generic addresses 64.
class Thread {
 public:
  uint32_t tid, lane, ctaid;
  int site = 0;  // place in the source of the PTX instruction that it executes: an index of kSites

  uint64_t time();
  uint32_t shared_memory() const;
  uint64_t parameters() const;
  uint64_t generic(uint32_t shared);

  // These check an access to `bytes` bytes of memory and return their address on the host.
  const char* read(uint64_t address, uint32_t bytes, Order order);
  char* write(uint64_t address, uint32_t bytes, Order order);
  char* update(uint64_t address, uint32_t bytes, Order order);

  Shuffled shuffle(bool butterfly, uint32_t value, uint32_t b, uint32_t c, uint32_t mask);
  uint32_t ballot(bool value, uint32_t mask);
  void sync_warp(uint32_t mask);
  void barrier(uint32_t index, uint32_t threads);  // `threads` is 0 for the whole block
  uint64_t wall_time();

  void fence_barriers();
  // Proxy fences for shared and for global memory.
  void fence_shared();
  void fence_global();
  void acquire_map(uint64_t map, uint32_t bytes);

  void init(uint32_t barrier, uint32_t arrivals);
  void arrive(uint32_t barrier, uint32_t count, uint32_t bytes, bool release);
  bool wait(uint32_t barrier, uint32_t parity, bool acquire);

  void load_box(uint32_t to, uint64_t map, std::initializer_list<int32_t> at, int dimensions,
                uint32_t barrier);
  void load_bytes(uint32_t to, uint64_t from, uint32_t bytes, uint32_t barrier);
  void store_box(uint64_t map, std::initializer_list<int32_t> at, int dimensions, uint32_t from, bool add);
  void prefetch_box(uint64_t map, std::initializer_list<int32_t> at, int dimensions);
  void commit_bulk();
  void wait_bulk(uint32_t pending, bool read);

  void wgmma_fence();
  void wgmma(void* const* d, int columns, uint64_t a, uint64_t b, bool accumulate);
  void wgmma_commit();
  void wgmma_wait(uint32_t pending, void* const* registers);
  void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
  void ldmatrix(uint32_t row, uint32_t (&d)[4]);

  // -- for the runtime
  Block* block;
  Warp* warp;
  Knowledge* knows;
  Fibre* fibre = nullptr;  // keeps its registers while it does not run
  const char* waits = "";  // what it waits for; empty while it can run
  bool ended = false;
  uint32_t favour = 0;             // the scheduler prefers threads with a high value
  int32_t task = 0;                // the program's instruction on which it works: an index of World::tasks_
  const Region* region = nullptr;  // the region of its last access while it worked on `region_task`
  int32_t region_task = -1;
};

extern int planted;  // the number of the planted fault that is active; 0: none
extern const char* const kSites[];
void kernel(Thread& thread);

}  // namespace ptx
