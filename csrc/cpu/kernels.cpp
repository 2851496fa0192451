// Compiled once per SIMD width: MK_SIMD names it, MK_LANES is its vector length in floats.
#include "kernels.h"

#include "../common/record.h"
#include "ops/attention.h"
#include "ops/gather.h"
#include "ops/matmul.h"
#include "ops/norm.h"
#include "ops/reduce.h"
#include "ops/sample.h"

#define MK_STRING_(x) #x
#define MK_STRING(x) MK_STRING_(x)
#define MK_JOIN_(a, b) a##b
#define MK_JOIN(a, b) MK_JOIN_(a, b)

namespace mk {
namespace MK_SIMD {
namespace {

// Four streams at once: what the hardware's prefetchers follow best.
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

double multiply_add(int64_t rounds, double* flops) {
  constexpr int kChains = 12;  // latency x ports on every processor so far, and few enough for 16 registers
  F32 acc[kChains];
  MK_UNROLL for (int j = 0; j < kChains; ++j) acc[j] = splat(static_cast<float>(j));
  const F32 scale = splat(0.999f), add = splat(0.001f);
  for (int64_t i = 0; i < rounds; ++i) {
    MK_UNROLL for (int j = 0; j < kChains; ++j) acc[j] = acc[j] * scale + add;
  }
  *flops = 2.0 * kLanes * kChains * static_cast<double>(rounds);
  F32 all{};
  for (const F32& a : acc) all += a;
  return sum(all);
}

// Nothing: waits, signals and claims are the interpreter's.
void nothing(const Call&, const int32_t*) {}

template <class Operands, void (*kFunction)(const Call&, const Operands&)>
void run(const Call& call, const int32_t* record) {
  kFunction(call, operands<Operands>(record));
}

// An operation without a function here does not compile.
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
    case Operation::kSample:
      return run<Run, sample>;
  }
  return nullptr;
}

template <class T>
Kernels table() {
  Kernels k{};
  k.name = MK_STRING(MK_SIMD);
  for (int32_t i = 1; i < kOperations; ++i) k.ops[i] = op<T>(static_cast<Operation>(i));
  k.send[static_cast<int32_t>(Operation::kNorm)] = run<Run, send_norm<T>>;
  k.attention_merge = attention_merge<T>;
  k.read = read;
  k.multiply_add = multiply_add;
  return k;
}

}  // namespace
}  // namespace MK_SIMD

const Kernels* MK_JOIN(MK_SIMD, _kernels)(Dtype dtype) {
  static const Kernels f32 = MK_SIMD::table<float>(), bf16 = MK_SIMD::table<Bf16>();
  return dtype == Dtype::BF16 ? &bf16 : &f32;
}

}  // namespace mk
