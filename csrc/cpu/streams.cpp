// How the pool's threads execute the instruction streams of a launch. A thread visits its streams in turn and
// executes each instruction whose waits are satisfied.
#include <time.h>

#include <algorithm>

#include "../common/record.h"
#include "interpreter.h"
#include "packing.h"
#include "subnormals.h"

namespace mk {
namespace {

// Maximum bytes of weights that a waiting core prefetches. The L3 cache keeps what the L2 cache evicts.
constexpr int64_t kPrefetchLimit = 4 << 20;
constexpr int64_t kPrefetchSlice = 4 << 10;  // bytes to prefetch before the waits are checked again

// A thread that waits spins first and yields later. It spins for longer than most waits take, because on a
// busy system a thread that yields may lose its core to another process.
constexpr int kSpins = 4000, kYields = 200;
// If there are more threads than cores, a waiting thread spins only briefly, because the thread that it waits
// for may need its core.
constexpr int kCrowdedSpins = 20;
constexpr int kPatience = 10;  // pauses before an idle thread tries to run other threads' instructions
constexpr std::chrono::microseconds kNap{50};

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Pauses a waiting thread: it spins at first, then yields, then sleeps.
class Backoff {
 public:
  explicit Backoff(bool crowded) : spins_(crowded ? kCrowdedSpins : kSpins) {}
  bool patient() const { return count_ < kPatience; }
  void pause() {
    ++count_;
    if (count_ < spins_) {
      relax();
    } else if (count_ < spins_ + kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
  void reset() { count_ = 0; }
  bool sleeps() const { return count_ >= spins_ + kYields; }

 private:
  const int spins_;
  int count_ = 0;
};

}  // namespace

uint64_t clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

void Interpreter::run(int thread) try {
  const std::vector<Cursor*>& own = dealt_[thread];
  if (own.empty()) return;
  const FlushSubnormals flush;
  memory_[thread].scratch.rounded_rows = {};
  Backoff backoff(crowded_);
  size_t other = static_cast<size_t>(thread);
  while (left_.load(std::memory_order_acquire) > 0 && !aborted()) {
    bool moved = false, ended = true;
    Cursor* blocked = nullptr;
    for (Cursor* c : own) {
      const Visit visited = visit(*c, thread);
      moved |= visited == Visit::kMoved;
      ended &= visited == Visit::kEnded;
      if (visited == Visit::kBlocked && blocked == nullptr) blocked = c;
    }
    if (moved) {
      backoff.reset();
      continue;
    }
    if (ended && backoff.sleeps()) return;  // a sleeping thread would delay the end of the launch
    if (blocked != nullptr && fetch_weights(*blocked)) continue;
    // The thread tries another thread's stream only after some pauses. If that thread has not continued
    // its stream by then, the operating system has probably descheduled it.
    if (backoff.patient() || visit(cursors_[other++ % cursors_.size()], thread) != Visit::kMoved)
      backoff.pause();
  }
} catch (const std::bad_alloc&) {
  out_of_memory_.store(true, std::memory_order_relaxed);
  abort();
}

// Tries to reserve the stream for this thread. Returns whether it could; after an abort, it never can.
bool Interpreter::hold(Cursor& c) {
  Hold free = Hold::kFree;
  return !aborted() && c.hold.load(std::memory_order_relaxed) == free &&
         c.hold.compare_exchange_strong(free, Hold::kHeld, std::memory_order_acquire,
                                        std::memory_order_relaxed);
}

// Executes the stream's next instruction if no other thread has reserved the stream and the instruction's
// waits are satisfied.
Interpreter::Visit Interpreter::visit(Cursor& c, int thread) {
  if (!hold(c)) return c.hold.load(std::memory_order_relaxed) == Hold::kEnded ? Visit::kEnded : Visit::kHeld;
  Visit visited = Visit::kBlocked;
  if (ready(c)) {
    if (c.thread != thread && !crowded_) pool_.placement().separate(thread, c.thread);
    if (step(c, thread) && !settle(c)) {
      c.hold.store(Hold::kEnded, std::memory_order_release);
      left_.fetch_sub(1, std::memory_order_release);
      return Visit::kMoved;
    }
    visited = Visit::kMoved;
  } else if (traced_ && c.wait_begin == 0) {
    c.wait_begin = clock_ns();
  }
  c.hold.store(Hold::kFree, std::memory_order_release);
  return visited;
}

// Prefetches a slice of the weights of a blocked stream's next instruction. Returns false if no slice is left
// or another thread has reserved the stream.
bool Interpreter::fetch_weights(Cursor& c) {
  if (!hold(c)) return false;
  const uint64_t begin = traced_ && c.prefetched == 0 ? clock_ns() : 0;
  const bool fetched = prefetch(c);
  if (traced_ && fetched) {
    if (begin) c.load_begin = begin;
    c.load_end = clock_ns();
  }
  c.hold.store(Hold::kFree, std::memory_order_release);
  return fetched;
}

// Moves the cursor `c` to the next instruction record of its stream, and fetches the record. The stream has
// three segments: the prologue, the body, which is repeated for each layer, and the epilogue. Returns false
// at the end of the stream.
bool Interpreter::settle(Cursor& c) {
  const int stream = program_->stream(c.rank, c.worker);
  while (c.segment < kSegments && c.next == program_->end(c.segment, stream)) {
    if (c.segment == kBody && ++c.layer < layers_) {
      c.next = program_->begin(kBody, stream);
      continue;
    }
    ++c.segment;
    c.layer = 0;
    if (c.segment < kSegments) c.next = program_->begin(c.segment, stream);
  }
  if (c.segment == kSegments) return false;
  if (c.record == nullptr) fetch(c, program_->record(c.segment, c.next), c.next);
  return true;
}

void Interpreter::fetch(Cursor& c, const int32_t* record, int32_t number) {
  c.record = record;
  c.phase = &program_->phase(c.rank, record);
  c.number = number;
  c.prefetched = 0;
  c.item = c.item_end = 0;
  if (c.phase->operation == Operation::kAttention) {
    const int32_t slot = operands<Attention>(record).slot;
    c.item = view(c).slot_items[slot];
    c.item_end = view(c).slot_items[slot + 1];
  }
}

// Takes the next instruction from a queue that all workers of a rank share. The current instruction is a
// drain: it makes workers execute the queue's first op.end instructions. Returns false if workers have
// taken all op.end instructions already.
bool Interpreter::claim(Cursor& c) {
  const Drain& op = operands<Drain>(c.record);
  const int queue = program_->queue(c.rank, op.queue);
  const int32_t first = program_->begin(kQueues, queue), length = program_->end(kQueues, queue) - first;
  std::atomic<int32_t>& claims = program_->claims(queue, c.layer);
  const uint32_t base = (program_->launches - 1) * static_cast<uint32_t>(length);
  int32_t seen = claims.load(std::memory_order_relaxed), done;
  do {
    done = static_cast<int32_t>(static_cast<uint32_t>(seen) - base);
    if (done >= op.end) return false;
  } while (!claims.compare_exchange_weak(seen, static_cast<int32_t>(static_cast<uint32_t>(seen) + 1),
                                         std::memory_order_relaxed));
  // In a trace, the records of queues are numbered after those of the body (the instructions of one layer).
  const int32_t body = program_->end(kBody, program_->stream(program_->ranks - 1, program_->workers - 1));
  fetch(c, program_->record(kQueues, first + done), body + first + done);
  c.claimed = true;
  return true;
}

bool Interpreter::met(int rank, int32_t block, int32_t counter) const {
  const uint32_t target = program_->launches * static_cast<uint32_t>(program_->total(rank, block, counter));
  const uint32_t value =
      static_cast<uint32_t>(program_->counter(rank, block, counter).load(std::memory_order_acquire));
  return static_cast<int32_t>(value - target) >= 0;
}

// Returns whether all waits of the current record are satisfied. If a wait has the kIndexed bit, its
// counters depend on the step: on attention's current work item, or on which rows need logits.
bool Interpreter::ready(Cursor& c) const {
  for (int i = 0; i < kWaits; ++i) {
    const int32_t word = c.record[kWaitWord + i];
    if (word == 0) continue;
    bool holds;
    if (!(word & kIndexed)) {
      holds = met(c.rank, block(c), word_counter(word));
    } else if (c.phase->operation == Operation::kAttention) {
      holds = c.item == c.item_end || item_ready(c, word);
    } else {
      holds = rows_ready(c, word);
    }
    if (!holds) {
      c.blocked = i;
      return false;
    }
  }
  return true;
}

// Returns whether all q, k and v of this step that the current attention work item reads are stored.
// Each pair of a row block (group of token rows) and a group of KV heads has a counter, which counts
// stores. `word`, a wait of the instruction, names the first of these counters.
bool Interpreter::item_ready(const Cursor& c, int32_t word) const {
  const Attention& op = operands<Attention>(c.record);
  const StepView& s = view(c);
  const int32_t i = c.item;
  const int32_t group = s.item_kv_head[i] / op.group_heads;
  const int32_t last = (s.item_kv_head[i] + s.item_kv_heads[i] - 1) / op.group_heads;
  const int32_t row = s.item_wait_block[i];
  for (int32_t b = row; b < row + s.item_wait_blocks[i]; ++b) {
    for (int32_t g = group; g <= last; ++g) {
      if (!met(c.rank, block(c), word_counter(word) + b * op.groups + g)) return false;
    }
  }
  return true;
}

// Returns whether the final norm may run. It reads only the token rows that need logits, which differ
// from step to step. Each row block (group of successive token rows) has a counter, which reaches its
// total when the residual of the rows is final. `word`, a wait of the instruction, names the first of
// these counters.
bool Interpreter::rows_ready(const Cursor& c, int32_t word) const {
  const Run& op = operands<Run>(c.record);
  const Dims& d = program_->dims(c.rank);
  for (int32_t i = op.row; i < op.row + op.rows; ++i) {
    const int32_t row = view(c).logit_rows[i];
    if (row < 0 || !norms_logit_row(d, view(c), i)) continue;
    if (!met(c.rank, block(c), word_counter(word) + row / d.row_block)) return false;
  }
  return true;
}

// Makes progress with the current instruction. Attention runs its work items in order, up to the first whose
// inputs are not ready. A drain takes an instruction from a shared queue, and the next call executes that
// instruction. Any other instruction is run as a whole. Returns false if the launch is aborted during the
// call.
bool Interpreter::step(Cursor& c, int thread) {
  IntervalKind kind = IntervalKind::COMPUTE;
  uint64_t begin = traced_ ? clock_ns() : 0;
  if (traced_) {
    if (c.wait_begin) record_interval(c, IntervalKind::COUNTER_WAIT, c.wait_begin, begin, c.blocked);
    if (c.load_begin) record_interval(c, IntervalKind::LOAD, c.load_begin, c.load_end, 0);
    c.wait_begin = c.load_begin = 0;
    stall(c);
  }
  if (c.phase->operation == Operation::kDrain && claim(c)) return true;
  Memory& memory = memory_[thread];
  Call call{&program_->dims(c.rank), c.phase,         &view(c),
            buffers_.data(),         &memory.scratch, reinterpret_cast<const int32_t*>(&abort_),
            &memory.link_bytes,      c.layer};
  call.bf16_pairs = kernels_.bf16_pairs;
  if (c.phase->operation == Operation::kAttention) {
    while (c.item < c.item_end && ready(c)) {
      call.item = c.item;
      const bool final = run_item(call, c.record);
      if (call.aborted()) return false;
      if (final) signal_item(c);
      ++c.item;
      progress_[thread].instructions.fetch_add(1, std::memory_order_relaxed);
    }
  } else {
    kernels_.op (*c.phase)(call, c.record);
    if (const Op send = kernels_.sender(*c.phase)) {
      const int64_t sent = memory.link_bytes;
      const uint64_t computed = traced_ ? clock_ns() : 0;
      send(call, c.record);
      if (traced_ && memory.link_bytes > sent) {
        record_interval(c, kind, begin, computed, 0);
        kind = IntervalKind::STORE;
        begin = computed;
      }
    }
    if (call.aborted()) return false;
    progress_[thread].instructions.fetch_add(1, std::memory_order_relaxed);
  }
  if (traced_) record_interval(c, kind, begin, clock_ns(), 0);
  if (c.item < c.item_end) return true;
  signal(c);
  if (!c.claimed) ++c.next;
  c.claimed = false;
  c.record = nullptr;
  return true;
}

// Runs one work item of attention. If several items divide the KV tokens of the same rows, the last one
// to finish merges their results. Returns whether the rows' attention output is now final.
bool Interpreter::run_item(const Call& call, const int32_t* record) {
  kernels_.op (*call.phase)(call, record);
  const int32_t split = call.step->item_split[call.item];
  if (split < 0) return true;
  if (call.aborted()) return false;
  int32_t* arrivals = call.at<int32_t>(Buffer::SPLITS) + split;
  if (__atomic_add_fetch(arrivals, 1, __ATOMIC_ACQ_REL) != call.step->item_splits[call.item]) return false;
  __atomic_store_n(arrivals, 0, __ATOMIC_RELAXED);
  kernels_.attention_merge(call, record);
  return true;
}

void Interpreter::signal(const Cursor& c) {
  for (int i = 0; i < kSignals; ++i) {
    const int32_t word = c.record[kSignalWord + i];
    if (word == 0 || (word & kIndexed)) continue;
    const int32_t rank = word_rank(word);
    const Ranks ranks = rank == kAllRanks ? all_ranks(program_->dims(c.rank)) : Ranks{rank, rank + 1};
    arrive(ranks, block(c) + (word & kNext ? 1 : 0), word_counter(word), 1);
  }
}

void Interpreter::signal_item(const Cursor& c) {
  const int32_t word = c.record[kSignalWord], rank = word_rank(word), row = view(c).item_row[c.item];
  if (!(word & kIndexed)) return;
  const Dims& d = program_->dims(c.rank);
  const Ranks ranks = rank == kAllRanks ? all_ranks(d)
                      : rank == kOwner  ? residual_ranks(d, row)
                                        : Ranks{rank, rank + 1};
  arrive(ranks, block(c), word_counter(word) + row / d.row_block,
         view(c).item_rows[c.item] * view(c).item_kv_heads[c.item]);
}

void Interpreter::arrive(Ranks ranks, int32_t block, int32_t counter, int32_t count) {
  for (int rank = ranks.begin; rank < ranks.end; ++rank)
    program_->counter(rank, block, counter).fetch_add(count, std::memory_order_release);
}

// Prefetches the next slice of the weights of the stream's current instruction. Returns false if none is
// left.
bool Interpreter::prefetch(Cursor& c) {
  if (c.phase->operation != Operation::kMatmul) return false;
  const Buffer weights = c.phase->weights;
  const bool layered = kLayered >> static_cast<int32_t>(weights) & 1;
  const void* table =
      bound(c.rank, weights, layered ? weights_layer(*c.phase, program_->dims(c.rank), c.layer) : 0);
  if (table == nullptr) return false;
  const WeightSpan span = weight_span(*c.phase, operands<Tile>(c.record), static_cast<const Panel*>(table));
  const int64_t end = std::min(span.bytes, kPrefetchLimit);
  if (c.prefetched >= end) return false;
  const int64_t slice = std::min(end, c.prefetched + kPrefetchSlice);
  for (; c.prefetched < slice; c.prefetched += 64) __builtin_prefetch(span.begin + c.prefetched, 0, 2);
  return true;
}

void Interpreter::stall(const Cursor& c) const {
  if (delay.ns == 0 || c.segment != delay.segment || c.number != delay.record) return;
  if (c.segment == kBody && c.layer != delay.layer) return;
  const uint64_t end = clock_ns() + static_cast<uint64_t>(delay.ns);
  while (clock_ns() < end && !aborted()) std::this_thread::sleep_for(kNap);
}

void Interpreter::record_interval(Cursor& c, IntervalKind kind, uint64_t begin, uint64_t end,
                                  int slot) const {
  Interval i{};
  i.begin = begin;
  i.end = end;
  i.instruction = static_cast<uint32_t>(c.number);
  i.launch = 1;
  i.worker = static_cast<uint16_t>(c.worker);
  i.layer = static_cast<uint16_t>(c.segment == kPrologue   ? kTracePrologue
                                  : c.segment == kEpilogue ? kTraceEpilogue
                                                           : c.layer);
  i.rank = static_cast<uint8_t>(c.rank);
  i.role = static_cast<uint8_t>(Role::WORKER);
  i.kind = static_cast<uint8_t>(kind);
  i.slot = static_cast<uint8_t>(slot);
  c.intervals.push_back(i);
}

void Interpreter::execute(const Dims& dims, const Phase* phases, const int32_t* step_words,
                          const int32_t* record, int layer) {
  const FlushSubnormals flush;
  const StepView view = step_view(step_words, dims);
  const Phase& phase = phases[record_phase(record)];
  const int32_t running = 0;
  Memory& memory = memory_[0];
  memory.scratch.rounded_rows = {};
  Call call{&dims, &phase, &view, buffers_.data(), &memory.scratch, &running, &memory.link_bytes, layer};
  call.bf16_pairs = kernels_.bf16_pairs;
  if (phase.operation != Operation::kAttention) {
    kernels_.op(phase)(call, record);
    if (const Op send = kernels_.sender(phase)) send(call, record);
    return;
  }
  const int32_t slot = operands<Attention>(record).slot;
  for (call.item = view.slot_items[slot]; call.item < view.slot_items[slot + 1]; ++call.item)
    run_item(call, record);
}

}  // namespace mk
