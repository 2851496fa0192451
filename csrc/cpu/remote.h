// Stores data in buffers of other ranks.
#pragma once
#include "kernels.h"

namespace mk {

// Copies `bytes` bytes to another rank's memory and adds them to the calling rank's link_bytes. No other
// function writes another rank's memory.
void store_remote(const Call& call, void* to, const void* from, int64_t bytes);

}  // namespace mk
