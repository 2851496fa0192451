#include "remote.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

namespace mk {
namespace {

// Access to the pages of [to, to + bytes).
void protect(void* to, int64_t bytes, int access) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(to) / page * page;
  mprotect(reinterpret_cast<void*>(begin), reinterpret_cast<uintptr_t>(to) + bytes - begin, access);
}

void audited_store(const Call& call, void* to, const void* from, int64_t bytes) {
  std::lock_guard lock(call.audit->mutex);
  protect(to, bytes, PROT_READ | PROT_WRITE);
  memcpy(to, from, bytes);
  protect(to, bytes, PROT_NONE);
  call.audit->stores.push_back(
      {reinterpret_cast<uint64_t>(to), bytes, call.list, call.layer, call.record, call.dims->rank});
}

}  // namespace

void store_remote(const Call& call, void* to, const void* from, int64_t bytes) {
  *call.link_bytes += bytes;
  if (call.audit)
    audited_store(call, to, from, bytes);
  else
    memcpy(to, from, bytes);
}

}  // namespace mk
