// Functions with which the bodies of instructions access global memory. Reads of data written in this launch
// bypass the L1 cache, because stores of other SMs do not update it.
#pragma once
#include "../arithmetic.h"

namespace mk {

// 16 bytes of data: four float32 values or eight bf16 values.
struct alignas(16) Words {
  uint32_t w[4];
};

MK_FN Words load_words(const void* from) {
  Words out;
#if defined(__CUDA_ARCH__)
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out.w[0]), "=r"(out.w[1]), "=r"(out.w[2]), "=r"(out.w[3])
               : "l"(from));
#else
  memcpy(&out, from, sizeof out);
#endif
  return out;
}

// Reads data that is constant during a launch; only such data may come from the L1 cache.
MK_FN Words read_words(const void* from) {
#if defined(__CUDA_ARCH__)
  return *static_cast<const Words*>(from);
#else
  return load_words(from);
#endif
}

// Prefetches data that is constant during a launch into the L2 cache.
MK_FN void prefetch([[maybe_unused]] const void* from) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
#endif
}

MK_FN uint32_t load_word(const void* from) {
  uint32_t out;
#if defined(__CUDA_ARCH__)
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(out) : "l"(from));
#else
  memcpy(&out, from, sizeof out);
#endif
  return out;
}

MK_FN float load_float(const float* from) { return bits_to_float(load_word(from)); }
MK_FN int32_t load_int(const int32_t* from) { return static_cast<int32_t>(load_word(from)); }

MK_FN void store_words(void* to, const Words& value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.w[0]), "r"(value.w[1]),
               "r"(value.w[2]), "r"(value.w[3])
               : "memory");
#else
  memcpy(to, &value, sizeof value);
#endif
}

MK_FN void store_word(void* to, uint32_t value) { *static_cast<uint32_t*>(to) = value; }

struct alignas(8) Pair {
  float a, b;
};

MK_FN Pair load_pair(const float* p) {
#if defined(__CUDA_ARCH__)
  Pair v;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.a), "=f"(v.b) : "l"(p));
  return v;
#else
  return {p[0], p[1]};
#endif
}

MK_FN void store_pair(float* to, const Pair& value) { *reinterpret_cast<Pair*>(to) = value; }
MK_FN void add_pair(float* to, const Pair& value) {
#if defined(__CUDA_ARCH__)
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(value.a) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to + 1), "f"(value.b) : "memory");
#else
  to[0] += value.a, to[1] += value.b;
#endif
}
MK_FN void store_pair(uint16_t* p, float a, float b) { *reinterpret_cast<uint32_t*>(p) = pack_bf16(a, b); }
MK_FN void store_pair(uint16_t* to, const Pair& value) { store_pair(to, value.a, value.b); }

// Eight consecutive elements of a row as float32; the first index is a multiple of eight.
struct Eight {
  float v[8];

  MK_FN void operator+=(const Eight& other) { MK_UNROLL for (int i = 0; i < 8; ++i) v[i] += other.v[i]; }
};

MK_FN Eight as_eight(const Words& first, const Words& second) {
  Eight out;
  MK_UNROLL for (int i = 0; i < 4; ++i) {
    out.v[i] = bits_to_float(first.w[i]);
    out.v[4 + i] = bits_to_float(second.w[i]);
  }
  return out;
}

// Returns the eight bf16 values in `words` as float32.
MK_FN Eight as_eight(const Words& words) {
  Eight out;
  MK_UNROLL for (int i = 0; i < 4; ++i) {
    out.v[2 * i] = low_half(words.w[i]);
    out.v[2 * i + 1] = high_half(words.w[i]);
  }
  return out;
}

MK_FN Eight load_eight(const float* from) { return as_eight(load_words(from), load_words(from + 4)); }
MK_FN Eight load_eight(const uint16_t* from) { return as_eight(load_words(from)); }
MK_FN Eight read_eight(const float* from) { return as_eight(read_words(from), read_words(from + 4)); }
MK_FN Eight read_eight(const uint16_t* from) { return as_eight(read_words(from)); }

MK_FN void store_eight(float* to, const Eight& value) {
  MK_UNROLL for (int half = 0; half < 2; ++half) {
    Words words;
    MK_UNROLL for (int i = 0; i < 4; ++i) words.w[i] = float_to_bits(value.v[4 * half + i]);
    store_words(to + 4 * half, words);
  }
}

MK_FN Words pack_eight(const Eight& value) {
  Words words;
  MK_UNROLL for (int i = 0; i < 4; ++i) words.w[i] = pack_bf16(value.v[2 * i], value.v[2 * i + 1]);
  return words;
}

// fetch_add and exchange work atomically on memory that only the threads of one block use. They return the
// previous value.
MK_FN int32_t fetch_add(int32_t* at, int32_t n) {
#if defined(__CUDA_ARCH__)
  return atomicAdd(at, n);
#else
  return __atomic_fetch_add(at, n, __ATOMIC_RELAXED);
#endif
}

MK_FN int32_t exchange(int32_t* at, int32_t value) {
#if defined(__CUDA_ARCH__)
  return atomicExch(at, value);
#else
  return __atomic_exchange_n(at, value, __ATOMIC_RELAXED);
#endif
}

}  // namespace mk
