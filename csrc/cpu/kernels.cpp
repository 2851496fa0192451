// This file is compiled once for each SIMD path (an instruction set such as AVX2). The macro MK_SIMD is the
// path's name, and MK_LANES is its vector length in floats.
#include "simd/kernels.h"

#include "../common/record.h"
#include "ops/attention.h"
#include "ops/experts.h"
#include "ops/gather.h"
#include "ops/matmul.h"
#include "ops/norm.h"
#include "ops/reduce.h"
#include "ops/route.h"
#include "ops/sample.h"
#include "subnormals.h"

#define MK_STRING_(x) #x
#define MK_STRING(x) MK_STRING_(x)
#define MK_JOIN_(a, b) a##b
#define MK_JOIN(a, b) MK_JOIN_(a, b)

namespace mk {
namespace MK_SIMD {
namespace {

// Reads `bytes` bytes, to measure memory bandwidth. It reads four streams at once, because the hardware
// prefetchers work best on several streams. Returns a sum, so that the compiler cannot remove the reads.
double read(const void* data, int64_t bytes) {
  constexpr int kStreams = 4;
  const int64_t floats = bytes / 4 / kStreams;
  const float* p = static_cast<const float*>(data);
  F32 sums[kStreams][2] = {};
  for (int64_t i = 0; i + 2 * kLanes <= floats; i += 2 * kLanes) {
    MK_UNROLL for (int j = 0; j < kStreams; ++j) {
      const float* q = p + j * floats + i;
      __builtin_prefetch(q + 512);
      sums[j][0] += load(q);
      sums[j][1] += load(q + kLanes);
    }
  }
  F32 all{};
  for (const auto& s : sums) all += s[0] + s[1];
  return sum(all);
}

template <class M>
double multiply_add(int64_t rounds, double* flops) {
  // Measures peak arithmetic speed. Each accumulator is a chain of dependent FMAs, so the loop needs many of
  // them: at least the FMA latency in cycles times the number of FMA ports. 12 are enough for every known
  // processor, and fit in 16 vector registers. The instruction for pairs of bfloat16 values has twice the
  // latency, so it gets more chains.
  constexpr int kChains = kInPairs<M> ? 16 : 12;
  F32 acc[kChains];
  MK_UNROLL for (int j = 0; j < kChains; ++j) acc[j] = splat(static_cast<float>(j));
  const F32 scale = splat(0.999f), add = splat(0.001f);
  for (int64_t i = 0; i < rounds; ++i) {
    MK_UNROLL for (int j = 0; j < kChains; ++j) acc[j] =
        kInPairs<M> ? add_products<M>(acc[j], scale, add) : acc[j] * scale + add;
  }
  *flops = 2.0 * kLanes * kChains * kWordSteps<M> * static_cast<double>(rounds);
  F32 all{};
  for (const F32& a : acc) all += a;
  return sum(all);
}

// Measures peak throughput like `multiply_add`, but for products of 8-bit activations with 4-bit weights.
double multiply_integers(int64_t rounds, double* operations) {
  constexpr int kChains = 4, kWords = 8;
  ByteSums<4> sums[kChains];
  U32 weights = (U32)lane_index() * 0x01010101u & 0x0F0F0F0Fu;
  for (int64_t i = 0; i < rounds; i += kWords) {
    MK_UNROLL for (int j = 0; j < kWords; ++j) {
      weights = (weights + 0x01010101u) & 0x0F0F0F0Fu;  // otherwise GCC could compute the products once
      MK_UNROLL for (int c = 0; c < kChains; ++c) sums[c].add(j, weights, 0x7F01FF05u + 0x02020202u * c);
    }
  }
  *operations = 2.0 * 4 * kLanes * kChains * static_cast<double>(rounds);
  I32 all{};
  for (const ByteSums<4>& s : sums) all += s.value(0, 0);
  return total(all);
}

// Executes joins and drains, for which the interpreter itself does all that is needed.
void nothing(const Call&, const int32_t*) {}

template <class Operands, void (*kFunction)(const Call&, const Operands&)>
void run(const Call& call, const int32_t* record) {
  kFunction(call, operands<Operands>(record));
}

#if MK_LANES == 16
// Tests this processor's instruction for pairs of bfloat16 values (vdpbf16ps). `add_products` relies on the
// order in which the instruction adds its two products, and on how it rounds. The manuals describe both, but
// a processor or emulator may differ.
bool adds_in_order() {
  const FlushSubnormals flush;
  for (uint32_t round = 0; round < 4096; ++round) {
    const auto any = [&](uint32_t salt, uint32_t exponents) {  // random floats, magnitudes from 2^-16 on
      U32 v = ((U32)lane_index() + 16 * (8 * round + salt)) * 0x9E3779B9u;
      v = (v ^ v >> 15) * 0x85EBCA6Bu;
      return (v & 0x807FFFFFu) | ((111 + (v >> 23) % exponents) << 23);
    };
    const U32 x = (any(0, 32) & 0xFFFF0000u) | any(1, 32) >> 16,
              w = (any(2, 32) & 0xFFFF0000u) | any(3, 32) >> 16;
    F32 expected = (F32)any(4, 40);
    const F32 found = add_products<Bf16Pairs>(expected, (F32)x, (F32)w);
    expected += (F32)(x & 0xFFFF0000u) * (F32)(w & 0xFFFF0000u);
    expected += (F32)(x << 16) * (F32)(w << 16);
    if (memcmp(&found, &expected, sizeof found) != 0) return false;
  }
  return true;
}
#endif

// The switch has no default case, so the compiler rejects it if an Operation is missing.
template <class T>
Op op(Operation operation) {
  switch (operation) {
    case Operation::kJoin:
    case Operation::kDrain:
      return nothing;
    case Operation::kGather:
      return run<Run, gather>;
    case Operation::kRope:
      return run<Run, rope>;
    case Operation::kNorm:
      return run<Run, norm<T>>;
    case Operation::kMatmul:
      return run<Tile, matmul<T>>;
    case Operation::kAttention:
      return run<Attention, attention<T>>;
    case Operation::kReduce:
      return run<Tile, reduce<T>>;
    case Operation::kRoute:
      return run<Run, route<T>>;
    case Operation::kExperts:
      return run<ExpertTile, experts<T>>;
    case Operation::kCombine:
      return run<Run, combine<T>>;
    case Operation::kSample:
      return run<Run, sample>;
  }
  return nullptr;
}

// Returns this SIMD path's functions for activations of type T. M is Bf16Pairs if matmuls multiply
// bfloat16 values in pairs, and T otherwise.
template <class T, class M = T>
Kernels table(const char* name = MK_STRING(MK_SIMD)) {
  Kernels k{};
  k.name = name;
  k.bf16_pairs = kInPairs<M>;
  for (int32_t i = 1; i < kOperations; ++i) k.ops[i] = op<T>(static_cast<Operation>(i));
  k.send[static_cast<int32_t>(Operation::kNorm)] = run<Run, send_norm<T>>;
  k.attention_merge = attention_merge<T>;
  k.read = read;
  k.multiply_add = multiply_add<M>;
  k.multiply_integers = multiply_integers;
  return k;
}

}  // namespace
}  // namespace MK_SIMD

const Kernels* MK_JOIN(MK_SIMD, _kernels)(Dtype dtype) {
  static const Kernels f32 = MK_SIMD::table<float>(), bf16 = MK_SIMD::table<Bf16>();
  return dtype == Dtype::BF16 ? &bf16 : &f32;
}

#if MK_LANES == 16
const Kernels* avx512bf16_kernels(Dtype dtype) {
  static const char* const name = "avx512bf16";
  static const Kernels f32 = MK_SIMD::table<float>(name), bf16 = MK_SIMD::table<Bf16, Bf16Pairs>(name);
  static const bool exact = MK_SIMD::adds_in_order();
  return !exact ? nullptr : dtype == Dtype::BF16 ? &bf16 : &f32;
}
#endif

}  // namespace mk
