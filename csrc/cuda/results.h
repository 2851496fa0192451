// What a matmul does with its results, one class for each destination:
//   row(r)     returns what `store` needs of output row r, such as addresses
//   column(c)  returns what `store` needs of the output columns c and c + 1, where c is even
//   store      writes the results for one row and two adjacent columns with ordinary stores
//   pair       returns the results for two columns, to be written to a stage; if kTwo, from gate and up
#pragma once
#include "../common/index.h"
#include "arithmetic.h"
#include "ops/call.h"
#include "ops/memory.h"
#include "ops/softmax.h"
#include "routes.h"

namespace mk {

// Returns the KV page in which row r's key and value are stored; -1 for padding rows.
MK_FN int32_t page_of_row(const Call& c, int r) {
  const int32_t seq = c.step->row_seq[r];
  if (seq < 0) return -1;
  return c.step->block_tables[int64_t{seq} * c.dims->pages_per_seq() + c.step->positions[r] / kKvBlock];
}

// Destination of a QKV projection: queries go to the phase's output, keys and values to the KV cache. Queries
// and keys are rotated (RoPE) by the angles of the row's position. If the model normalises heads, the caller
// passes every column of a head to `store` twice. The first time, with `squares` set, `store` only adds the
// column's square to Row.norm. The caller then adds up Row.norm over the lanes or warps that share the row,
// and replaces the sum by the factor `scale(sum)`. The second time, `store` stores the results.
class ToHeads {
 public:
  struct Row {
    const float* rope;
    // The addresses of the row's query, key and value, at element 0 of head 0. k and v are null for padding
    // rows.
    uint16_t *q, *k, *v;
    float norm;  // first the sum of squares of the current head, then the head's scale factor
  };

  MK_FN explicit ToHeads(const Call& c)
      : c_(c),
        d_(*c.dims),
        q_cols_(d_.q_cols()),
        kv_cols_(d_.kv_cols()),
        head_dim_(d_.head_dim),
        bias_(kBiases ? c.weights<float>(c.phase().bias) : nullptr),
        norm_(kHeadNorms ? c.weights<float>(c.phase().head_norm) : nullptr) {}

  bool squares = false;

  MK_FN int head_dim() const { return head_dim_; }
  // Whether column `col` belongs to a head that is normalised: a query or key head of a phase with a head
  // norm.
  MK_FN bool normed(int col) const { return norm_ && col < q_cols_ + kv_cols_; }
  MK_FN float scale(float squares) const {
    return one_over_root(squares * (1.0f / static_cast<float>(head_dim_)) + d_.rms_eps);
  }

  MK_FN Row row(int r) const {
    Row out{c_.at<float>(Buffer::ROPE) + int64_t{r} * d_.head_dim,
            c_.output<uint16_t>(d_.rank) + int64_t{r} * d_.q_cols(), nullptr, nullptr, norm_ ? 0.0f : 1.0f};
    const int32_t position = kOneRow ? c_.early.position : c_.step->positions[r], token = position % kKvBlock;
    const int32_t page = kOneRow ? here(c_.early.page) : page_of_row(c_, r);
    if (page >= 0) {
      out.k = c_.at<uint16_t>(Buffer::K_CACHE) + k_index(d_, page, 0, 0) + token;
      out.v = c_.at<uint16_t>(Buffer::V_CACHE) + v_index(d_, page, 0, token);
    }
    return out;
  }

  // Data for two adjacent columns. `to`: the buffer for them (Q, K_CACHE or V_CACHE). `element`: the index of
  // the first column in its head. `at`: the offset of the columns, in elements, from the row's address in
  // Row.
  struct Column {
    Buffer to;
    int element;
    int64_t at;
    Pair bias, scale;
  };

  MK_FN Column column(int col) const {
    const int k = col - q_cols_, v = k - kv_cols_;
    const Pair bias = bias_ ? *reinterpret_cast<const Pair*>(bias_ + col) : Pair{0, 0};
    const int element = col % head_dim_;
    if (v >= 0) return {Buffer::V_CACHE, element, int64_t{v - element} * kKvBlock + element, bias, {1, 1}};
    const Pair scale =
        norm_ ? *reinterpret_cast<const Pair*>(norm_ + (k < 0 ? 0 : head_dim_) + element) : Pair{1, 1};
    if (k < 0) return {Buffer::Q, element, col, bias, scale};
    // A page of the key cache has the layout [head][element][token], with kKvBlock tokens. So two successive
    // elements of a token are kKvBlock apart, also where the next head begins.
    return {Buffer::K_CACHE, element, int64_t{k} * kKvBlock, bias, scale};
  }

  // Returns the cosine and the sine of the RoPE angle of two adjacent columns.
  MK_FN static Pair angle(const Row& row, const Column& column) {
    return load_pair(row.rope + column.element);
  }

  MK_FN void store(Row& row, const Column& column, float a, float b) const {
    store(row, column, a, b, [&] { return angle(row, column); });
  }
  template <class Angle>
  MK_FN void store(Row& row, const Column& column, float a, float b, const Angle& angle_of) const {
    a += column.bias.a, b += column.bias.b;
    if (column.to == Buffer::V_CACHE) {
      if (row.v) store_pair(row.v + column.at, a, b);
      return;
    }
    if (squares) {
      row.norm += a * a + b * b;
      return;
    }
    const bool late = kWide && d_.late_scales;
    a *= row.norm, b *= row.norm;
    if (!late) a *= column.scale.a, b *= column.scale.b;
    const Pair angle = angle_of();
    float x = a * angle.a - b * angle.b, y = b * angle.a + a * angle.b;
    if (late) x *= column.scale.a, y *= column.scale.b;
    if (column.to == Buffer::Q) {
      store_pair(row.q + column.at, x, y);
    } else if (row.k) {
      row.k[column.at] = to_bf16(x);
      row.k[column.at + kKvBlock] = to_bf16(y);
    }
  }

 private:
  const Call& c_;
  const Sizes& d_;
  const int q_cols_, kv_cols_, head_dim_;
  const float *const bias_, *const norm_;
};

// The common base of all destinations except ToHeads. `store` needs only the column's number.
class To {
 public:
  using Element = uint16_t;
  static constexpr bool kTwo = false;

  MK_FN explicit To(const Call& c) : c_(c), bias_(kBiases ? c.weights<float>(c.phase().bias) : nullptr) {
    if (is_experts(*c.task) && bias_)
      bias_ += int64_t{part_of(*c.task).expert} * c.phase().matrices * c.phase().width;
  }

  MK_FN int column(int col) const { return col; }

 protected:
  const Call& c_;
  const float* bias_;
};

// Adds the results to the output, which is the residual, or stores them there if the result is kStored.
// An addition is a single memory access, and no warp waits for it. Still, the order of additions is
// fixed: in each phase, one instruction adds to each element, and the counters order the phases. The
// additions are relaxed atomics. The instruction's signal makes them visible, because each warp arrives
// at `outputs` only after its own additions.
class ToResidual : public To {
 public:
  using To::To;
  using Row = float*;
  using Element = float;

  MK_FN Row row(int r) const { return c_.output<float>(c_.dims->rank) + int64_t{r} * c_.phase().width; }
  MK_FN Pair pair(int col, Pair sums, Pair) const {
    if (!bias_) return sums;
    const Pair bias = *reinterpret_cast<const Pair*>(bias_ + col);
    return {sums.a + bias.a, sums.b + bias.b};
  }
  MK_FN void store(Row row, int col, float a, float b) const {
    const Pair sums = pair(col, {a, b}, {});
    c_.early.result == Result::kStored ? store_pair(row + col, sums) : add_pair(row + col, sums);
  }
};

// Destination of partial sums that a later all-reduce adds up. They go to the rank that stores the row's
// residual, or to all ranks if the residual is replicated. Each sending rank has a separate section of
// the output buffer.
class ToPartial : public To {
 public:
  using To::To;
  struct Row {
    Ranks ranks;
    int64_t at;
  };
  MK_FN Pair pair(int, Pair sums, Pair) const { return sums; }

  MK_FN Row row(int r) const {
    const Sizes& d = *c_.dims;
    return {residual_ranks(d, r), int64_t{d.reduce_row(d.rank, r)} * c_.phase().width};
  }
  MK_FN void store(const Row& row, int col, float a, float b) const {
    MK_LOOP for (int rank = row.ranks.begin; rank < row.ranks.end; ++rank)
        store_pair(c_.copy<uint16_t>(c_.phase().output, rank) + row.at + col, a, b);
  }
};

// Stores silu(gate) * up or gelu(gate) * up or, for experts with clipped gates, the formula in
// megakernel/isa/operations/experts.py. Unlike in the other classes, `store` takes two values of one
// column: gate and up.
class ToGated : public To {
 public:
  using Row = uint16_t*;
  static constexpr bool kTwo = true;

  MK_FN explicit ToGated(const Call& c) : To(c), gelu_(c.early.result == Result::kGeluGated) {}

  MK_FN Row row(int r) const { return c_.output<uint16_t>(c_.dims->rank) + int64_t{r} * c_.phase().width; }
  MK_FN Pair pair(int col, Pair gate, Pair up) const {
    return {value(col, gate.a, up.a), value(col + 1, gate.b, up.b)};
  }
  MK_FN float value(int col, float gate, float up) const {
    if (bias_) gate += bias_[col], up += bias_[c_.phase().width + col];
    if (is_experts(*c_.task) && c_.dims->clipped_gates) {
      gate = gate > kGateLimit ? kGateLimit : gate;
      up = up > kGateLimit ? kGateLimit : up < -kGateLimit ? -kGateLimit : up;
      return gated(gate, kGateSlope * gate) * (up + 1.0f);
    }
    return gated(gate, gelu_ ? gelu_exponent(gate) : gate) * up;
  }
  MK_FN void store(Row row, int col, float gate, float up) const { row[col] = to_bf16(value(col, gate, up)); }

 private:
  const bool gelu_;
};

// Stores the results of experts, rounded to bf16. If each rank has a part of every expert, the ranks'
// results are added up later, so only rank 0 adds the bias.
class ToRows : public To {
 public:
  using To::To;
  using Row = uint16_t*;

  MK_FN Row row(int r) const { return c_.at<uint16_t>(c_.phase().output) + int64_t{r} * c_.phase().width; }
  MK_FN void store(Row row, int col, float a, float b) const {
    if (bias_ && (c_.dims->rank == 0 || c_.dims->expert_parallel)) a += bias_[col], b += bias_[col + 1];
    store_pair(row + col, a, b);
  }
};

// Stores this rank's vocabulary columns of the logits in the output buffer of the rank that samples the row.
class ToLogits : public To {
 public:
  using To::To;
  using Row = float*;

  MK_FN Row row(int r) const {
    const Sizes& d = *c_.dims;
    return c_.output<float>(r / d.own_logit_rows()) + int64_t{r} * d.vocab + d.first_vocab();
  }
  MK_FN void store(Row row, int col, float a, float b) const {
    const float cap = kWide ? c_.dims->logit_cap : 0.0f;
    row[col] = capped(a, cap);
    if (col + 1 < c_.dims->rank_vocab()) row[col + 1] = capped(b, cap);
  }
};

}  // namespace mk
