// The main code of a thread block: it initialises the shared memory, then each warp runs its role
// (controller, loader, consumer or storer) until the instruction stream ends.
#pragma once
#include "consumer.h"
#include "controller.h"
#include "loaders.h"
#include "storer.h"
#include "watchdog.h"

namespace mk {

// Initialises the shared memory of block number `index` of the grid. All warps of the block call it. The
// block must have an instruction stream, so `index` must be below ranks * workers.
template <class P>
MK_FN void set_up(P& p, Block<P>& block, const Params& params, int32_t index) {
  if (p.warp() == kControllerWarp && p.lane() == 0) {
    block.index = index;
    block.rank = params.first_rank + index / params.workers;
    block.worker = index % params.workers;
    Dims dims = params.dims[block.rank];
    if constexpr (!kHasExperts) dims.expert_parallel = 0;  // leaves out the code for the other case
    block.dims = sizes_of(dims);
    block.step = step_view(params.step_words, block.dims);
    MK_LOOP for (int i = 0; i < kRing; ++i) {
      p.init(block.full[i], 1);
      p.init(block.empty[i], kConsumerWarps + 1);
    }
    MK_LOOP for (auto& stage : block.stages) {
      p.init(stage.full[0], 1);
      p.init(stage.full[1], 1);
      p.init(stage.ready, kConsumerWarps);
      p.init(stage.empty, kConsumerWarps);
    }
    for (Late& late : block.late) late.what = nullptr;
    block.ahead = {};
    block.traced = 0;
    MK_LOOP for (Slot<P>& slot : block.slots) {
      p.init(slot.fetched, 1);
      p.init(slot.inputs, 1);
      p.init(slot.loaded, 2);
      p.init(slot.outputs, kConsumerWarps);
      p.init(slot.retired, kRetiring);
    }
  }
  const int32_t rank = params.first_rank + index / params.workers;
  MK_LOOP for (int i = p.warp(); i < params.dims->tp * kBuffers * kMaps; i += kWarps) {
    const int copy = i / kMaps;
    const uint64_t used = copy / kBuffers == rank ? params.mapped : params.mapped_everywhere;
    if (used >> copy % kBuffers & 1) p.acquire_map(params.maps[i]);
  }
  p.sync_block();
}

// Runs the role of a warp that is not a consumer: controller, weight loader, input loader or storer.
template <class P>
MK_FN void serve(P& p, Block<P>& block, const Params& params) {
  if (p.warp() == kControllerWarp) return Controller<P>(p, block, params).run();
  if (p.warp() == kStorerWarp) return store_outputs(p, block, params);
  load(p, block, params);
}

}  // namespace mk
