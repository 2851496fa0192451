// Runs a block: it sets up shared memory, then every warp plays its role until the stream ends.
#pragma once
#include "consumer.h"
#include "controller.h"
#include "loaders.h"
#include "storer.h"
#include "watchdog.h"

namespace mk {

// Called by all warps of block `index` of the grid. The block has a stream: index < ranks * workers * kSms.
template <class P>
MK_FN void set_up(P& p, Block<P>& block, const Params& params, int32_t index) {
  if (p.warp() == kControllerWarp && p.lane() == 0) {
    block.index = index;
    block.rank = params.first_rank + index / kSms / params.workers;
    block.worker = index / kSms % params.workers;
    block.dims = sizes_of(params.dims[block.rank]);
    block.step = step_view(params.step_words, block.dims);
    MK_LOOP for (int i = 0; i < kPages; ++i) {
      p.init(block.full[i], 2);
      p.init(block.ready[i], kConsumerWarps);
      p.init(block.empty[i], kSms * kConsumerWarps);
    }
    p.init(block.parted, kSms * 2);
    for (Late& late : block.late) late.what = nullptr;
    MK_LOOP for (Slot<P>& slot : block.slots) {
      p.init(slot.fetched, 1);
      p.init(slot.inputs, 1);
      p.init(slot.loaded, kSms * 2);
      p.init(slot.outputs, kConsumerWarps);
      p.init(slot.retired, kSms * kRetiring);
    }
  }
  const int32_t rank = params.first_rank + index / kSms / params.workers;
  MK_LOOP for (int i = p.warp(); i < params.dims->tp * kBuffers * kMaps; i += kWarps) {
    const int copy = i / kMaps;
    const uint64_t used = copy / kBuffers == rank ? params.mapped : params.mapped_everywhere;
    if (used >> copy % kBuffers & 1) p.acquire_map(params.maps[i]);
  }
  p.sync_block();
}

// The roles of the warps before kConsumerWarp.
template <class P>
MK_FN void serve(P& p, Block<P>& block, const Params& params) {
  switch (p.warp()) {
    case kControllerWarp:
      Controller<P>(p, block, params).run();
      break;
    case kWeightWarp:
    case kInputWarp:
      load(p, block, params);
      break;
    case kStorerWarp:
      store_outputs(p, block, params);
      break;
  }
}

}  // namespace mk
