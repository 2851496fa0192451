// Where ranks are processes: proof that they touch each other's memory in store_remote only, and a list of
// what they store there, to be compared with what the instructions declare.
#pragma once
#include <mutex>
#include <vector>

#include "kernels.h"

namespace mk {

// `segment`, `layer` and `number` name the instruction as a trace does.
struct RemoteStore {
  uint64_t address;
  int64_t bytes;
  int32_t segment, layer, number, rank;
};

// Windows are other ranks' memory, mapped so that any access faults; a fault ends the process. One audit at a
// time in a process can explain faults.
class Audit {
 public:
  // `words`: `size` bytes for the reason of a fault, which outlive the process; null: standard error.
  Audit(char* words, int64_t size);
  ~Audit();
  void watch(const void* window, int64_t bytes);
  // Opens the window for the time of the copy.
  void store(const Call& call, void* to, const void* from, int64_t bytes);
  std::vector<RemoteStore> stores;  // the caller clears it

 private:
  std::mutex mutex_;
};

// While it lives, faults of this thread are the call's, if that is audited.
class Audited {
 public:
  explicit Audited(const Call& call);
  ~Audited();
};

}  // namespace mk
