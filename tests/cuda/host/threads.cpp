// Runs a launch on threads, in a build with a race detector: `threads IMAGE BUG` runs the launch in the file
// IMAGE, with bug number BUG, and writes the memory back to the file. An image consists of three int64 (the
// size of the memory in bytes, the offset of Params, the number of pointers), the offsets of the pointers in
// the memory, the memory, and the base address that the pointers assume for it.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "bugs.h"
#include "launch.h"
#include "thread_warp.h"

namespace {

using Warp = mk::Planted<mk::ThreadWarp>;

void launch(const mk::Params& params, mk::Bug bug) {
  std::deque<std::unique_ptr<mk::Block<Warp>>> memory;
  std::deque<mk::ThreadBlock> blocks;
  std::vector<std::thread> threads;
  const int32_t count = params.ranks * params.workers * mk::kSms;
  std::vector<mk::Block<Warp>*> by_number;
  for (int32_t i = 0; i < count; ++i) {
    by_number.push_back(memory.emplace_back(std::make_unique<mk::Block<Warp>>()).get());
    mk::ThreadBlock& shared = blocks.emplace_back();
    shared.all.init(mk::kSms * mk::kWarps);
    shared.consumers.init(mk::kConsumerWarps);
  }
  for (int32_t i = 0; i < count; ++i) {
    for (int w = 0; w < mk::kWarps; ++w) {
      threads.emplace_back([&, w, i] {
        const int32_t sm = i % mk::kSms, first = i - sm;
        Warp warp(bug, params, &by_number[first], blocks[first], blocks[i], sm, w);
        mk::run_warp(warp, *by_number[i], params, i);
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  FILE* file = fopen(arguments[1], "r+b");
  if (file == nullptr) return 2;
  int64_t header[3], base = 0;
  if (fread(header, sizeof header, 1, file) != 1) return 2;
  std::vector<int64_t> pointers(header[2]);
  const auto bytes = static_cast<size_t>(header[0]);
  char* image = static_cast<char*>(aligned_alloc(1024, (bytes + 1023) / 1024 * 1024));
  if (fread(pointers.data(), sizeof(int64_t), pointers.size(), file) != pointers.size()) return 2;
  const long start = ftell(file);
  if (fread(image, 1, bytes, file) != bytes || fread(&base, sizeof base, 1, file) != 1) return 2;
  const int64_t moved = reinterpret_cast<int64_t>(image) - base;
  for (int64_t at : pointers) *reinterpret_cast<int64_t*>(image + at) += moved;
  const mk::Params& params = *reinterpret_cast<const mk::Params*>(image + header[1]);
  launch(params, static_cast<mk::Bug>(atoi(arguments[2])));
  fseek(file, start, SEEK_SET);
  if (fwrite(image, 1, bytes, file) != bytes || fclose(file) != 0) return 2;
  return *params.abort ? 1 : 0;
}
