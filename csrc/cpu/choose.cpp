#include <string.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "../common/record.h"
#include "simd/kernels.h"

namespace mk {
namespace {

// The null backend exists to measure everything except the arithmetic. Its operations compute nothing, and
// every sampled token is 0.
void nothing(const Call&, const int32_t*) {}

void sample_zero(const Call& call, const int32_t* record) {
  const Run& op = operands<Run>(record);
  // Zero bits mean 0 both as an int32 token and as a float32 log-probability.
  const std::vector<int32_t> zeros(op.rows);
  for (const Buffer buffer : {Buffer::TOKENS_OUT, Buffer::LOGPROBS_OUT}) {
    int32_t* out = call.copy<int32_t>(buffer, 0) + op.row;
    const int64_t bytes = int64_t{op.rows} * static_cast<int64_t>(sizeof(int32_t));
    if (call.dims->rank == 0)
      memcpy(out, zeros.data(), bytes);
    else
      store_remote(call, out, zeros.data(), bytes);
  }
}

}  // namespace

const Kernels* null_kernels() {
  static const Kernels table = [] {
    Kernels k{};
    k.name = "null";
    for (Op& op : k.ops) op = nothing;
    k.ops[static_cast<int32_t>(Operation::kSample)] = sample_zero;
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
