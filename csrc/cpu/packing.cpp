#include "packing.h"

#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <new>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "../common/record.h"

namespace mk {
namespace {

template <class T, int kPair>
void pack_panel(const PackedShape& s, const T* source, int64_t panel, T* out) {
  const int64_t first = panel / s.matrices * kPanel;
  const T* rows = source + (panel % s.matrices * s.rows + first) * s.k;
  const int64_t columns = std::min<int64_t>(kPanel, s.rows - first);
  if (columns < kPanel || s.k % 2) memset(out, 0, s.panel_bytes);
  for (int64_t k = 0; k < s.k; k += kPair) {
    T* line = out + k * kPanel;
    const int64_t pair = std::min<int64_t>(kPair, s.k - k);
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t j = 0; j < pair; ++j) line[c * kPair + j] = rows[c * s.k + k + j];
    }
  }
}

}  // namespace

PackedShape packed_shape(const Dims& d, Buffer buffer) {
  int64_t rows = 0, k = d.hidden, matrices = 1;
  switch (buffer) {
    case Buffer::EMBED:
      rows = d.vocab;
      break;
    case Buffer::LM_HEAD:
      rows = d.rank_vocab();
      break;
    case Buffer::W_QKV:
      rows = d.q_cols() + 2 * d.kv_cols();
      break;
    case Buffer::W_O:
      rows = d.hidden;
      k = d.o_cols();
      break;
    case Buffer::W_GATE_UP:
      rows = d.rank_ffn();
      matrices = 2;
      break;
    case Buffer::W_DOWN:
      rows = d.hidden;
      k = d.rank_ffn();
      break;
    default:
      return {};
  }
  const int64_t itemsize = d.dtype == static_cast<int32_t>(Dtype::BF16) ? 2 : 4;
  return {rows, k, matrices, matrices * ((rows + kPanel - 1) / kPanel), (k + k % 2) * kPanel * itemsize};
}

void pack(const PackedShape& shape, int32_t itemsize, const void* source, void* packed, int threads) {
  auto work = [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      char* out = static_cast<char*>(packed) + p * shape.panel_bytes;
      if (itemsize == 2)
        pack_panel<uint16_t, 2>(shape, static_cast<const uint16_t*>(source), p,
                                reinterpret_cast<uint16_t*>(out));
      else
        pack_panel<uint32_t, 1>(shape, static_cast<const uint32_t*>(source), p,
                                reinterpret_cast<uint32_t*>(out));
    }
  };
  std::vector<std::thread> pool;
  const int64_t n = std::max<int64_t>(1, std::min<int64_t>(threads, shape.panels / 8));
  for (int64_t t = 1; t < n; ++t) pool.emplace_back(work, shape.panels * t / n, shape.panels * (t + 1) / n);
  work(0, shape.panels / n);
  for (std::thread& t : pool) t.join();
}

WeightSpan weight_span(const Dims& d, const int32_t* record) {
  Buffer buffer;
  switch (static_cast<Opcode>(record_opcode(record))) {
    case Opcode::qkv_rope:
      buffer = Buffer::W_QKV;
      break;
    case Opcode::o_proj:
    case Opcode::o_partial:
      buffer = Buffer::W_O;
      break;
    case Opcode::gate_up_silu:
      buffer = Buffer::W_GATE_UP;
      break;
    case Opcode::down_proj:
    case Opcode::down_partial:
      buffer = Buffer::W_DOWN;
      break;
    case Opcode::lm_head:
      buffer = Buffer::LM_HEAD;
      break;
    default:
      return {};
  }
  const PackedShape shape = packed_shape(d, buffer);
  const OProj& tile = operands<OProj>(record);  // every matmul has the same operands
  const int64_t panel_bytes = shape.matrices * shape.panel_bytes;
  return {buffer, tile.col / kPanel * panel_bytes, panel_count(tile.col, tile.cols) * panel_bytes};
}

void* allocate(int64_t bytes) {
  constexpr int64_t kHuge = int64_t{2} << 20;
  const int64_t align = bytes < kHuge ? 4096 : kHuge;
  const int64_t size = (std::max<int64_t>(bytes, 1) + align - 1) / align * align;
  void* p = aligned_alloc(align, size);
  if (p == nullptr) throw std::bad_alloc();
#if defined(__linux__)
  if (align == kHuge) madvise(p, size, MADV_HUGEPAGE);
#endif
  memset(p, 0, size);
  return p;
}

}  // namespace mk
