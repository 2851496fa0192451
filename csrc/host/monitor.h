// Checks the life of a block's pages: every page is free, loading, full (an output page may now be written),
// ready (an output page only), and free again. Only fences order the generic and the asynchronous proxy.
#pragma once
#include <stdint.h>
#include <string.h>

#include <string>

#include "../cuda/block.h"

namespace mk {

class Monitor {
 public:
  Monitor(unsigned char* pages, std::string name) : pages_(pages), name_(std::move(name)) { poison_all(); }

  // Each function returns an error, or an empty string. `warp` is the acting warp.
  std::string load(const void* at, int warp) {
    const int s = slot(at);
    State& page = state_[s];
    if (page.stage != kFree && !(page.stage == kLoading && page.loader == warp))
      return tell(warp, "loads into", s);
    page.stage = kLoading;
    page.loader = warp;
    if (const int who = page.reads | page.writes)
      return tell(warp, "loads without a fence of warp " + std::to_string(__builtin_ctz(who)) + " into", s);
    return "";
  }
  std::string read(const void* at, int warp, bool generic) {
    const int s = slot(at);
    if (generic) state_[s].reads |= 1 << warp;
    return state_[s].stage == kFull ? "" : tell(warp, "reads", s);
  }
  std::string write(const void* at, int warp) {
    const int s = slot(at);
    state_[s].writes |= 1 << warp;
    return state_[s].stage == kFull ? "" : tell(warp, "writes", s);
  }
  std::string store(const void* at, int warp) {
    const int s = slot(at);
    ++state_[s].storing;
    if (state_[s].stage != kReady) return tell(warp, "stores", s);
    if (const int who = state_[s].writes)
      return tell(warp, "stores without a fence of warp " + std::to_string(__builtin_ctz(who)), s);
    return "";
  }
  void stored(const void* at) { --state_[slot(at)].storing; }
  void fence(int warp) {
    for (State& page : state_) page.reads &= ~(1 << warp), page.writes &= ~(1 << warp);
  }

  void filled(int s) { state_[s].stage = kFull; }
  void ready(int s) { state_[s].stage = kReady; }
  // Called when all consumer warps of the block, or the storer for them, have released the page.
  std::string emptied(int s) {
    State& page = state_[s];
    std::string wrong;
    if (page.stage != kFull && page.stage != kReady) wrong = tell(-1, "has released", s);
    if (page.storing > 0) wrong = tell(-1, "has released, while a store still reads it,", s);
    page.stage = kFree;
    page.loader = -1;
    memset(pages_ + s * kPageBytes, 0xFF, kPageBytes);  // NaN in either format
    return wrong;
  }
  const std::string& name() const { return name_; }

 private:
  enum Stage { kFree, kLoading, kFull, kReady };
  struct State {
    Stage stage = kFree;
    int loader = -1, reads = 0, writes = 0;  // bits of the warps with unfenced generic accesses
    int storing = 0;                         // stores that have not read it yet
  };

  int slot(const void* at) const {
    return static_cast<int>((static_cast<const unsigned char*>(at) - pages_) / kPageBytes);
  }
  std::string tell(int warp, const std::string& what, int s) const {
    static constexpr const char* kStages[] = {"free", "loading", "full", "ready"};
    return name_ + (warp < 0 ? "" : " warp " + std::to_string(warp)) + " " + what + " page slot " +
           std::to_string(s) + ", which is " + kStages[state_[s].stage];
  }
  void poison_all() { memset(pages_, 0xFF, size_t{kPages} * kPageBytes); }

  unsigned char* const pages_;
  const std::string name_;
  State state_[kPages];
};

}  // namespace mk
