// csrc/cuda/ops/attention_mma.h on the host: a thread for each lane of a warp, and mma, ldmatrix and shuffles
// as the PTX ISA describes them.
#include <barrier>
#include <thread>
#include <vector>

#include "../../csrc/cuda/ops/softmax.h"
#define __device__
#define __forceinline__ inline

namespace {

constexpr int kLanes = 32;
alignas(1024) unsigned char shared[3 * mk::kPageBytes];  // two halves of keys, then one of values
thread_local int own_lane;
std::barrier<> meeting(kLanes);

uint32_t __cvta_generic_to_shared(const void* p) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - shared);
}

// What all lanes give.
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

// Element i of A, eight of a lane: row lane / 4 (+ 8 for i of 2, 3, 6, 7), k lane % 4 * 2 + i % 2 (+ 8 from 4
// on). Element i of B, four: k lane % 4 * 2 + i % 2 (+ 8 from 2 on), column lane / 4.
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

// Matrix m has its rows from lanes 8 m on; transposed, a lane gets two neighbours of a column.
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

// One KV block: 16 query rows [16][head_dim], pages of keys [element][token] and of values [token][element]
// as they lie in shared memory, in halves of 64 tokens or elements. out: [16][head_dim].
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
