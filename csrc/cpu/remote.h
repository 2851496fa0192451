// Stores into buffers of other ranks.
#pragma once
#include "kernels.h"

namespace mk {

// The only function that writes another rank's memory: copies, and adds the bytes to the calling rank's
// count.
void store_remote(const Call& call, void* to, const void* from, int64_t bytes);

}  // namespace mk
