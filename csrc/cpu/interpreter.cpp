#include "interpreter.h"

#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include <algorithm>

#include "../common/record.h"
#include "packing.h"

namespace mk {
namespace {

constexpr int64_t kPrefetchLimit = 256 << 10;  // stays in a core's second-level cache
constexpr int64_t kPrefetchSlice = 4 << 10;    // between two polls
// Spinning lasts longer than most waits of a step, so that a busy machine does not take the core at each of
// them.
constexpr int kSpins = 4000, kYields = 200;
constexpr long kNapNs = 50'000;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void nap(int64_t ns) {
  const timespec time{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  nanosleep(&time, nullptr);
}

// Polite waiting: spin, then yield, then sleep.
class Backoff {
 public:
  void pause() {
    ++count_;
    if (count_ < kSpins) {
      relax();
    } else if (count_ < kSpins + kYields) {
      sched_yield();
    } else {
      nap(kNapNs);
    }
  }
  void reset() { count_ = 0; }

 private:
  int count_ = 0;
};

struct Region {
  float** field;
  int64_t floats;
};

}  // namespace

uint64_t clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

Interpreter::Interpreter(const Dims& model, const Kernels& kernels, int threads, double deadlock_seconds)
    : layers_(model.layers),
      kernels_(kernels),
      buffers_(int64_t{kBuffers} * model.layers, nullptr),
      memory_(threads),
      deadlock_seconds_(deadlock_seconds),
      progress_(threads),
      pool_(threads, threads > 1 && threads == static_cast<int>(std::thread::hardware_concurrency())) {
  const int64_t widest = std::max({model.hidden, model.ffn, model.q_cols()});
  const int64_t chunks = (widest + kChunk - 1) / kChunk;
  const int64_t padded = (model.head_dim + kPanel - 1) / kPanel * kPanel;
  const int64_t pairs = std::max(kQueryRows, model.group_size());
  for (Memory& m : memory_) {
    Scratch& s = m.scratch;
    float* counts = nullptr;
    const Region regions[] = {
        {&s.activations, std::max<int64_t>(kTileRows, chunks * kMaxMicroRows) * kChunkStride},
        {&s.tile, int64_t{kTileRows} * kTilePanels * kPanel},
        {&s.keys, model.head_dim * key_stride(model)},
        {&s.values, model.kv_block * padded},
        {&s.queries, pairs * model.head_dim + kPanel},
        {&s.scores, pairs * model.kv_block},
        {&s.block_out, pairs * padded},
        {&s.merged_out, pairs * padded},
        {&s.stats, 4 * pairs},
        {&s.logits, model.vocab},
        {&counts, model.vocab},
    };
    const auto aligned = [](int64_t floats) { return (floats + 15) / 16 * 16 + 16; };
    int64_t floats = 0;
    for (const Region& r : regions) floats += aligned(r.floats);
    m.block = {allocate(floats * static_cast<int64_t>(sizeof(float))), free};
    float* next = static_cast<float*>(m.block.get());
    for (const Region& r : regions) {
      *r.field = next;
      next += aligned(r.floats);
    }
    s.counts = reinterpret_cast<int32_t*>(counts);
  }
}

void Interpreter::start(Program& program, const int32_t* step_words, bool trace) {
  program_ = &program;
  view_ = step_view(step_words, program.dims);
  // The last field's end gives the table's length.
  words_.assign(step_words, reinterpret_cast<const int32_t*>(view_.bias_values) + program.dims.bias_entries);
  view_ = step_view(words_.data(), program.dims);
  abort_.store(0, std::memory_order_relaxed);
  traced_ = trace;
  failed_ = false;
  error_.clear();
  ++program.launches;
  cursors_ = std::vector<Cursor>(program.workers);
  for (int w = 0; w < program.workers; ++w) {
    cursors_[w].next = program.begin(kPrologue, w);
    if (trace) cursors_[w].intervals.reserve(interval_bound(w));
  }
  for (Progress& p : progress_) p.instructions.store(0, std::memory_order_relaxed);
  seen_progress_ = 0;
  seen_at_ = std::chrono::steady_clock::now();
  pool_.start([this](int thread) { traced_ ? run<true>(thread) : run<false>(thread); }, [this] { finish(); });
}

// A wait, a load and a compute interval for each instruction, and for each further item of an attention.
int64_t Interpreter::interval_bound(int worker) const {
  int64_t units = 0;
  for (int s = 0; s < kSegments; ++s) {
    const int64_t runs = s == kBody ? program_->dims.layers : 1;
    for (int32_t i = program_->begin(s, worker); i < program_->end(s, worker); ++i) {
      const int32_t* record = program_->record(s, i);
      units += runs;
      if (record_opcode(record) != static_cast<int32_t>(Opcode::attention)) continue;
      const int32_t slot = operands<Attention>(record).slot;
      units += runs * (view_.slot_items[slot + 1] - view_.slot_items[slot]);
    }
  }
  return 3 * units;
}

Status Interpreter::wait(std::chrono::milliseconds limit) {
  if (pool_.wait(limit)) return failed_ ? Status::kFailed : Status::kDone;
  uint64_t progress = 0;
  for (const Progress& p : progress_) progress += p.instructions.load(std::memory_order_relaxed);
  const auto now = std::chrono::steady_clock::now();
  if (progress != seen_progress_) {
    seen_progress_ = progress;
    seen_at_ = now;
  } else if (std::chrono::duration<double>(now - seen_at_).count() > deadlock_seconds_) {
    abort();
    while (!pool_.wait(std::chrono::milliseconds(50))) {
    }
    return failed_ ? Status::kFailed : Status::kDone;
  }
  return Status::kRunning;
}

// On the last thread of a launch.
void Interpreter::finish() {
  failed_ =
      abort_.load(std::memory_order_relaxed) != 0 &&
      std::any_of(cursors_.begin(), cursors_.end(), [](const Cursor& c) { return c.segment < kSegments; });
  if (!failed_) return;
  error_ = describe_block();
  program_->reset_counters();
  int32_t* splits = static_cast<int32_t*>(bound(Buffer::SPLITS, 0));
  std::fill(splits, splits + program_->dims.items, 0);
}

std::string Interpreter::describe_block() {
  static constexpr const char* kSegmentNames[] = {"prologue", "body", "epilogue"};
  static const char* names[kOpcodes] = {};
#define MK_NAME(name, Name, opcode) names[opcode] = #name;
  MK_INSTRUCTIONS(MK_NAME)
#undef MK_NAME
  for (int w = 0; w < program_->workers; ++w) {
    Cursor& c = cursors_[w];
    if (c.segment == kSegments || ready(c)) continue;
    const int32_t* record = program_->record(c.segment, c.next);
    const int32_t word = record[kWaitWord + c.blocked];
    const int32_t block = program_->block(c.segment, c.layer), counter = word_counter(word);
    const uint32_t expected = program_->launches * static_cast<uint32_t>(program_->total(block, counter));
    return "worker " + std::to_string(w) + " waits in " + kSegmentNames[c.segment] + " record " +
           std::to_string(c.next) + " (" + names[record_opcode(record)] + ", layer " +
           std::to_string(c.layer) + ") for " + (word & kIndexed ? "the grid at " : "") + "counter " +
           std::to_string(counter) + " of block " + std::to_string(block) + ": value " +
           std::to_string(program_->counter(block, counter).load()) + ", expected " +
           std::to_string(static_cast<int32_t>(expected));
  }
  return "no worker was blocked";
}

template <bool kTrace>
void Interpreter::run(int thread) {
  const int workers = program_->workers, stride = pool_.size();
  int left = 0;
  for (int w = thread; w < workers; w += stride) left += settle(cursors_[w], w) ? 1 : 0;
  Backoff backoff;
  while (left > 0) {
    bool moved = false;
    for (int w = thread; w < workers; w += stride) {
      Cursor& c = cursors_[w];
      if (c.segment == kSegments) continue;
      if (abort_.load(std::memory_order_relaxed)) return;
      if (!ready(c)) {
        if (kTrace && c.wait_begin == 0) c.wait_begin = clock_ns();
        continue;
      }
      moved = true;
      if (!step<kTrace>(c, w, thread)) return;
      if (!settle(c, w)) --left;
    }
    if (moved) {
      backoff.reset();
      continue;
    }
    // Nothing to do: fetch the weights of the first blocked head, a slice between two polls.
    int w = thread;
    while (cursors_[w].segment == kSegments) w += stride;
    Cursor& c = cursors_[w];
    const uint64_t begin = kTrace && c.prefetched == 0 ? clock_ns() : 0;
    if (prefetch(c)) {
      if (kTrace && begin) c.load_begin = begin;
      if (kTrace) c.load_end = clock_ns();
    } else {
      backoff.pause();
    }
  }
}

// Moves past the ends of segments and layers to the next record; false once the stream has ended.
bool Interpreter::settle(Cursor& c, int worker) const {
  while (c.segment < kSegments && c.next == program_->end(c.segment, worker)) {
    if (c.segment == kBody && ++c.layer < program_->dims.layers) {
      c.next = program_->begin(kBody, worker);
      if (c.next == program_->end(kBody, worker))
        c.layer = program_->dims.layers - 1;  // empty: skip all layers
      continue;
    }
    ++c.segment;
    c.layer = 0;
    if (c.segment < kSegments) c.next = program_->begin(c.segment, worker);
  }
  return c.segment < kSegments;
}

void Interpreter::enter(Cursor& c) {
  const int32_t* record = program_->record(c.segment, c.next);
  c.item = c.item_end = 0;
  if (record_opcode(record) == static_cast<int32_t>(Opcode::attention)) {
    const int32_t slot = operands<Attention>(record).slot;
    c.item = view_.slot_items[slot];
    c.item_end = view_.slot_items[slot + 1];
  }
  c.entered = true;
}

bool Interpreter::met(int32_t block, int32_t counter) const {
  const uint32_t target = program_->launches * static_cast<uint32_t>(program_->total(block, counter));
  const uint32_t value =
      static_cast<uint32_t>(program_->counter(block, counter).load(std::memory_order_acquire));
  return static_cast<int32_t>(value - target) >= 0;
}

// Whether all waits of the head hold; for attention, of its current item.
bool Interpreter::ready(Cursor& c) {
  if (!c.entered) enter(c);
  const int32_t* record = program_->record(c.segment, c.next);
  const int32_t block = program_->block(c.segment, c.layer);
  for (int i = 0; i < kWaits; ++i) {
    const int32_t word = record[kWaitWord + i];
    if (word == 0) continue;
    bool holds;
    if (!(word & kIndexed)) {
      holds = met(block, word_counter(word));
    } else if (record_opcode(record) == static_cast<int32_t>(Opcode::attention)) {
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

// Attention: the row blocks and KV-head groups of the current item, in the grid [row block][group].
bool Interpreter::item_ready(const Cursor& c, int32_t word) const {
  const Attention& op = operands<Attention>(program_->record(c.segment, c.next));
  const int32_t i = c.item, block = program_->block(c.segment, c.layer);
  const int32_t group = view_.item_kv_head[i] / op.group_heads;
  const int32_t last = (view_.item_kv_head[i] + view_.item_kv_heads[i] - 1) / op.group_heads;
  const int32_t row = view_.item_wait_block[i];
  for (int32_t b = row; b < row + view_.item_wait_blocks[i]; ++b) {
    for (int32_t g = group; g <= last; ++g) {
      if (!met(block, word_counter(word) + b * op.groups + g)) return false;
    }
  }
  return true;
}

// final_norm: the row block of each logit row.
bool Interpreter::rows_ready(const Cursor& c, int32_t word) const {
  const FinalNorm& op = operands<FinalNorm>(program_->record(c.segment, c.next));
  const int32_t block = program_->block(c.segment, c.layer);
  for (int32_t i = op.row; i < op.row + op.rows; ++i) {
    const int32_t row = view_.logit_rows[i];
    if (row >= 0 && !met(block, word_counter(word) + row / program_->dims.row_block)) return false;
  }
  return true;
}

// Executes the head, of attention as many items as are ready. False where the launch was aborted meanwhile.
template <bool kTrace>
bool Interpreter::step(Cursor& c, int worker, int thread) {
  const int32_t* record = program_->record(c.segment, c.next);
  const uint64_t begin = kTrace ? clock_ns() : 0;
  if (kTrace) {
    if (c.wait_begin) record_interval(c, worker, IntervalKind::COUNTER_WAIT, c.wait_begin, begin, c.blocked);
    if (c.load_begin) record_interval(c, worker, IntervalKind::LOAD, c.load_begin, c.load_end, 0);
    c.wait_begin = c.load_begin = 0;
    stall<kTrace>(c);
  }
  Call call{&program_->dims,
            &view_,
            buffers_.data(),
            &memory_[thread].scratch,
            reinterpret_cast<const int32_t*>(&abort_),
            c.layer,
            0};
  if (record_opcode(record) == static_cast<int32_t>(Opcode::attention)) {
    while (c.item < c.item_end && ready(c)) {
      call.item = c.item;
      const bool final = run_item(call, record);
      if (call.aborted()) return false;
      if (final) signal_item(c, record, c.item);
      ++c.item;
      progress_[thread].instructions.fetch_add(1, std::memory_order_relaxed);
    }
  } else {
    kernels_.ops[record_opcode(record)](call, record);
    if (call.aborted()) return false;
    progress_[thread].instructions.fetch_add(1, std::memory_order_relaxed);
  }
  const uint64_t end = kTrace ? clock_ns() : 0;
  if (kTrace) record_interval(c, worker, IntervalKind::COMPUTE, begin, end, 0);
  if (c.item < c.item_end) return true;
  signal(c, record);
  ++c.next;
  c.entered = false;
  c.prefetched = 0;
  return true;
}

// True where the item's rows are final: it is no part of a split, or the last part to arrive.
bool Interpreter::run_item(const Call& call, const int32_t* record) {
  kernels_.ops[record_opcode(record)](call, record);
  const int32_t split = call.step->item_split[call.item];
  if (split < 0) return true;
  if (call.aborted()) return false;
  int32_t* arrivals = call.at<int32_t>(Buffer::SPLITS) + split;
  if (__atomic_add_fetch(arrivals, 1, __ATOMIC_ACQ_REL) != call.step->item_splits[call.item]) return false;
  __atomic_store_n(arrivals, 0, __ATOMIC_RELAXED);
  kernels_.attention_merge(call, record);
  return true;
}

void Interpreter::signal(const Cursor& c, const int32_t* record) {
  const int32_t block = program_->block(c.segment, c.layer);
  for (int i = 0; i < kSignals; ++i) {
    const int32_t word = record[kSignalWord + i];
    if (word == 0 || (word & kIndexed)) continue;
    program_->counter(block + (word & kNext ? 1 : 0), word_counter(word))
        .fetch_add(1, std::memory_order_release);
  }
}

void Interpreter::signal_item(const Cursor& c, const int32_t* record, int32_t item) {
  const int32_t word = record[kSignalWord];
  if (!(word & kIndexed)) return;
  const int32_t block = program_->block(c.segment, c.layer);
  const int32_t member = view_.item_row[item] / program_->dims.row_block;
  program_->counter(block, word_counter(word) + member)
      .fetch_add(view_.item_rows[item] * view_.item_kv_heads[item], std::memory_order_release);
}

// Starts loads of the next slice of the head's weights; false where there is none left.
bool Interpreter::prefetch(Cursor& c) {
  const WeightSpan span = weight_span(program_->dims, program_->record(c.segment, c.next));
  const int64_t end = std::min(span.bytes, kPrefetchLimit);
  if (c.prefetched >= end) return false;
  const void* base = bound(span.buffer, kLayered[static_cast<int>(span.buffer)] ? c.layer : 0);
  if (base == nullptr) return false;
  const int64_t slice = std::min(end, c.prefetched + kPrefetchSlice);
  for (; c.prefetched < slice; c.prefetched += 64)
    __builtin_prefetch(static_cast<const char*>(base) + span.begin + c.prefetched, 0, 2);
  return true;
}

template <bool kTrace>
void Interpreter::stall(const Cursor& c) const {
  if (delay.ns == 0 || c.segment != delay.segment || c.next != delay.record) return;
  if (c.segment == kBody && c.layer != delay.layer) return;
  const uint64_t end = clock_ns() + static_cast<uint64_t>(delay.ns);
  while (clock_ns() < end && !abort_.load(std::memory_order_relaxed)) nap(kNapNs);
}

void Interpreter::record_interval(Cursor& c, int worker, IntervalKind kind, uint64_t begin, uint64_t end,
                                  int slot) const {
  if (c.intervals.size() == c.intervals.capacity()) {
    ++c.dropped;
    return;
  }
  Interval i{};
  i.begin = begin;
  i.end = end;
  i.instruction = static_cast<uint32_t>(c.next);
  i.launch = 1;
  i.worker = static_cast<uint16_t>(worker);
  i.layer = static_cast<uint16_t>(c.segment == kPrologue   ? kTracePrologue
                                  : c.segment == kEpilogue ? kTraceEpilogue
                                                           : c.layer);
  i.role = static_cast<uint8_t>(Role::WORKER);
  i.kind = static_cast<uint8_t>(kind);
  i.slot = static_cast<uint8_t>(slot);
  c.intervals.push_back(i);
}

std::vector<Interval> Interpreter::intervals() const {
  std::vector<Interval> all;
  for (const Cursor& c : cursors_) all.insert(all.end(), c.intervals.begin(), c.intervals.end());
  return all;
}

int64_t Interpreter::dropped() const {
  int64_t n = 0;
  for (const Cursor& c : cursors_) n += c.dropped;
  return n;
}

void Interpreter::execute(const Dims& dims, const int32_t* step_words, const int32_t* record, int layer) {
  const StepView view = step_view(step_words, dims);
  const int32_t running = 0;
  Call call{&dims, &view, buffers_.data(), &memory_[0].scratch, &running, layer, 0};
  if (record_opcode(record) != static_cast<int32_t>(Opcode::attention)) {
    kernels_.ops[record_opcode(record)](call, record);
    return;
  }
  const int32_t slot = operands<Attention>(record).slot;
  for (call.item = view.slot_items[slot]; call.item < view.slot_items[slot + 1]; ++call.item)
    run_item(call, record);
}

}  // namespace mk
