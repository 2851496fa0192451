// Tensor cores: mma, ldmatrix and wgmma. The layouts of operands are those of the PTX ISA, written down here
// once more, independently of csrc/cuda/tensor_core.h.
#pragma once
#include "copies.h"
#include "warps.h"

namespace ptx {

inline float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
inline float half_of(uint32_t word, int half) { return from_bf16(static_cast<uint16_t>(word >> 16 * half)); }

// -- mma and ldmatrix

void Thread::mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct {
    float* c;
    const uint32_t *a, *b;
  } mine{c, a, b};
  meet(*this, "mma", true, mine, [](auto all) {
    float left[16][16], right[16][8];
    for (int lane = 0; lane < kLanes; ++lane) {
      const int group = lane / 4, pair = lane % 4 * 2;
      for (int half = 0; half < 2; ++half) {
        for (int word = 0; word < 4; ++word)
          left[group + word % 2 * 8][pair + word / 2 * 8 + half] = half_of(all[lane]->a[word], half);
        for (int word = 0; word < 2; ++word)
          right[pair + word * 8 + half][group] = half_of(all[lane]->b[word], half);
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += left[row][k] * right[k][column];
        all[lane]->c[i] += sum;
      }
    }
  });
}

// ldmatrix.x4.trans: loads four 8 x 8 matrices. Lane 8 m + r has the address of row r of matrix m. Each lane
// gets two elements of a column of each matrix.
void Thread::ldmatrix(uint32_t row, uint32_t (&d)[4]) {
  struct {
    const char* row;
    uint32_t* d;
  } mine{access(*this, generic(row), 16, false, kNone), d};
  meet(*this, "ldmatrix", true, mine, [](auto all) {
    const auto element = [&](int matrix, int row, int column) {
      return uint32_t{get<uint16_t>(all[8 * matrix + row]->row + 2 * column)};
    };
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        const int column = lane / 4, first = lane % 4 * 2;
        all[lane]->d[matrix] = element(matrix, first, column) | element(matrix, first + 1, column) << 16;
      }
    }
  });
}

// -- wgmma

// While a wgmma runs, its result registers hold a NaN whose bits say where the result is in Warp::results.
// The code may move this NaN or pass it to another wgmma; any other use makes the final result NaN.
constexpr uint32_t kPoison = 0xFFC00000, kPoisonIndex = 0x003FFFFF;

struct Operand {
  const char* page;
  uint32_t start, stride;  // both in bytes; `stride` is the distance between groups of eight rows
};

// Decodes the matrix descriptor of a wgmma operand, which must be K-major with the 128-byte swizzle.
inline Operand operand_of(const Thread& t, uint64_t descriptor, int rows) {
  Operand out{t.block->memory, static_cast<uint32_t>(descriptor & 0x3FFF) << 4,
              static_cast<uint32_t>(descriptor >> 32 & 0x3FFF) << 4};
  if (descriptor >> 62 != 1) world->fail(t, "a wgmma descriptor does not say 128-byte swizzle");
  if (descriptor >> 49 & 7) world->fail(t, "a wgmma descriptor has a base offset");
  if (out.start < kReserved || out.start + static_cast<uint32_t>(rows / 8 - 1) * out.stride + 1024 >
                                   kReserved + mk::kSharedBytes + 96) {
    world->fail(t, "a wgmma operand is outside the shared memory");
    out.start = kReserved;
    out.stride = 0;
  }
  return out;
}

inline uint32_t place(const Operand& o, int row, int byte) {
  const uint32_t at = o.start + static_cast<uint32_t>(row) / 8 * o.stride +
                      static_cast<uint32_t>(row) % 8 * 128 + static_cast<uint32_t>(byte);
  return at ^ (at >> 7 & 7) << 4;
}

// Reads rows [first, first + kRows) and 16 columns of an operand, transposed.
template <int kRows>
inline void fetch(const Thread& t, const Operand& o, int first, float (&out)[16][kRows]) {
  for (int row = 0; row < kRows; ++row) {
    for (int chunk = 0; chunk < 2; ++chunk) {
      const uint32_t at = place(o, first + row, 16 * chunk);
      touch_async(t, async_access(t, false, t.warp->wgmma_party, t.warp->wgmma_groups + 1, false),
                  reinterpret_cast<uint64_t>(o.page + at), 16);
      for (int k = 0; k < 8; ++k) out[8 * chunk + k][row] = from_bf16(get<uint16_t>(o.page + at + 2 * k));
    }
  }
}

// Checks that the four warps of a warpgroup execute the same wgmmas in the same order.
inline void compare_warpgroup(const Thread& t, uint64_t a, uint64_t b) {
  auto& own = t.warp->multiplied;
  own.emplace_back(t.site, a, b);
  const int first = t.warp->index / 4 * 4;
  for (int w = first; w < first + 4; ++w) {
    const auto& other = t.block->warps[w].multiplied;
    if (other.size() >= own.size() && other[own.size() - 1] != own.back())
      return world->fail(t, "the warps of a warpgroup execute different wgmmas");
  }
}

void Thread::wgmma_fence() {
  meet(*this, "wgmma.fence", true, *this, [this](auto) { warp->wgmma_fenced = true; });
}

void Thread::wgmma(void* const* d, int columns, uint64_t a, uint64_t b, bool accumulate) {
  struct {
    void* const* d;
    uint64_t a, b;
    bool accumulate;
  } mine{d, a, b, accumulate};
  meet(*this, "wgmma.mma_async", true, mine, [&](auto all) {
    for (int lane = 1; lane < kLanes; ++lane)
      if (all[lane]->a != a || all[lane]->b != b)
        world->fail(*this, "the lanes of a warp pass different descriptors to wgmma");
    if (!warp->wgmma_fenced) world->fail(*this, "no wgmma.fence precedes the first wgmma of a group");
    compare_warpgroup(*this, a, b);
    if (!warp->wgmma_party) warp->wgmma_party = world->party(*warp, ", its wgmma");
    static float left[16][16], right[16][128], sums[16][256];
    fetch(*this, operand_of(*this, a, 64), warp->index % 4 * 16, left);
    memset(sums, 0, sizeof sums);
    for (int first = 0; first < columns; first += 128) {
      fetch(*this, operand_of(*this, b, columns), first, right);
      for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k)
          for (int column = 0; column < 128; ++column)
            sums[row][first + column] += left[k][row] * right[k][column];
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      auto& results = warp->results[lane];
      for (int i = 0; i < columns / 2; ++i) {
        uint32_t bits;
        memcpy(&bits, all[lane]->d[i], sizeof bits);
        float before = all[lane]->accumulate ? std::bit_cast<float>(bits) : 0.0f;
        const uint32_t index = (bits & kPoisonIndex) - 1;  // no place: huge
        if ((bits & ~kPoisonIndex) == kPoison && index < results.size())
          before = all[lane]->accumulate ? results[index].value : 0.0f;
        bits = kPoison | static_cast<uint32_t>(results.size() + 1);
        results.push_back(
            {before + sums[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2], warp->wgmma_groups});
        memcpy(all[lane]->d[i], &bits, sizeof bits);
      }
    }
  });
}

void Thread::wgmma_commit() {
  meet(*this, "wgmma.commit_group", true, *this, [this](auto) {
    ++warp->wgmma_groups;
    warp->wgmma_fenced = false;
  });
}

void Thread::wgmma_wait(uint32_t pending, void* const* registers) {
  meet(*this, "wgmma.wait_group", true, *this, [&](auto) {
    const uint32_t done = warp->wgmma_groups - std::min(pending, warp->wgmma_groups);
    if (done <= warp->wgmma_done) return;
    warp->wgmma_done = done;
    warp->multiplications = with(nullptr, warp->wgmma_party, done);
  });
  auto& results = warp->results[lane];
  for (; *registers; ++registers) {
    uint32_t bits;
    memcpy(&bits, *registers, sizeof bits);
    const uint32_t index = (bits & kPoisonIndex) - 1;  // no place: huge
    if ((bits & ~kPoisonIndex) != kPoison || index >= results.size() ||
        results[index].group >= warp->wgmma_done)
      continue;
    memcpy(*registers, &results[index].value, sizeof bits);
  }
  if (warp->wgmma_done == warp->wgmma_groups) results.clear();
  knows->seen.all = join(knows->seen.all, warp->multiplications);
}

}  // namespace ptx
