#include "remote.h"

#include <string.h>

namespace mk {

void store_remote(const Call& call, void* to, const void* from, int64_t bytes) {
  *call.link_bytes += bytes;
  memcpy(to, from, bytes);
}

}  // namespace mk
