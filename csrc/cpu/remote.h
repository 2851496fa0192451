// Stores into buffers of other ranks.
#pragma once
#include "kernels.h"

namespace mk {

// The only way to another rank's memory: copies, and counts the bytes as the calling rank's.
void store_remote(const Call& call, void* to, const void* from, int64_t bytes);

}  // namespace mk
