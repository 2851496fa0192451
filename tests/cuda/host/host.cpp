// Runs launches of the CUDA interpreter on the CPU, for tests. Python calls the functions with C linkage.
#include <string.h>

#include <memory>
#include <vector>

#include "../../../csrc/cuda/bodies.h"
#include "../../../csrc/cuda/roles.h"
#include "host_warp.h"

namespace mk {
namespace {

// Whether each lane uses another shared-memory bank when a warp stores bf16 pairs (4 bytes) in eight rows.
constexpr bool spread(int block) {
  uint32_t banks = 0;
  for (int lane = 0; lane < 32; ++lane)
    banks |= 1u << tile_offset(fragment_row(lane, 0), (8 * block + fragment_col(lane)) * 2) / 4 % 32;
  return banks == ~0u && (block == 0 || spread(block - 1));
}
static_assert(spread(7));

void run(HostWarp& warp, Block<HostWarp>& block, const Params& params, int32_t index) {
  set_up(warp, block, params, index);
  if (warp.warp() < kConsumerWarp) {
    serve(warp, block, params);
  } else {
    consume<HostWarp, Bodies>(warp, block, params);
  }
  report(warp, block, params);
}

// Runs the grids of a launch, one per GPU. Returns what went wrong, or an empty string.
std::string launch(const std::vector<const Params*>& grids) {
  size_t count = 0;
  for (const Params* params : grids) count += static_cast<size_t>(params->ranks * params->workers);
  HostWorld world{grids, Fibres(count * kWarps), false, ""};
  std::vector<std::unique_ptr<Block<HostWarp>>> memory;
  std::deque<HostBlock> blocks;
  std::deque<HostWarp> warps;
  for (const Params* params : grids) {
    for (int32_t i = 0; i < params->ranks * params->workers; ++i) {
      Block<HostWarp>& block = *memory.emplace_back(std::make_unique<Block<HostWarp>>());
      const std::string name = "block " + std::to_string(blocks.size());
      HostBlock& shared = blocks.emplace_back(world, *params, block, name);
      for (int w = 0; w < kWarps; ++w) {
        HostWarp& warp = warps.emplace_back(shared, w);
        world.fibres.add([&warp, &block, params, i] { run(warp, block, *params, i); });
      }
    }
  }
  // If all warps wait, their waits are recorded and the launch is aborted, as by the watchdog. If they still
  // wait after the abort, their waits just end.
  world.fibres.run([&] {
    if (*grids[0]->abort)
      world.leaving = true;
    else
      for (HostWarp& warp : warps) warp.note();
    world.fail("deadlock");
  });
  for (const HostBlock& block : blocks)
    if (world.wrong.empty() && !block.ahead.empty())
      world.wrong = block.name + " prefetched a page that it did not load";
  return world.wrong;
}

}  // namespace
}  // namespace mk

extern "C" {

// Runs `count` grids, which are one launch, and writes to `message` what went wrong.
__attribute__((visibility("default"))) void mk_host_run(const mk::Params* const* grids, int32_t count,
                                                        char* message, int32_t size) {
  strncpy(message, mk::launch({grids, grids + count}).c_str(), size - 1);
  message[size - 1] = 0;
}

// Lists the pages of an instruction, given by its record. Each page has three numbers: its fields `fill`,
// `pieces` and `whole` (struct PageUse in plan.h). Returns the number of pages.
__attribute__((visibility("default"))) int32_t mk_host_plan(const mk::Dims* dims, const mk::Phase* phases,
                                                            const int32_t* step_words, const int32_t* record,
                                                            int32_t* pages, int32_t capacity) {
  mk::Task task{};
  memcpy(task.record, record, sizeof task.record);
  task.phase = phases[mk::record_phase(record)];
  int32_t n = 0;
  mk::for_pages(mk::sizes_of(*dims), mk::step_view(step_words, *dims), task, [&](const mk::PageUse& use) {
    const int32_t page[] = {static_cast<int32_t>(use.fill), use.pieces, use.whole};
    memcpy(pages + 3 * n, page, sizeof page);
    return ++n < capacity;
  });
  return n;
}

}  // extern "C"
