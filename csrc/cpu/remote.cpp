#include "remote.h"

#include <string.h>

#include "audit.h"

namespace mk {

void store_remote(const Call& call, void* to, const void* from, int64_t bytes) {
  *call.link_bytes += bytes;
  if (call.audit != nullptr) {
    call.audit->store(call, to, from, bytes);
  } else {
    memcpy(to, from, bytes);
  }
}

}  // namespace mk
