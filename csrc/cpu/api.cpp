// The C interface that megakernel/runtime/cpu/native.py loads. Functions return 0 or a handle on success. On
// failure they return -1 or null, and mk_error() gives the reason.
#include <string.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "interpreter.h"
#include "packing.h"
#include "probe.h"

#define MK_API extern "C" __attribute__((visibility("default")))

namespace {

thread_local std::string last_error;

template <class F>
auto guarded(F f, decltype(f()) failure) -> decltype(f()) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    last_error = "out of memory";
  } catch (const std::exception& e) {
    try {
      last_error = e.what();
    } catch (const std::bad_alloc&) {
      last_error = "out of memory";  // short enough to need no allocation
    }
  }
  return failure;
}

}  // namespace

struct mk_engine {
  mk::Arena weights;
  int64_t weight_bytes = 0;
  // last, so that it is destroyed before the weights that it reads
  std::unique_ptr<mk::Interpreter> interpreter;
};

MK_API const char* mk_error() { return last_error.c_str(); }

// The name of the SIMD path that `simd` selects.
MK_API const char* mk_simd(const char* simd) {
  return guarded([&] { return mk::choose_kernels(simd, mk::Dtype::F32).name; }, nullptr);
}

// Creates an engine for ranks [first_rank, first_rank + ranks) of dims->tp. `cores` is this process's share
// of the cores that it and the processes of other ranks may use. `abort` is null or an integer in memory
// shared with other processes: a value other than 0 ends launches, and only the caller sets it back to 0.
MK_API mk_engine* mk_create(const mk::Dims* dims, int32_t first_rank, int32_t ranks, int32_t threads,
                            int32_t cores, const char* simd, int32_t null, double deadlock_seconds,
                            void* abort) {
  return guarded(
      [&] {
        const mk::Kernels& kernels =
            null ? *mk::null_kernels() : mk::choose_kernels(simd, static_cast<mk::Dtype>(dims->dtype));
        auto engine = std::make_unique<mk_engine>();
        engine->interpreter =
            std::make_unique<mk::Interpreter>(*dims, first_rank, ranks, kernels, threads, cores,
                                              deadlock_seconds, static_cast<std::atomic<int32_t>*>(abort));
        return engine.release();
      },
      static_cast<mk_engine*>(nullptr));
}

// Aborts a running launch and returns when it has ended.
MK_API void mk_destroy(mk_engine* engine) { delete engine; }

// The bytes of all packed matrices.
MK_API int64_t mk_weight_bytes(mk_engine* engine) { return engine->weight_bytes; }

// Packs a rank's weight matrix into the engine's own memory and binds it.
MK_API int32_t mk_pack(mk_engine* engine, int32_t rank, int32_t buffer, int32_t layer,
                       const mk::Matrix* matrix) {
  return guarded(
      [&] {
        const mk::Packed packed = mk::pack(*matrix, engine->weights, engine->interpreter->threads());
        engine->weight_bytes += packed.bytes;
        engine->interpreter->bind(rank, static_cast<mk::Buffer>(buffer), layer, packed.table);
        return 0;
      },
      -1);
}

// Binds memory that stays the caller's. `data` has the declared row-major layout; for a packed matrix it is
// the table of panels.
MK_API void mk_bind(mk_engine* engine, int32_t rank, int32_t buffer, int32_t layer, void* data) {
  engine->interpreter->bind(rank, static_cast<mk::Buffer>(buffer), layer, data);
}

// The address of a bound buffer; null if nothing is bound.
MK_API void* mk_bound(mk_engine* engine, int32_t rank, int32_t buffer, int32_t layer) {
  return engine->interpreter->bound(rank, static_cast<mk::Buffer>(buffer), layer);
}

MK_API mk::Program* mk_load_program(const mk::ProgramSource* source) {
  return guarded([&] { return new mk::Program(*source); }, static_cast<mk::Program*>(nullptr));
}

MK_API void mk_unload_program(mk::Program* program) { delete program; }

MK_API int32_t mk_launch_start(mk_engine* engine, mk::Program* program, const int32_t* words, int32_t trace) {
  return guarded(
      [&] {
        engine->interpreter->start(*program, words, trace != 0);
        return 0;
      },
      -1);
}

// 0: done; 1: still running; -1: aborted. After -1, mk_error() names the blocked wait, and the program needs
// mk_reset before its next launch.
MK_API int32_t mk_launch_wait(mk_engine* engine, int32_t timeout_ms) {
  return guarded(
      [&] {
        switch (engine->interpreter->wait(std::chrono::milliseconds(timeout_ms))) {
          case mk::Status::kDone:
            return 0;
          case mk::Status::kRunning:
            return 1;
          default:
            last_error = engine->interpreter->error();
            return -1;
        }
      },
      -1);
}

MK_API void mk_abort(mk_engine* engine) { engine->interpreter->abort(); }

// Resets a program whose launch failed; no rank may run it meanwhile.
MK_API void mk_reset(mk_engine* engine, mk::Program* program) { engine->interpreter->reset(*program); }

// The bytes that a rank has stored into other ranks' memory so far.
MK_API int64_t mk_link_bytes(mk_engine* engine, int32_t rank) {
  return engine->interpreter->link_bytes(rank);
}

// Starts an audit: only remote stores may touch memory of other ranks that is passed to mk_watch, and each
// such store is listed. Any other access ends the process, after it has written the reason to `words`, which
// is shared memory of `size` bytes, or to standard error if `words` is null.
MK_API void mk_audit(mk_engine* engine, char* words, int64_t size) {
  engine->interpreter->audit = std::make_unique<mk::Audit>(words, size);
}

MK_API int32_t mk_watch(mk_engine* engine, const void* window, int64_t bytes) {
  return guarded(
      [&] {
        engine->interpreter->audit->watch(window, bytes);
        return 0;
      },
      -1);
}

// The number of remote stores in the list. If `out` is not null, copies the list and clears it.
MK_API int64_t mk_stores(mk_engine* engine, mk::RemoteStore* out) {
  std::vector<mk::RemoteStore>& all = engine->interpreter->audit->stores;
  const auto count = static_cast<int64_t>(all.size());
  if (out != nullptr) {
    std::copy(all.begin(), all.end(), out);
    all.clear();
  }
  return count;
}

// Runs one instruction on the calling thread. `phases` are the kMaxPhases + 1 phases as rank dims->rank sees
// them.
MK_API void mk_execute(mk_engine* engine, const mk::Dims* dims, const mk::Phase* phases, const int32_t* words,
                       const int32_t* record, int32_t layer) {
  engine->interpreter->execute(*dims, phases, words, record, layer);
}

MK_API void mk_fetch_ahead(mk_engine* engine, int32_t on) { engine->interpreter->fetch_ahead = on != 0; }

MK_API void mk_delay(mk_engine* engine, int32_t segment, int32_t record, int32_t layer, int64_t ns) {
  engine->interpreter->delay = {segment, layer, record, ns};
}

// The number of intervals of the last traced launch, or -1 on failure. Copies them if `out` is not null.
MK_API int64_t mk_intervals(mk_engine* engine, mk::Interval* out, int64_t* dropped) {
  return guarded(
      [&] {
        const std::vector<mk::Interval> all = engine->interpreter->intervals();
        if (out != nullptr && !all.empty()) memcpy(out, all.data(), all.size() * sizeof(mk::Interval));
        *dropped = engine->interpreter->dropped();
        return static_cast<int64_t>(all.size());
      },
      int64_t{-1});
}

// The seconds that reading the clock takes.
MK_API double mk_clock_cost() {
  constexpr int kReads = 1000;
  const uint64_t begin = mk::clock_ns();
  for (int i = 0; i < kReads; ++i) mk::clock_ns();
  return static_cast<double>(mk::clock_ns() - begin) * 1e-9 / kReads;
}

MK_API double mk_probe_read(const char* simd, int32_t threads, int64_t bytes, double seconds) {
  return guarded(
      [&] { return mk::probe_read(mk::choose_kernels(simd, mk::Dtype::F32), threads, bytes, seconds); },
      -1.0);
}

MK_API double mk_probe_fma(const char* simd, int32_t threads, double seconds) {
  return guarded(
      [&] { return mk::probe_multiply_add(mk::choose_kernels(simd, mk::Dtype::BF16), threads, seconds); },
      -1.0);
}
