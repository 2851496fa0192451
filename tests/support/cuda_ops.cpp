// Runs one instruction's body on the host as eight consumer warps, each a thread, with pages filled as plan.h
// lists them and as the bulk copy engine would.
#include <barrier>
#include <cstring>
#include <thread>
#include <vector>

#include "plan.h"
//
#include "ops/attention.h"
#include "ops/embed.h"
#include "ops/norm.h"
#include "ops/reduce.h"
#include "ops/rope.h"
#include "ops/sample.h"

namespace {

using namespace mk;

struct Warp {
  static constexpr int kLanes = 1;
  std::barrier<>& meeting;

  int lane() const { return 0; }
  void consumer_sync() { meeting.arrive_and_wait(); }
  int32_t arrive_acq_rel(int32_t* at) { return __atomic_fetch_add(at, 1, __ATOMIC_ACQ_REL); }
  void fence_async() {}
};

// Each warp fills pages of its own.
class FilledPages {
 public:
  FilledPages(const Call& call, const Task& task, int32_t kv_pages, int32_t* done)
      : call_(call), done_(done) {
    const Sizes& d = *call.dims;
    const int64_t heads = int64_t{kv_pages} * d.rank_kv_heads();
    keys_ = {call.at<uint16_t>(Buffer::K_CACHE), heads * d.head_dim, d.page};
    values_ = {call.at<uint16_t>(Buffer::V_CACHE), heads * d.page, d.head_dim};
    for_pages(d, *call.step, task, [&](const PageUse& use) {
      uses_.push_back(use);
      return true;
    });
  }

  const unsigned char* take() {
    memset(page_, 0xFF, sizeof page_);  // not a number
    const PageUse& use = uses_.at(taken_);
    const Tensor& tensor = use.buffer == Buffer::K_CACHE ? keys_ : values_;
    use.for_boxes([&](const Box& box) {
      for (int32_t r = 0; r < kBoxRows; ++r) {
        for (int32_t c = 0; c < kTileInner; ++c) {
          const int64_t y = box.y + r, x = box.x + c;
          const uint16_t value = y < tensor.rows && x < tensor.inner ? tensor.first[y * tensor.inner + x] : 0;
          memcpy(page_ + swizzle(static_cast<uint32_t>(box.at + r * kTileRowBytes + 2 * c)), &value, 2);
        }
      }
    });
    return page_;
  }
  void release() {
    memset(page_, 0xFF, sizeof page_);
    ++taken_;
  }
  void skip(int n) { taken_ += n; }
  void done(int item) { __atomic_fetch_add(done_ + item, 1, __ATOMIC_RELAXED); }
  bool all_taken() const { return taken_ == uses_.size(); }

 private:
  struct Tensor {
    const uint16_t* first;
    int64_t rows, inner;
  };

  const Call& call_;
  int32_t* done_;
  Tensor keys_, values_;
  std::vector<PageUse> uses_;
  size_t taken_ = 0;
  alignas(1024) unsigned char page_[kPageBytes];
};

void run(Warp& p, const Call& call, const Task& task, FilledPages& pages) {
  const int32_t* r = task.record;
  const Opcode opcode = static_cast<Opcode>(task.opcode());
  switch (opcode) {
    case Opcode::embed:
      return embed(p, call, operands<Embed>(r));
    case Opcode::rope:
      return rope(p, call, operands<Rope>(r));
    case Opcode::first_norm:
    case Opcode::attn_norm:
    case Opcode::next_norm:
    case Opcode::mlp_norm:
    case Opcode::final_norm:
      return norm(p, call, opcode, operands<FinalNorm>(r));
    case Opcode::o_reduce:
    case Opcode::down_reduce:
      return reduce(p, call, opcode, operands<OReduce>(r));
    case Opcode::attention:
      return attention(p, call, operands<Attention>(r), pages);
    case Opcode::sample:
      return sample(p, call, operands<Sample>(r));
    default:
      return;
  }
}

}  // namespace

// buffers: [tp][kBuffers], the layer's part; scratch: [2][vocab]; done: calls of Pages::done by item. Gives
// the number of warps that did not take all pages.
extern "C" int run_op(const Dims* dims, const int32_t* step_words, void* const* buffers,
                      const int32_t* record, int32_t kv_pages, float* scratch, int32_t* done) {
  const std::vector<uint64_t> strides(static_cast<size_t>(dims->tp) * kBuffers, 0);
  Params params{};
  params.buffers = buffers;
  params.layer_stride = strides.data();
  params.sample_scratch = scratch;
  const Sizes sizes = sizes_of(*dims);
  const StepView step = step_view(step_words, sizes);
  Task task{};
  memcpy(task.record, record, sizeof task.record);
  Scratch shared;
  memset(&shared, 0xFF, sizeof shared);
  std::barrier meeting(kConsumerWarps);
  int32_t unfinished = 0;
  std::vector<std::thread> threads;
  for (int w = 0; w < kConsumerWarps; ++w) {
    threads.emplace_back([&, w] {
      Warp p{meeting};
      const Call call{&params, &sizes, &step, &shared, 0, &task.where, w};
      FilledPages pages(call, task, kv_pages, done);
      run(p, call, task, pages);
      if (!pages.all_taken()) __atomic_fetch_add(&unfinished, 1, __ATOMIC_RELAXED);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return unfinished;
}
