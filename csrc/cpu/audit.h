// Checks that ranks that run as separate processes touch each other's memory only through store_remote. Lists
// these stores, so that they can be compared with the regions that the instructions declare.
#pragma once
#include <mutex>
#include <vector>

#include "kernels.h"

namespace mk {

// One call of store_remote. `segment`, `layer` and `number` identify the instruction, as in a trace.
struct RemoteStore {
  uint64_t address;
  int64_t bytes;
  int32_t segment, layer, number, rank;
};

// An audit of all accesses to the windows of this process. A window is memory of another rank that this
// process maps without read or write permission, so that any access raises SIGSEGV and ends the process. A
// process can have only one audit at a time, because the signal handler that reports the access uses global
// variables.
class Audit {
 public:
  // When a forbidden access is about to end the process, the reason is written to `words`, or to standard
  // error if `words` is null. `words` is memory of `size` bytes that other processes can still read
  // afterwards.
  Audit(char* words, int64_t size);
  ~Audit();
  void watch(const void* window, int64_t bytes);
  // Copies `bytes` bytes from `from` to `to`, which is in a window, and lists the store. Access to the window
  // is permitted only during the copy.
  void store(const Call& call, void* to, const void* from, int64_t bytes);
  std::vector<RemoteStore> stores;  // all stores since the caller last cleared it

 private:
  std::mutex mutex_;
};

// While this object exists, the report of a forbidden access by this thread names the instruction of `call`.
// Does nothing if there is no audit.
class Audited {
 public:
  explicit Audited(const Call& call);
  ~Audited();
};

}  // namespace mk
