#include "audit.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <stdexcept>
#include <string>

namespace mk {
namespace {

// These variables are global because the signal handler has no other way to reach them.
struct Window {
  uintptr_t begin, end;
};
constexpr int kMostWindows = 1024;
Window windows[kMostWindows];
volatile int window_count = 0;
char* last_words = nullptr;
int64_t last_words_size = 0;
struct sigaction before;
thread_local const Call* current_call = nullptr;

void explain(int signal, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (int i = 0; i < window_count; ++i) {
    if (address < windows[i].begin || address >= windows[i].end) continue;
    char text[256];
    const int n =
        current_call == nullptr
            ? snprintf(text, sizeof text,
                       "it touched another rank's memory while it was not running an instruction")
            : snprintf(
                  text, sizeof text,
                  "%s (layer %d, record %d) touched another rank's memory directly, not through store_remote",
                  current_call->name, current_call->layer, current_call->number);
    if (last_words != nullptr) {
      memcpy(last_words, text, static_cast<size_t>(n < last_words_size ? n : last_words_size));
    } else if (write(STDERR_FILENO, text, static_cast<size_t>(n)) > 0) {
      (void)!write(STDERR_FILENO, "\n", 1);
    }
    break;
  }
  // The processor repeats the access when this handler returns. The previous handler then ends the process.
  sigaction(signal, &before, nullptr);
}

// Sets the protection of all memory pages that overlap [begin, begin + bytes).
void protect(void* begin, int64_t bytes, int protection) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(begin) + static_cast<uintptr_t>(bytes);
  mprotect(reinterpret_cast<void*>(first), end - first, protection);
}

}  // namespace

Audit::Audit(char* words, int64_t size) {
  last_words = words;
  last_words_size = size;
  window_count = 0;
  struct sigaction action = {};
  action.sa_sigaction = explain;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, &before);
}

Audit::~Audit() {
  sigaction(SIGSEGV, &before, nullptr);
  last_words = nullptr;
  window_count = 0;
}

void Audit::watch(const void* window, int64_t bytes) {
  if (window_count == kMostWindows)
    throw std::runtime_error("an audit can watch at most " + std::to_string(kMostWindows) +
                             " memory areas of other ranks");
  const auto begin = reinterpret_cast<uintptr_t>(window);
  windows[window_count] = {begin, begin + static_cast<uintptr_t>(bytes)};
  window_count = window_count + 1;
}

void Audit::store(const Call& call, void* to, const void* from, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  protect(to, bytes, PROT_READ | PROT_WRITE);
  memcpy(to, from, static_cast<size_t>(bytes));
  protect(to, bytes, PROT_NONE);
  stores.push_back(
      {reinterpret_cast<uint64_t>(to), bytes, call.segment, call.layer, call.number, call.dims->rank});
}

Audited::Audited(const Call& call) {
  if (call.audit != nullptr) current_call = &call;
}

Audited::~Audited() { current_call = nullptr; }

}  // namespace mk
