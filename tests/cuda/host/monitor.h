// Checks that the warps of a block access each page of shared memory only in the right stage. A page is free,
// loading, full (consumers may read an input page and write an output page), ready (the storer may store an
// output page), and free again. Also checks that a fence orders generic accesses, made by ordinary
// instructions, before asynchronous ones, made by bulk copies.
#pragma once
#include <stdint.h>
#include <string.h>

#include <string>

#include "../../../csrc/cuda/block.h"

namespace mk {

class Monitor {
 public:
  Monitor(unsigned char* pages, std::string name) : pages_(pages), name_(std::move(name)) { poison_all(); }

  // Each of these functions checks an access by warp `warp` and returns an error, or an empty string if the
  // access is allowed.
  std::string load(const void* at, int warp) {
    const int s = slot(at);
    State& page = state_[s];
    if (page.stage != kFree && !(page.stage == kLoading && page.loader == warp))
      return tell(warp, "loads into", s);
    page.stage = kLoading;
    page.loader = warp;
    if (const int who = page.reads | page.writes)
      return tell(warp, "loads without a fence by warp " + std::to_string(__builtin_ctz(who)) + " into", s);
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
      return tell(warp, "stores without a fence by warp " + std::to_string(__builtin_ctz(who)), s);
    return "";
  }
  void stored(const void* at) { --state_[slot(at)].storing; }
  void fence(int warp) {
    for (State& page : state_) page.reads &= ~(1 << warp), page.writes &= ~(1 << warp);
  }

  void filled(int s) { state_[s].stage = kFull; }
  void ready(int s) { state_[s].stage = kReady; }
  // Called when a page is released: by all consumer warps of the block, or by the storer on their behalf.
  std::string emptied(int s) {
    State& page = state_[s];
    std::string wrong;
    if (page.stage != kFull && page.stage != kReady) wrong = tell(-1, "has released", s);
    if (page.storing > 0) wrong = tell(-1, "has released, while a store still reads it,", s);
    page.stage = kFree;
    page.loader = -1;
    memset(pages_ + s * kPageBytes, 0xFF, kPageBytes);  // NaN both as bf16 and as float32
    return wrong;
  }
  const std::string& name() const { return name_; }

 private:
  enum Stage { kFree, kLoading, kFull, kReady };
  struct State {
    Stage stage = kFree;
    int loader = -1, reads = 0, writes = 0;  // reads, writes: masks of warps with unfenced generic accesses
    int storing = 0;                         // number of stores that have not read the page yet
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
