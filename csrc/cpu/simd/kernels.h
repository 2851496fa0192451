// The interface between the interpreter and the functions that compute. There is one function per operation
// and one table of functions per SIMD path.
#pragma once
#include <string.h>

#include "packed.h"

#define MK_INLINE inline __attribute__((always_inline))

namespace mk {

struct Bf16 {
  uint16_t bits;
};
// A bfloat16 that matmuls multiply in pairs: one instruction adds the products of two steps along K.
struct Bf16Pairs : Bf16 {};

// Maximum block sizes of matmuls (gemm.h) and attention (attention.h). They determine how much scratch memory
// a thread needs.
constexpr int kTileRows = 96;      // token rows that share one pass over the weights
constexpr int kTilePanels = 32;    // weight panels (16 columns each) that share one pass over K
constexpr int kMaxMicroRows = 12;  // maximum number of token rows whose results are in registers together
constexpr int kChunk = 256;        // with many rows, accumulators are stored after this many steps along K
constexpr int kChunkStride =
    kChunk + 16;  // row stride in floats; not a power of two, so that rows use different cache sets
constexpr int kRoundedBytes = (kChunk / kUnit + 1) * 64;  // for kChunk rounded activations of a row
constexpr int kWideSteps = 128;  // steps along K whose quantised weights are converted to float32 at a time
constexpr int kWideStride = kWideSteps * kPanel + 16;  // floats per converted panel; not a power of two
constexpr int kWidePanels = 4;  // maximum number of panels that a register block covers
constexpr int kQueryRows = 64;  // (row, query head) pairs that share one pass over a KV block

// Returns the number of floats from one row to the next in the float32 copy of a KV block's keys. The
// copy has the shape [element of head_dim][token]. The number is not a power of two, so that rows map to
// different cache sets.
inline int64_t key_stride(const Dims& d) { return d.kv_block + 16; }

// Says which rows of a matmul's inputs have been rounded to integers.
struct RoundedRows {
  const Dims* dims = nullptr;
  const Phase* phase = nullptr;
  int32_t layer = 0, row = 0, rows = 0;
  bool operator==(const RoundedRows&) const = default;
};

// The working memory of a thread, allocated when the engine is created. The comments give the shapes of the
// arrays. `pairs` is the number of (token row, query head) pairs that attention computes together. The
// softmax state of a pair is its maximum score m, its sum of exponentials l and its weighted sum of values o.
struct Scratch {
  float* activations;        // inputs of a matmul: [chunk of kChunk steps along K][token row][kChunkStride]
  void* rounded;             // rounded inputs of a matmul: [chunk][token row][kRowUnits] Rounded (integers.h)
  RoundedRows rounded_rows;  // what `rounded` has, so that the next tile of these rows can use it
  float* tile;               // accumulators of a matmul: [kTileRows][kTilePanels * kPanel]
  float* weights;            // quantised weight panels, converted to float32: [kWidePanels][kWideStride]
  float* keys;               // keys of a KV block, converted to float32: [head_dim][key_stride(dims)]
  float* values;      // values of a KV block, converted to float32: [kv_block][head_dim, padded to kPanel]
  float* scales;      // scales of a head's quantised values: [quantisation block][kv_block]
  float* queries;     // the queries: [pairs][head_dim], or Rounded (integers.h) if keys are quantised
  float* scores;      // scores, then softmax weights, of one KV block: [pairs][kv_block]
  float* block_out;   // softmax-weighted sums of one KV block's values: [pairs][head_dim, padded to kPanel]
  float* merged_out;  // softmax-weighted sums over all KV blocks so far: [pairs][head_dim, padded to kPanel]
  float* stats;       // softmax maxima and sums: of one KV block, then of all KV blocks so far: [4][pairs]
  float* logits;      // logits of one row: [vocab]
  int32_t* counts;    // how often a sequence contains each token id: [vocab]; all zero between calls
};

// Returns the layer whose weights a phase reads when it runs in layer `layer`: phase.ahead layers further on,
// but at most the last layer.
inline int32_t weights_layer(const Phase& phase, const Dims& d, int32_t layer) {
  return lower_of(layer + phase.ahead, d.layers - 1);
}

// The arguments of a function that executes an instruction.
struct Call {
  const Dims* dims;
  const Phase* phase;  // parameters of the operation, with the sizes that it has on this rank
  const StepView* step;
  void* const* buffers;  // [rank][buffer][layer]
  Scratch* scratch;
  const int32_t* abort;  // non-zero if the launch was aborted; the function then returns soon
  int64_t* link_bytes;   // counts the bytes that the thread stores on other ranks
  int32_t layer;
  bool bf16_pairs = false;  // whether matmuls use the instruction for pairs of bfloat16 values
  int32_t item = 0;         // index of the attention work item in the step table

  template <class T>
  MK_INLINE T* inputs() const {
    return at<T>(phase->inputs);
  }
  template <class T>
  MK_INLINE T* output() const {
    return at<T>(phase->output);
  }
  template <class T>
  MK_INLINE const T* weights() const {
    return copy<T>(phase->weights, dims->rank, weights_layer(*phase, *dims, layer));
  }
  // Returns the phase's bias, or null if the phase adds no bias.
  MK_INLINE const float* bias() const {
    return phase->bias == Buffer::kNone ? nullptr : at<float>(phase->bias);
  }
  template <class T>
  MK_INLINE T* at(Buffer buffer) const {
    return copy<T>(buffer, dims->rank);
  }
  // Returns `rank`'s copy of a buffer. Code may write the copies of other ranks but not read them.
  template <class T>
  MK_INLINE T* copy(Buffer buffer, int rank) const {
    return copy<T>(buffer, rank, layer);
  }
  MK_INLINE bool aborted() const { return __atomic_load_n(abort, __ATOMIC_RELAXED) != 0; }

 private:
  template <class T>
  MK_INLINE T* copy(Buffer buffer, int rank, int32_t of_layer) const {
    const int32_t b = static_cast<int32_t>(buffer);
    return static_cast<T*>(
        buffers[(int64_t{rank} * kBuffers + b) * dims->layers + (kLayered >> b & 1 ? of_layer : 0)]);
  }
};

// Copies `bytes` bytes to another rank's memory and adds them to the calling thread's link_bytes. No other
// function writes another rank's memory.
MK_INLINE void store_remote(const Call& call, void* to, const void* from, int64_t bytes) {
  *call.link_bytes += bytes;
  memcpy(to, from, bytes);
}

using Op = void (*)(const Call& call, const int32_t* record);

struct Kernels {
  const char* name;
  bool bf16_pairs;  // whether matmuls use the processor's instruction for pairs of bfloat16 values
  // `ops` and `send` are indexed by Operation.
  Op ops[kOperations];
  // Copies an instruction's results to other ranks. Null if the operation has no separate function for this.
  Op send[kOperations];
  // Merges the partial results of attention rows whose KV blocks were divided among several work items.
  // Called once all of these items have run.
  Op attention_merge;
  // Reads every byte of `data`, to measure memory bandwidth. Returns a sum, so that the compiler cannot
  // remove the reads.
  double (*read)(const void* data, int64_t bytes);
  // Executes enough independent FMAs to keep the FMA units busy, to measure peak FLOP/s. Stores the number of
  // floating-point operations that it has executed in `flops`.
  double (*multiply_add)(int64_t rounds, double* flops);
  // Executes multiply-adds of 8-bit integers, to measure their peak rate. Stores the number of operations
  // that it has executed in `operations`.
  double (*multiply_integers)(int64_t rounds, double* operations);

  Op op(const Phase& phase) const { return ops[static_cast<int32_t>(phase.operation)]; }
  Op sender(const Phase& phase) const { return send[static_cast<int32_t>(phase.operation)]; }
};

// Each function returns the kernels of one SIMD path for activations of type `dtype`.
const Kernels* portable_kernels(Dtype dtype);
const Kernels* avx2_kernels(Dtype dtype);
const Kernels* avx512_kernels(Dtype dtype);
// Returns nullptr if this processor's instruction for pairs of bfloat16 values rounds differently from the
// other SIMD paths.
const Kernels* avx512bf16_kernels(Dtype dtype);
const Kernels* null_kernels();

// Returns the kernels for `simd`, such as avx2; if it is empty, for the widest instruction set of this
// processor. Throws std::runtime_error if the name is unknown or the processor lacks the instruction set.
const Kernels& choose_kernels(const char* simd, Dtype dtype);

}  // namespace mk
