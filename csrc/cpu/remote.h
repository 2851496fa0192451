// Stores into buffers of other ranks.
#pragma once
#include <mutex>
#include <vector>

#include "kernels.h"

namespace mk {

// The only way to another rank's memory: copies, and counts the bytes as the calling rank's.
void store_remote(const Call& call, void* to, const void* from, int64_t bytes);

// One call of it. `record` is a row of `list`: a segment's records, or the queues'.
struct RemoteStore {
  uint64_t address;
  int64_t bytes;
  int32_t list, layer, record, rank;
};

// What an audited engine does besides: it keeps a list, and other ranks' memory, which no page of may be
// accessible else, is opened for the length of each store.
struct Audit {
  std::mutex mutex;
  std::vector<RemoteStore> stores;
};

}  // namespace mk
