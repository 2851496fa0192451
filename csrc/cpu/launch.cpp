#include <algorithm>

#include "../common/record.h"
#include "interpreter.h"

namespace mk {
Interpreter::Interpreter(const Dims& model, const Kernels& kernels, int threads, int cores,
                         double deadlock_seconds)
    : layers_(model.layers),
      ranks_(model.tp),
      cores_(cores),
      kernels_(kernels),
      buffers_(int64_t{model.tp} * kBuffers * model.layers, nullptr),
      memory_(threads),
      deadlock_seconds_(deadlock_seconds),
      progress_(threads),
      pool_(threads) {
  const int64_t widest = std::max({model.hidden, model.ffn, model.heads * model.head_dim});
  const int64_t chunks = (widest + kChunk - 1) / kChunk;
  const int64_t padded = (model.head_dim + kPanel - 1) / kPanel * kPanel;
  const int64_t pairs = std::max(kQueryRows, model.group_size());
  // A vector load at an array's end may read beyond it, so each array has room for 16 more elements.
  const auto take = [this](int64_t floats) {
    return static_cast<float*>(scratch_.allocate((floats + 16) * int64_t{sizeof(float)}));
  };
  for (Memory& m : memory_) {
    m.scratch = {
        .activations = take(std::max<int64_t>(kTileRows, chunks * kMaxMicroRows) * kChunkStride),
        .rounded = take(chunks * kTileRows * kRoundedBytes / int64_t{sizeof(float)}),
        .rounded_rows = {},
        .tile = take(int64_t{kTileRows} * kTilePanels * kPanel),
        .weights = take(int64_t{kWidePanels} * kWideStride),
        .keys = take(model.head_dim * key_stride(model)),
        .values = take(model.kv_block * padded),
        .scales = take(int64_t{ceil_div(model.head_dim, kKvUnit)} * model.kv_block),
        .queries = take(pairs * ceil_div(model.head_dim, kKvUnit) * kKvUnit),
        .scores = take(pairs * model.kv_block),
        .block_out = take(pairs * padded),
        .merged_out = take(pairs * padded),
        .stats = take(4 * pairs),
        .logits = take(model.vocab),
        .counts = reinterpret_cast<int32_t*>(take(model.vocab)),
    };
  }
}

void Interpreter::start(Program& program, const int32_t* step_words, bool trace) {
  program_ = &program;
  views_.clear();
  for (int r = 0; r < ranks_; ++r) views_.push_back(step_view(step_words, program.dims(r)));
  traced_ = trace;
  failed_ = false;
  error_.clear();
  out_of_memory_.store(false, std::memory_order_relaxed);
  cursors_ = std::vector<Cursor>(int64_t{ranks_} * program.workers);
  for (size_t i = 0; i < cursors_.size(); ++i) {
    Cursor& c = cursors_[i];
    c.rank = static_cast<int>(i) / program.workers;
    c.worker = static_cast<int>(i) % program.workers;
    c.next = program.begin(kPrologue, program.stream(c.rank, c.worker));
  }
  deal_streams();
  ++program.launches;  // not earlier, because the statements above may throw an exception
  left_.store(0, std::memory_order_relaxed);
  for (Cursor& c : cursors_) {
    if (settle(c)) {
      left_.fetch_add(1, std::memory_order_relaxed);
    } else {
      c.hold.store(Hold::kEnded, std::memory_order_relaxed);
    }
  }
  for (Progress& p : progress_) p.instructions.store(0, std::memory_order_relaxed);
  seen_progress_ = 0;
  seen_at_ = std::chrono::steady_clock::now();
  pool_.start([this](int thread) { run(thread); }, [this] { finish(); });
}

// Assigns the instruction streams (one per worker) to the CPU threads in turn. With at least as many threads
// as ranks, a thread gets streams of one rank only.
void Interpreter::deal_streams() {
  const int threads = pool_.size(), workers = program_->workers;
  dealt_.assign(threads, {});
  for (int i = 0; i < static_cast<int>(cursors_.size()); ++i) {
    int thread = i % threads;
    if (threads >= ranks_) {
      const int rank = i / workers, first = rank * threads / ranks_, end = (rank + 1) * threads / ranks_;
      thread = first + i % workers % (end - first);
    }
    cursors_[i].thread = thread;
    dealt_[thread].push_back(&cursors_[i]);
  }
  crowded_ =
      std::count_if(dealt_.begin(), dealt_.end(), [](const auto& own) { return !own.empty(); }) > cores_;
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
  }
  return Status::kRunning;
}

// Records whether the launch failed and why. Called once per launch, on the last thread to finish.
void Interpreter::finish() {
  failed_ = aborted();
  if (!failed_) return;
  try {
    error_ = out_of_memory_.load(std::memory_order_relaxed) ? "out of memory" : describe_block();
  } catch (const std::bad_alloc&) {
    error_ = "out of memory";  // this allocates nothing: the text fits in the std::string object
  }
}

void Interpreter::reset(Program& program) {
  program.reset();
  for (int r = 0; r < ranks_; ++r) {
    int32_t* splits = static_cast<int32_t*>(bound(r, Buffer::SPLITS, 0));
    std::fill(splits, splits + program.dims(r).items, 0);
  }
  abort_.store(0, std::memory_order_relaxed);
}

std::string Interpreter::describe_block() {
  static constexpr const char* kSegmentNames[] = {"prologue", "body", "epilogue"};
  for (Cursor& c : cursors_) {
    if (c.segment == kSegments || c.record == nullptr || ready(c)) continue;
    const int32_t word = c.record[kWaitWord + c.blocked], counter = word_counter(word);
    const uint32_t expected =
        program_->launches * static_cast<uint32_t>(program_->total(c.rank, block(c), counter));
    return "rank " + std::to_string(c.rank) + " worker " + std::to_string(c.worker) + " waits in " +
           kSegmentNames[c.segment] + " record " + std::to_string(c.number) + " (" +
           program_->name(c.record) + ", layer " + std::to_string(c.layer) + ") for " +
           (word & kIndexed ? "the grid at " : "") + "counter " + std::to_string(counter) + " of block " +
           std::to_string(block(c)) + ": value " +
           std::to_string(program_->counter(c.rank, block(c), counter).load()) + ", expected " +
           std::to_string(static_cast<int32_t>(expected));
  }
  return "no worker was waiting for a counter";
}

std::vector<Interval> Interpreter::intervals() const {
  std::vector<Interval> all;
  for (const Cursor& c : cursors_) all.insert(all.end(), c.intervals.begin(), c.intervals.end());
  return all;
}

}  // namespace mk
