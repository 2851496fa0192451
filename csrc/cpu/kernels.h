// The interface between the interpreter and the arithmetic: one function per operation, and one table per
// SIMD path.
#pragma once
#include "packed.h"

#define MK_INLINE inline __attribute__((always_inline))

namespace mk {

struct Bf16 {
  uint16_t bits;
};
// A bfloat16 that matmuls multiply in pairs: one instruction adds the products of two steps along K.
struct Bf16Pairs : Bf16 {};

// The limits of the blocking, for which the scratch memory is sized (gemm.h, attention.h).
constexpr int kTileRows = 96;      // token rows of one pass over a weight tile
constexpr int kTilePanels = 32;    // weight panels of one pass
constexpr int kMaxMicroRows = 12;  // rows of the register block
constexpr int kChunk = 256;        // steps along K between two accesses to the tile's accumulators
constexpr int kChunkStride =
    kChunk + 16;                 // floats; not a power of two, so that rows fall into different cache sets
constexpr int kWideSteps = 128;  // steps along K of quantised weights widened at a time
constexpr int kWideStride = kWideSteps * kPanel + 16;  // floats between two widened panels; see kChunkStride
constexpr int kWidePanels = 4;  // maximum number of panels that a register block covers
constexpr int kQueryRows = 64;  // (row, query head) pairs that share one pass over a KV block

// The distance in floats between two elements of the widened keys. Like kChunkStride, it is not a
// power of two.
inline int64_t key_stride(const Dims& d) { return d.kv_block + 16; }

// The working memory of a thread, allocated when the engine is created.
struct Scratch {
  float* activations;  // rows of A in float32, by chunk
  float* tile;         // kTileRows x kTilePanels * kPanel accumulators
  float* weights;      // widened panels: kWidePanels x kWideStride
  float* keys;         // head_dim x key_stride(dims)
  float* values;       // kv_block x head_dim, rows padded to kPanel
  float* scales;       // scales of quantised values: blocks of a head x kv_block
  float* queries;      // query rows x head_dim
  float* scores;       // query rows x kv_block
  float* block_out;    // query rows x head_dim, padded: o of one block
  float* merged_out;   // like block_out: o of all blocks so far
  float* stats;        // 4 x query rows: m and l of the block, m and l so far
  float* logits;       // vocab
  int32_t* counts;     // vocab, zero between calls
};

class Audit;

// The layer whose weights a phase reads when it runs in `layer`.
inline int32_t weights_layer(const Phase& phase, const Dims& d, int32_t layer) {
  return lower_of(layer + phase.ahead, d.layers - 1);
}

// The inputs of an operation's function.
struct Call {
  const Dims* dims;
  const Phase* phase;  // as the rank sees it
  const StepView* step;
  void* const* buffers;  // [rank][buffer][layer]
  Scratch* scratch;
  const int32_t* abort;  // non-zero: leave soon, because results no longer matter
  int64_t* link_bytes;   // bytes stored on other ranks by this one
  int32_t layer;
  int32_t item = 0;                 // attention: the work item
  Audit* audit = nullptr;           // checks remote stores; null if there is no audit
  const char* name = "";            // the phase's name; for the audit, like the next two
  int32_t segment = 0, number = 0;  // of the instruction, as in a trace

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
  // Null if the phase has none.
  MK_INLINE const float* bias() const {
    return phase->bias == Buffer::kNone ? nullptr : at<float>(phase->bias);
  }
  template <class T>
  MK_INLINE T* at(Buffer buffer) const {
    return copy<T>(buffer, dims->rank);
  }
  // A rank's copy of a buffer. Other ranks' copies are write-only.
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
        buffers[(int64_t{rank} * kBuffers + b) * dims->layers + (kLayered[b] ? of_layer : 0)]);
  }
};

using Op = void (*)(const Call& call, const int32_t* record);

struct Kernels {
  const char* name;
  Op ops[kOperations];  // indexed by Operation, like the next
  // The part of an instruction that copies results to other ranks, if the operation has a separate function
  // for it; otherwise null.
  Op send[kOperations];
  Op attention_merge;  // computes the output rows once all items of call.item's split have run
  // reads every byte and returns a sum, so that reading cannot be optimised away
  double (*read)(const void* data, int64_t bytes);
  double (*multiply_add)(int64_t rounds, double* flops);  // dependent chains that occupy the FMA units

  Op op(const Phase& phase) const { return ops[static_cast<int32_t>(phase.operation)]; }
  Op sender(const Phase& phase) const { return send[static_cast<int32_t>(phase.operation)]; }
};

// Each is nullptr if the build or this processor lacks it.
const Kernels* portable_kernels(Dtype dtype);
const Kernels* avx2_kernels(Dtype dtype);
const Kernels* avx512_kernels(Dtype dtype);
const Kernels* avx512bf16_kernels(Dtype dtype);  // also nullptr if this processor's pairs give other bits
const Kernels* null_kernels();

// The table that `simd` names ("": the widest that this processor has). Throws std::runtime_error.
const Kernels& choose_kernels(const char* simd, Dtype dtype);

}  // namespace mk
