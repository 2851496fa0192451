// The CPU backend treats subnormal float32 operands and results as zero. The reason is that all SIMD paths
// must produce the same bits, and the instruction that multiplies pairs of bfloat16 values always treats
// subnormals as zero.
#pragma once
#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace mk {

// Makes the calling thread flush subnormal numbers to zero as long as the object exists.
class FlushSubnormals {
 public:
  FlushSubnormals() : before_(control()) { set_control(before_ | kFlush); }
  ~FlushSubnormals() { set_control(before_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kFlush = 0x8040;  // results, operands
  static uint64_t control() { return _mm_getcsr(); }
  static void set_control(uint64_t word) { _mm_setcsr(static_cast<uint32_t>(word)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kFlush = 1 << 24;
  static uint64_t control() {
    uint64_t word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void set_control(uint64_t word) { asm volatile("msr fpcr, %0" ::"r"(word)); }
#else
  static constexpr uint64_t kFlush = 0;
  static uint64_t control() { return 0; }
  static void set_control(uint64_t) {}
#endif

  const uint64_t before_;
};

}  // namespace mk
