// Runs a launch on fibres for tests, behind a C interface.
#include <string.h>

#include <deque>

#include "../../../csrc/cuda/bodies.h"
#include "../../../csrc/cuda/roles.h"
#include "bugs.h"
#include "fibre_warp.h"

namespace mk {
namespace {

using Warp = Planted<FibreWarp>;

constexpr int kReportedWaits = 40;

class Launch {
 public:
  // The bug is planted in block `where`, or in all blocks if `where` is -1.
  Launch(const Params& params, uint64_t seed, Bug bug, int32_t where)
      : seed_(seed),
        count_(params.ranks * params.workers * kSms),
        world_(params, seed, count_ * kWarps),
        by_number_(count_) {
    for (int32_t i = 0; i < count_; ++i) {
      Block<Warp>& memory = *memory_.emplace_back(std::make_unique<Block<Warp>>());
      const int32_t worker = i / kSms;
      const std::string name = "rank " + std::to_string(params.first_rank + worker / params.workers) +
                               " worker " + std::to_string(worker % params.workers) +
                               (kSms > 1 ? " SM " + std::to_string(i % kSms) : "");
      FibreBlock& block = blocks_.emplace_back(world_, memory, &by_number_[worker * kSms], name);
      by_number_[i] = &block;
      for (int w = 0; w < kWarps; ++w) {
        Warp& warp = warps_.emplace_back(where < 0 || where == i ? bug : Bug::kNone, block, w);
        world_.scheduler.add([this, &warp, &memory, i] { run(warp, memory, world_.params, i); });
      }
    }
  }

  // Returns the failure, with the seed that reproduces it, or an empty string if nothing failed.
  std::string run() {
    if (!world_.scheduler.run([this] { return stuck(); })) world_.wrong += "\nand an abort did not end it";
    for (const FibreBlock& block : blocks_) {
      if (world_.wrong.empty() && !*world_.params.abort && !block.ahead.empty())
        world_.wrong = block.name + " prefetched a page that it did not load";
    }
    return world_.wrong.empty() ? "" : "seed " + std::to_string(seed_) + ": " + world_.wrong;
  }

 private:
  static void run(Warp& warp, Block<Warp>& block, const Params& params, int32_t index) {
    set_up(warp, block, params, index);
    if (warp.warp() < kConsumerWarp) {
      serve(warp, block, params);
    } else {
      consume<Warp, Bodies>(warp, block, params);
    }
    report(warp, block, params);
    if constexpr (kSms > 1) warp.sync_block();
  }
  // Called when no fibre can continue; returns whether to resume the fibres. The first call does what the
  // watchdogs would do: it records all waits and aborts the launch. The failure message lists up to
  // kReportedWaits waits, those for counters first. If some fibres still wait after the abort, the second
  // call makes them stop waiting. A third call returns false.
  bool stuck() {
    if (world_.leaving) return false;
    if (*world_.params.abort) {
      world_.wrong += "\nand after the abort some warps waited for an operation that never completed";
      world_.leave();
      return true;
    }
    std::string counters, others;
    int left = kReportedWaits;
    for (Warp& warp : warps_) {
      const std::string what = warp.describe();
      if (what.empty()) continue;
      warp.note();
      if (left-- > 0) (warp.waits_for_counter() ? counters : others) += "\n  " + what;
    }
    world_.fail("deadlock:" + counters + others);
    return true;
  }

  const uint64_t seed_;
  const int32_t count_;
  FibreWorld world_;
  std::deque<std::unique_ptr<Block<Warp>>> memory_;
  std::vector<FibreBlock*> by_number_;
  std::deque<FibreBlock> blocks_;
  std::deque<Warp> warps_;
};

}  // namespace
}  // namespace mk

extern "C" {

// Runs a launch, with a bug planted in one block, or in all blocks if `block` is -1. If it returns 0,
// `message` describes the failure.
__attribute__((visibility("default"))) int32_t mk_protocol_run(const mk::Params* params, uint64_t seed,
                                                               int32_t bug, int32_t block, char* message,
                                                               int32_t size) {
  mk::Launch launch(*params, seed, static_cast<mk::Bug>(bug), block);
  const std::string wrong = launch.run();
  strncpy(message, wrong.c_str(), size - 1);
  message[size - 1] = 0;
  return wrong.empty();
}

// Lists the copies that fill the pages of an instruction, given by its record. Each copy is a row of twelve
// numbers: the page's number; `fill`, `pieces` and `buffer` of PageUse; the coordinates x, y and z; the byte
// offset in the page; the size in bytes; `item` and `whole` of PageUse; and the result of ahead_cols if a
// prefetch follows the copy, otherwise 0. Returns the number of rows. A page without copies has one row of 0
// bytes.
__attribute__((visibility("default"))) int32_t mk_protocol_plan(const mk::Dims* dims, const mk::Phase* phases,
                                                                const int32_t* step_words,
                                                                const int32_t* record, int32_t layer,
                                                                int32_t* rows, int32_t capacity) {
  mk::Task task{};
  memcpy(task.record, record, sizeof task.record);
  task.where.layer = layer;
  task.phase = phases[mk::record_phase(record)];
  const mk::StepView step = mk::step_view(step_words, *dims);
  int32_t n = 0, page = 0;
  mk::for_pages(mk::sizes_of(*dims), step, task, [&](const mk::PageUse& use) {
    const auto add = [&](const mk::Box& box) {
      if (n++ >= capacity) return;
      const int32_t row[] = {page,
                             static_cast<int32_t>(use.fill),
                             use.pieces,
                             static_cast<int32_t>(use.buffer),
                             box.x,
                             box.y,
                             use.z,
                             box.at,
                             static_cast<int32_t>(box.bytes),
                             use.item,
                             use.whole,
                             use.whole && use.pieces ? mk::ahead_cols(mk::matmul_of(task)) : 0};
      memcpy(rows + 12 * (n - 1), row, sizeof row);
    };
    use.for_boxes(0, 1, add);
    if (use.boxes == 0) add({});
    ++page;
    return n <= capacity;
  });
  return n < capacity ? n : capacity;
}

}  // extern "C"
