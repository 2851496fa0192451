// Wrappers of the PTX instructions mma and ldmatrix. All lanes of a warp call them together.
#pragma once
#include "../arithmetic.h"

namespace mk {

// Computes c += a * b on the tensor cores; a is [16][16], b is [16][8], and each lane passes its part of
// them.
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Loads four 8 x 8 matrices of 16-bit elements from shared memory and transposes them. Each lane passes the
// shared-memory address of one row of one matrix.
__device__ __forceinline__ void load_matrices(uint32_t (&b)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(row)
               : "memory");
}

}  // namespace mk
