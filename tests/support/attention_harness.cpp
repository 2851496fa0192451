// Compiles csrc/cuda/ops/attention_mma.h for the host. Each lane of a warp is a thread, and mma, ldmatrix and
// shuffles are functions that follow their description in the PTX ISA.
#include <barrier>
#include <thread>
#include <vector>

#include "../../csrc/cuda/ops/softmax.h"
#define __device__
#define __forceinline__ inline

namespace {

constexpr int kLanes = 32;
// Shared memory holds both halves of the keys, followed by one half of the values.
alignas(1024) unsigned char shared[3 * mk::kPageBytes];
thread_local int own_lane;
std::barrier<> meeting(kLanes);

uint32_t __cvta_generic_to_shared(const void* p) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - shared);
}

// The values that all 32 lanes passed to the constructor, in `of`. Every lane must construct a Gathered at
// the same point, because the constructor waits for all lanes.
template <class T>
struct Gathered {
  T of[kLanes];

  explicit Gathered(const T& mine) {
    static T slots[kLanes];
    slots[own_lane] = mine;
    meeting.arrive_and_wait();
    for (int lane = 0; lane < kLanes; ++lane) of[lane] = slots[lane];
    meeting.arrive_and_wait();
  }
};

struct Operands {
  uint32_t a[4], b[2];
};

}  // namespace

namespace mk {

template <class T>
T exchange_xor(T value, int mask) {
  return Gathered<T>(value).of[own_lane ^ mask];
}

inline float element(const uint32_t* words, int i) {
  return i % 2 ? high_half(words[i / 2]) : low_half(words[i / 2]);
}

// Each lane holds eight elements of A and four of B.
//
// Element i of A: the row is lane / 4, plus 8 if i is 2, 3, 6 or 7.
// The k is lane % 4 * 2 + i % 2, plus 8 if i > 3.
//
// Element i of B: the column is lane / 4.
// The k is lane % 4 * 2 + i % 2, plus 8 if i > 1.
inline void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const Gathered<Operands> all(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  for (int i = 0; i < 4; ++i) {
    const int row = own_lane / 4 + i / 2 * 8, column = own_lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const Operands& left = all.of[row % 8 * 4 + k % 8 / 2];
      const Operands& right = all.of[column * 4 + k % 8 / 2];
      c[i] += element(left.a, k % 2 + row / 8 * 2 + k / 8 * 4) * element(right.b, k % 2 + k / 8 * 2);
    }
  }
}

// Emulates ldmatrix.x4.trans: lanes 8 * m to 8 * m + 7 pass the addresses of the rows of matrix m. Since the
// matrices are transposed, each lane receives two neighbouring elements of a column.
inline void load_matrices(uint32_t (&b)[4], uint32_t row) {
  const Gathered<uint32_t> rows(row);
  for (int m = 0; m < 4; ++m) {
    b[m] = 0;
    for (int i = 0; i < 2; ++i) {
      const uint32_t at = rows.of[8 * m + own_lane % 4 * 2 + i] + own_lane / 4 * 2;
      uint16_t value;
      memcpy(&value, shared + at, sizeof value);
      b[m] |= uint32_t{value} << 16 * i;
    }
  }
}

}  // namespace mk

#define shuffle_xor exchange_xor
#include "../../csrc/cuda/ops/attention_mma.h"

namespace {

struct Lane {
  int lane() const { return own_lane; }
};

}  // namespace

// Computes the attention of 16 query rows [16][head_dim] to one KV block, and writes `out` [16][head_dim].
// `keys` [element][token] and `values` [token][element] have the layout of shared memory: the keys are two
// halves of 64 tokens, with key_bytes bytes each, and the values are two halves of 64 elements.
extern "C" void attend(const uint16_t* queries, const int32_t* positions, const unsigned char* keys,
                       int key_bytes, const unsigned char* values, int head_dim, uint16_t* out) {
  memcpy(shared, keys, 2 * key_bytes);
  memcpy(shared + mk::kPageBytes * 2, values, mk::kPageBytes);
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes.emplace_back([=] {
      own_lane = lane;
      Lane p;
      mk::AttentionTile<Lane> tile(p, head_dim);
      tile.start([=](int i) { return queries + i * head_dim; }, [=](int i) { return positions[i]; });
      tile.scores<0>(shared);
      tile.scores<1>(shared + key_bytes);
      tile.softmax(1.0f / sqrtf(static_cast<float>(head_dim)), 0);
      tile.merge();
      tile.values<0>(shared + mk::kPageBytes * 2, false);
      if (head_dim > 64) {
        meeting.arrive_and_wait();
        if (lane == 0) memcpy(shared + mk::kPageBytes * 2, values + mk::kPageBytes, mk::kPageBytes);
        meeting.arrive_and_wait();
        tile.values<1>(shared + mk::kPageBytes * 2, false);
      }
      tile.store_results([=](int i) { return out + i * head_dim; });
    });
  }
  for (std::thread& lane : lanes) lane.join();
}
