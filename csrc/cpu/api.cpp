// The C interface that megakernel/runtime/cpu/native.py loads. Functions return 0 or a handle on success. On
// failure they return -1 or null, and mk_error() gives the reason.
#include <string.h>

#include <array>
#include <map>
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
      last_error = "out of memory";  // this allocates nothing: the text fits in the std::string object
    }
  }
  return failure;
}

}  // namespace

struct mk_engine {
  mk::Arena weights;
  std::map<std::array<int32_t, 3>, mk::Packed> packed;  // by rank, buffer and layer
  // `interpreter` is declared last, so that it is destroyed before `weights`, which the interpreter reads.
  std::unique_ptr<mk::Interpreter> interpreter;
};

MK_API const char* mk_error() { return last_error.c_str(); }

// A SIMD path is the set of kernels compiled for one instruction set, for example avx2. Returns the name of
// the path that `simd` selects. An empty `simd` selects the widest path that the processor supports.
MK_API const char* mk_simd(const char* simd) {
  return guarded([&] { return mk::choose_kernels(simd, mk::Dtype::F32).name; }, nullptr);
}

// Creates an engine that runs all dims->tp ranks on `threads` threads. `cores` is the number of cores
// that this process may use. If `null` is set, instructions compute nothing, to measure the time of
// everything else. A launch that makes no progress for `deadlock_seconds` is aborted.
MK_API mk_engine* mk_create(const mk::Dims* dims, int32_t threads, int32_t cores, const char* simd,
                            int32_t null, double deadlock_seconds) {
  return guarded(
      [&] {
        const mk::Kernels& kernels =
            null ? *mk::null_kernels() : mk::choose_kernels(simd, static_cast<mk::Dtype>(dims->dtype));
        auto engine = std::make_unique<mk_engine>();
        engine->interpreter =
            std::make_unique<mk::Interpreter>(*dims, kernels, threads, cores, deadlock_seconds);
        return engine.release();
      },
      static_cast<mk_engine*>(nullptr));
}

// Aborts a running launch, waits until it has ended and frees the engine.
MK_API void mk_destroy(mk_engine* engine) { delete engine; }

// Repacks a weight matrix into the layout that the kernels read. The result is in memory that the engine
// owns, and becomes the contents of the rank's `buffer` in `layer`, in place of an earlier matrix.
MK_API int32_t mk_pack(mk_engine* engine, int32_t rank, int32_t buffer, int32_t layer,
                       const mk::Matrix* matrix) {
  return guarded(
      [&] {
        mk::Packed& packed = engine->packed[{rank, buffer, layer}];
        packed = mk::pack(*matrix, packed, engine->weights, engine->interpreter->threads());
        engine->interpreter->bind(rank, static_cast<mk::Buffer>(buffer), layer, packed.table);
        return 0;
      },
      -1);
}

// Tells the engine where a rank's buffer is in memory. The caller owns `data`, and must keep it allocated as
// long as the engine uses it. Normally `data` is a row-major array with the shape given in
// megakernel/isa/buffers.py. For weights packed by mk_pack, `data` is the table of the matrix's panels.
MK_API void mk_bind(mk_engine* engine, int32_t rank, int32_t buffer, int32_t layer, void* data) {
  engine->interpreter->bind(rank, static_cast<mk::Buffer>(buffer), layer, data);
}

// Returns the address of a bound buffer, or null if nothing is bound.
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

// Waits at most `timeout_ms` for the launch to end, and returns its Status. After kFailed, mk_error() says
// which wait was not satisfied, and mk_reset must be called before the next launch.
MK_API int32_t mk_launch_wait(mk_engine* engine, int32_t timeout_ms) {
  return guarded(
      [&] {
        const mk::Status status = engine->interpreter->wait(std::chrono::milliseconds(timeout_ms));
        if (status == mk::Status::kFailed) last_error = engine->interpreter->error();
        return static_cast<int32_t>(status);
      },
      -1);
}

MK_API void mk_abort(mk_engine* engine) { engine->interpreter->abort(); }

// Resets a program's counters after a failed launch, so that the program can be launched again.
MK_API void mk_reset(mk_engine* engine, mk::Program* program) { engine->interpreter->reset(*program); }

// Runs one instruction of rank dims->rank on the calling thread, and ignores its waits and signals. `phases`
// is the rank's table of model operations, with kMaxPhases + 1 entries.
MK_API void mk_execute(mk_engine* engine, const mk::Dims* dims, const mk::Phase* phases, const int32_t* words,
                       const int32_t* record, int32_t layer) {
  engine->interpreter->execute(*dims, phases, words, record, layer);
}

MK_API void mk_delay(mk_engine* engine, int32_t segment, int32_t record, int32_t layer, int64_t ns) {
  engine->interpreter->delay = {segment, layer, record, ns};
}

// Returns the number of intervals, the entries of a trace, that the last traced launch recorded, or -1 on
// failure. If `out` is not null, also copies the intervals to `out`.
MK_API int64_t mk_intervals(mk_engine* engine, mk::Interval* out) {
  return guarded(
      [&] {
        const std::vector<mk::Interval> all = engine->interpreter->intervals();
        if (out != nullptr && !all.empty()) memcpy(out, all.data(), all.size() * sizeof(mk::Interval));
        return static_cast<int64_t>(all.size());
      },
      int64_t{-1});
}

// Returns how many seconds one reading of the clock takes.
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

MK_API double mk_probe_fma(const char* simd, int32_t integers, int32_t threads, double seconds) {
  return guarded(
      [&] {
        const mk::Kernels& kernels = mk::choose_kernels(simd, mk::Dtype::BF16);
        return mk::probe_multiply_add(integers ? kernels.multiply_integers : kernels.multiply_add, threads,
                                      seconds);
      },
      -1.0);
}
