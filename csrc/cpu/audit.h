// For ranks that are processes: checks that they touch each other's memory only in store_remote, and lists
// their stores, to be compared with the declared regions.
#pragma once
#include <mutex>
#include <vector>

#include "kernels.h"

namespace mk {

// `segment`, `layer` and `number` identify the instruction as in a trace.
struct RemoteStore {
  uint64_t address;
  int64_t bytes;
  int32_t segment, layer, number, rank;
};

// Windows are other ranks' memory, mapped without access, so that any access ends the process. Only one audit
// at a time per process can explain such faults.
class Audit {
 public:
  // The reason of a fault is written to `words`, which has `size` bytes and outlives the process, or to
  // standard error if `words` is null.
  Audit(char* words, int64_t size);
  ~Audit();
  void watch(const void* window, int64_t bytes);
  // Copies; the window is accessible only during the copy.
  void store(const Call& call, void* to, const void* from, int64_t bytes);
  std::vector<RemoteStore> stores;  // the caller clears it

 private:
  std::mutex mutex_;
};

// While it exists, faults of this thread are attributed to the call, if the call is audited.
class Audited {
 public:
  explicit Audited(const Call& call);
  ~Audited();
};

}  // namespace mk
