#include <stdexcept>
#include <string>

#include "simd/kernels.h"

namespace mk {
namespace {

// The null backend exists to measure everything except the arithmetic. Its operations compute nothing, so
// every sampled token stays 0.
void nothing(const Call&, const int32_t*) {}

}  // namespace

const Kernels* null_kernels() {
  static const Kernels table = [] {
    Kernels k{};
    k.name = "null";
    for (Op& op : k.ops) op = nothing;
    k.attention_merge = nothing;
    return k;
  }();
  return &table;
}

const Kernels& choose_kernels(const char* simd, Dtype dtype) {
  const std::string wanted = simd;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  if (avx512 && __builtin_cpu_supports("avx512bf16") && (wanted.empty() || wanted == "avx512bf16")) {
    if (const Kernels* const pairs = avx512bf16_kernels(dtype)) return *pairs;
  }
  if (avx512 && (wanted.empty() || wanted == "avx512")) return *avx512_kernels(dtype);
  if (avx2 && (wanted.empty() || wanted == "avx2")) return *avx2_kernels(dtype);
#endif
  if (wanted.empty() || wanted == "portable") return *portable_kernels(dtype);
  if (wanted == "avx2" || wanted == "avx512" || wanted == "avx512bf16")
    throw std::runtime_error(
        "MEGAKERNEL_SIMD=" + wanted +
        ": this processor cannot run this SIMD path; unset MEGAKERNEL_SIMD or set it to portable");
  throw std::runtime_error("MEGAKERNEL_SIMD=" + wanted +
                           " is not a SIMD path: set it to portable, avx2, avx512 or avx512bf16");
}

}  // namespace mk
