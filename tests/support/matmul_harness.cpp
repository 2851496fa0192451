// One matmul instruction on the host, without the roles: every page is filled as the plan says, each consumer
// warp runs the body in turn, and output pages go where the storer would send them. Pages are NaN where
// nothing is loaded.
#include <string.h>

#include <memory>
#include <vector>

#include "../../csrc/cuda/matmul.h"
#include "../../csrc/host/accumulators.h"

namespace mk {
namespace {

struct Host {
  static constexpr int kLanes = 1, kTrace = 0;
  using Accumulators = HostAccumulators;
  struct Barrier {};
  int lane() const { return 0; }
  void fence_async() {}
};

struct Memory {
  alignas(1024) unsigned char bytes[kPageBytes];
  PageUse use;
  int released = 0, ready = 0;
};

// Sizes of a buffer as its tensor map has them, of one matrix.
struct Shape {
  int64_t inner, rows;
};

class TestPages {
 public:
  std::vector<std::unique_ptr<Memory>> pages;
  const unsigned char* full(int i) { return pages.at(i)->bytes; }
  const unsigned char* at(int i) { return full(i); }
  unsigned char* writable(int i) { return pages.at(i)->bytes; }
  void release(int i) { ++pages.at(i)->released; }
  void ready(int i) { ++pages.at(i)->ready; }
};

void load(Memory& page, const Shape& shape, const char* matrix) {
  const PageUse& use = page.use;
  use.for_boxes([&](const Box& box) {
    unsigned char* to = page.bytes + box.at;
    if (use.pieces) {
      memcpy(to, matrix + (box.y * int64_t{use.inner} + box.x) * 2, box.bytes);
      return;
    }
    for (int r = 0; r < kBoxRows; ++r) {
      for (int x = 0; x < 64; ++x) {
        const int64_t row = box.y + r, col = box.x + x;
        uint16_t value = 0;
        if (row < shape.rows && col < shape.inner) memcpy(&value, matrix + (row * shape.inner + col) * 2, 2);
        memcpy(to + tile_offset(r, 2 * x), &value, 2);
      }
    }
  });
}

void store(const Memory& page, const Shape& shape, char* matrix) {
  const PageUse& use = page.use;
  const bool add = use.buffer == Buffer::X;
  const int size = add ? 4 : 2;
  use.for_boxes([&](const Box& box) {
    for (int r = 0; r < kBoxRows; ++r) {
      for (int x = 0; x < kTileRowBytes / size; ++x) {
        const int64_t row = box.y + r, col = box.x + x;
        if (row >= shape.rows || col >= shape.inner) continue;
        char* to = matrix + (row * shape.inner + col) * size;
        const unsigned char* from = page.bytes + box.at + tile_offset(r, x * size);
        if (add) {
          *reinterpret_cast<float*>(to) += *reinterpret_cast<const float*>(from);
        } else {
          memcpy(to, from, size);
        }
      }
    }
  });
}

}  // namespace
}  // namespace mk

// 0, or what was done to pages that should not have been. buffers, layer_stride and shapes: [tp][kBuffers].
extern "C" int run_matmul(const mk::Dims* dims, int rank, void* const* buffers, const uint64_t* layer_stride,
                          const mk::Shape* shapes, const int32_t* step_words, int layer,
                          const int32_t* record) {
  using namespace mk;
  const Sizes d = sizes_of(dims[rank]);
  Params params{};
  params.dims = dims;
  params.buffers = buffers;
  params.layer_stride = layer_stride;
  params.step_words = step_words;
  const StepView step = step_view(step_words, d);
  Task task;
  memcpy(task.record, record, sizeof task.record);
  task.where = {kBody, layer, 0, layer};
  TestPages pages;
  for_pages(d, step, task, [&](const PageUse& use) {
    auto page = std::make_unique<Memory>();
    memset(page->bytes, 0xFF, sizeof page->bytes);
    page->use = use;
    const int b = rank * kBuffers + static_cast<int>(use.buffer);
    if (use.fill != Fill::kOutput) {
      // z counts matrices: a layer, or of gate and up a half of one.
      const int64_t z = use.pieces ? 0 : use.z - (use.buffer == Buffer::W_GATE_UP ? 2 * layer : use.z);
      const char* base = static_cast<const char*>(params.at(rank, use.buffer, layer));
      load(*page, shapes[b], base + z * shapes[b].rows * shapes[b].inner * 2);
    }
    pages.pages.push_back(std::move(page));
    return true;
  });
  for (int warp = 0; warp < kConsumerWarps; ++warp) {
    Host p;
    const Call call{&params, &d, &step, nullptr, 0, &task.where, warp};
    matmul(p, call, task.record, pages);
  }
  for (const auto& page : pages.pages) {
    const bool output = page->use.fill == Fill::kOutput;
    if (page->released != (output ? 0 : kConsumerWarps)) return 1;
    if (page->ready != (output ? kConsumerWarps : 0)) return 2;
    if (!output) continue;
    const Buffer buffer = page->use.buffer;
    const bool partial = buffer == Buffer::REDUCE;
    const Ranks ranks = partial ? residual_ranks(d, operands<OPartial>(record).row) : own_rank(d);
    for (int to = ranks.begin; to < ranks.end; ++to) {
      const Shape& shape = shapes[to * kBuffers + static_cast<int>(buffer)];
      char* matrix = static_cast<char*>(params.at(to, buffer, layer));
      if (partial) matrix += page->use.z * shape.rows * shape.inner * 2;
      store(*page, shape, matrix);
    }
  }
  return 0;
}
