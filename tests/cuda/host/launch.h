// Code that both host platforms, fibres and threads, share.
#pragma once
#include "../../../csrc/cuda/bodies.h"
#include "../../../csrc/cuda/roles.h"

namespace mk {

// Runs one warp of a block until it ends.
template <class P>
void run_warp(P& p, Block<P>& block, const Params& params, int32_t index) {
  set_up(p, block, params, index);
  if (p.warp() < kConsumerWarp) {
    serve(p, block, params);
  } else {
    consume<P, Bodies>(p, block, params);
  }
  report(p, block, params);
  if constexpr (kSms > 1) p.sync_block();
}

}  // namespace mk
