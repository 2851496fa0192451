// Runs a launch of translated PTX. Here are the functions that world.h declares and the one that Python
// calls; the headers included here implement `Thread`.
#include <signal.h>

#include "tensor.h"

namespace ptx {

int planted = 0;

namespace {
constexpr size_t kStackBytes = size_t{1} << 19;
constexpr int kMostBlocks = 256;
constexpr uint64_t kIdleNs = 1'000'000;           // step of virtual time, which passes while all threads wait
constexpr uint64_t kEndless = 1'000'000'000'000;  // a watchdog with a longer time limit counts as off
constexpr int kIdleSteps = 2000;                  // after so many steps, only a watchdog can end the launch

}  // namespace

// -- set-up

void World::make_blocks() {
  random_ = schedule.seed * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u;
  parties_.push_back({nullptr, "nobody"});
  static char *memory = reserve(kMostBlocks * size_t{kSpan}),
              *stacks = reserve(kMostBlocks * kThreads * kStackBytes);
  memory_ = memory, stacks_ = stacks;
  for (Grid& grid : grids_) {
    for (int b = 0; b < grid.blocks; ++b) {
      if (blocks_.size() == kMostBlocks) throw std::runtime_error("the launch has too many blocks");
      auto block = std::make_unique<Block>();
      block->grid = &grid;
      block->index = static_cast<uint32_t>(b);
      block->memory = memory_ + blocks_.size() * kSpan;
      memset(block->memory, 0xFF, kReserved + mk::kSharedBytes);
      make_threads(*block);
      blocks_.push_back(std::move(block));
    }
  }
}

void World::make_threads(Block& block) {
  const std::string where = "block " + std::to_string(block.index) +
                            (grids_.size() > 1 ? " of GPU " + std::to_string(block.grid->device) : "");
  static const char* const roles[] = {"controller", "weight loader", "storer", "input loader"};
  const uint32_t block_favour = draw(1000);
  for (int w = 0; w < kWarps; ++w) {
    Warp& warp = block.warps[w];
    warp.index = w;
    const std::string role =
        (w < mk::kConsumerWarp ? roles[w] : "consumer " + std::to_string(w - mk::kConsumerWarp)) + " of " +
        where;
    warp.party = party(block, role);
    const uint32_t warp_favour = draw(1000);
    for (int lane = 0; lane < kLanes; ++lane) {
      Thread& thread = threads_.emplace_back();
      thread.tid = static_cast<uint32_t>(w * kLanes + lane);
      thread.lane = static_cast<uint32_t>(lane);
      thread.ctaid = block.index;
      thread.block = &block;
      thread.warp = &warp;
      thread.knows = &knowledge_.emplace_back();
      thread.knows->party = warp.party;
      thread.knows->lane = thread.lane;
      thread.favour = schedule.unfair == 2 ? block_favour : warp_favour;
      // The tops of the stacks differ, so that the stacks do not all compete for the same lines of the cache.
      const size_t n = fibres_.size();
      thread.fibre = &fibres_.emplace_back(stacks_ + n * kStackBytes, kStackBytes - (n + 1) % 61 * 64,
                                           [this, &thread] { run_thread(thread); });
      warp.lanes[lane] = &thread;
      runnable_.push_back(&thread);
      ++live_;
    }
  }
}

// -- switches between threads

void World::run_thread(Thread& thread) {
  kernel(thread);
  thread.ended = true;
  --live_;
  Block& block = *thread.block;
  if (--block.live == 0 && block.copies > 0) fail(thread, "its block ends while bulk copies use its memory");
}

// Chooses the next thread to run. Mostly, it is one of the 32 that became ready last: these are often lanes
// of one warp, whose stacks are still in the processor's cache. Otherwise, it is any thread that can run.
Thread& World::choose() {
  const uint32_t count = static_cast<uint32_t>(runnable_.size());
  const auto random = [this, count] { return draw(count); };
  if (count > kLanes && draw(8) != 0) {
    std::swap(runnable_[count - 1 - draw(kLanes)], runnable_.back());
    Thread& thread = *runnable_.back();
    runnable_.pop_back();
    return thread;
  }
  uint32_t best = random();
  if (schedule.unfair && draw(16) != 0) {
    for (int i = 0; i < 3; ++i) {
      const uint32_t other = random();
      if (runnable_[other]->favour > runnable_[best]->favour) best = other;
    }
  }
  std::swap(runnable_[best], runnable_.back());
  Thread& thread = *runnable_.back();
  runnable_.pop_back();
  return thread;
}

// Called when all threads wait. Advances virtual time, which ends the waits that have a time limit. Returns
// false if no thread will ever continue.
bool World::pass_time() {
  time += kIdleNs;
  const uint64_t limit = grids_[0].params->timeout_ns;
  const uint64_t steps = limit > kEndless ? kIdleSteps : kIdleSteps + 4 * (limit + 2'000'000'000) / kIdleNs;
  if (static_cast<uint64_t>(++idle_) > steps) return false;
  const int idle = idle_;
  bool any = !sleeping.empty();
  wake(sleeping);
  for (const auto& block : blocks_) {
    for (auto& [offset, barrier] : block->barriers) {
      any = any || !barrier.waiting.empty();
      wake(barrier.waiting);
    }
  }
  idle_ = idle;
  return any;
}

std::string World::run() {
  bool stuck = false;
  while (live_ > 0 && !stuck) {
    if (switches > schedule.limit) fail("the launch takes too long"), stuck = true;
    const uint32_t threads = static_cast<uint32_t>(runnable_.size()),
                   copies = static_cast<uint32_t>(copies_.size());
    bool copy = threads == 0;
    if (threads > 0 && copies > 0) {
      switch (static_cast<Copies>(schedule.copies)) {
        case Copies::kRandom:
          copy = draw(64) == 0;
          break;
        case Copies::kEarly:
          copy = draw(3) != 0;
          break;
        case Copies::kLate:
          copy = draw(1 << 16) == 0;
          break;
      }
    }
    if (copy && copies > 0) {
      std::swap(copies_[draw(copies)], copies_.back());
      const std::function<void()> perform = std::move(copies_.back());
      copies_.pop_back();
      perform();
      idle_ = 0;
      continue;
    }
    if (threads == 0) {
      if (!pass_time()) fail("deadlock"), stuck = true;
      continue;
    }
    if (schedule.abort_at && switches == schedule.abort_at) {
      for (Grid& grid : grids_) *grid.params->abort = 1;
    }
    current = &choose();
    ++switches;
    current->fibre->resume();
  }
  if (stuck) {
    std::map<std::string, int> where;
    for (const Thread& thread : threads_)
      if (!thread.ended)
        ++where[parties_[thread.warp->party].name + " waits for " + thread.waits + " at " +
                kSites[thread.site]];
    int listed = 0;
    for (const auto& [what, count] : where)
      if (++listed <= 30) failures_.insert("stuck: " + what + " (" + std::to_string(count) + " lanes)");
  } else {
    note_ends();
  }
  std::string out;
  for (const std::string& failure : failures_) out += failure + "\n";
  return out;
}

// Reports copies in flight, and mbarriers that still expect bytes, at the end of a launch.
void World::note_ends() {
  if (!copies_.empty()) fail("bulk copies are in flight when the launch ends");
  for (const auto& block : blocks_)
    for (const auto& [offset, barrier] : block->barriers)
      if (barrier.bytes != 0)
        fail("block " + std::to_string(block->index) + ": a barrier still expects " +
             std::to_string(barrier.bytes) + " bytes");
}

// Returns the regions that the thread's instruction declares.
std::pair<const Region*, const Region*> World::declared(const Thread& t) const {
  const Regions& all = *schedule.regions;
  const mk::Where& where = tasks_[static_cast<size_t>(t.task)];
  if (where.segment < 0) return {all.regions, all.regions};
  const int64_t* start = all.starts[where.segment] + where.number;
  return {all.regions + start[0], all.regions + start[1]};
}

void World::check_global(Thread& t, uint64_t address, uint32_t bytes, bool write) {
  if (!schedule.regions) return;
  const int64_t from = static_cast<int64_t>(address), to = from + bytes, kind = write ? kWrites : kReads;
  const int layer = tasks_[static_cast<size_t>(t.task)].layer;
  const auto has = [&](const Region& r) {
    return r.kinds & kind && r.overlap(from, to, layer) == std::pair{from, to};
  };
  if (t.region && t.region_task == t.task && has(*t.region)) return;
  const Region* buffer = schedule.regions->buffer_at(from);
  if (!buffer) return;  // it is a table of the launch or a counter
  const auto [begin, end] = declared(t);
  t.region = std::find_if(begin, end, has);
  t.region_task = t.task;
  if (t.region != end) return;
  t.region = nullptr;
  // The controller reads it before it publishes an instruction of experts.
  if (!write && t.task == 0 && is_in(mk::Buffer::ROUTES, address)) return;
  // The last box of partial sums also stores zeros in rows without tokens.
  if (write && is_in(mk::Buffer::REDUCE, address)) return;
  fail(t, std::string(write ? "writes" : "reads") + " memory of buffer " + std::to_string(buffer->kinds) +
              " that its instruction does not declare, " + std::to_string(from - buffer->base) +
              " bytes from its start");
}

// -- names

int32_t World::task_of(const mk::Where& where) {
  const auto [entry, added] = task_numbers_.try_emplace({where.segment, where.layer, where.number},
                                                        static_cast<int32_t>(tasks_.size()));
  if (added) tasks_.push_back(where);
  return tasks_.size() < 65536 ? entry->second : 0;
}

namespace {
std::string where_name(const mk::Where& w) {
  if (w.segment < 0) return "between instructions";
  static const char* const segments[] = {"prologue", "body", "epilogue"};
  const std::string layer = w.segment == mk::kBody ? " in layer " + std::to_string(w.layer) : "";
  return "record " + std::to_string(w.number) + " of the " + segments[w.segment] + layer;
}
}  // namespace

std::string World::name(const Thread& thread) const {
  return parties_[thread.warp->party].name + ", lane " + std::to_string(thread.lane) + ", at " +
         kSites[thread.site] + " (" + where_name(tasks_[static_cast<size_t>(thread.task)]) + ")";
}

std::string World::name(const Access& access, uint32_t lanes) const {
  const std::string lane = lanes ? ", lane " + std::to_string(std::countr_zero(lanes)) : "";
  return parties_[access.party].name + lane + ", at " + kSites[access.site] + " (" +
         where_name(tasks_[access.task]) + ")";
}

void World::race(const Access& access, const Access& earlier, uint32_t lanes, uint64_t address) {
  // After an abort, races are no errors: warps run through their instructions without waiting for data.
  for (const Grid& grid : grids_)
    if (*grid.params->abort) return;
  if (!races_.emplace(access.site, earlier.site, access.write, earlier.write).second) return;
  const bool shared = block_at(address) != nullptr;
  const auto kind = [](const Access& a) {
    return std::string(a.write ? "write" : "read") + (a.async ? " (asynchronous)" : "");
  };
  fail(std::string("race in ") + (shared ? "shared" : "global") + " memory: " + kind(access) + " by " +
       name(access, 1u << access.lane) + "; earlier " + kind(earlier) + " by " +
       name(earlier, earlier.async ? 0 : lanes));
}

namespace {
sigjmp_buf beyond_memory;
void leave_launch(int) { siglongjmp(beyond_memory, 1); }
}  // namespace

}  // namespace ptx

// Runs the grids of a launch, one per GPU, and writes what went wrong to `said`. Returns the number of
// switches between threads.
extern "C" uint64_t ptx_run(const mk::Params* const* params, const int32_t* blocks, int32_t grids,
                            const ptx::Schedule* schedule, char* said, int32_t room) {
  using namespace ptx;
  std::vector<Grid> all;
  for (int32_t i = 0; i < grids; ++i) all.push_back({params[i], *params[i], i, blocks[i]});
  planted = schedule->planted;
  World launch(*schedule, all);
  world = &launch;
  struct sigaction handled{}, before;
  handled.sa_handler = leave_launch;
  sigaction(SIGSEGV, &handled, &before);
  const std::string text = sigsetjmp(beyond_memory, 1) == 0
                               ? launch.run()
                               : launch.name(*launch.current) + ": an access to memory that does not exist\n";
  sigaction(SIGSEGV, &before, nullptr);
  world = nullptr;
  strncpy(said, text.c_str(), static_cast<size_t>(room) - 1);
  return launch.switches;
}
