// The destinations of a matmul's results, with a class for each. `store` puts the results of a row and two
// neighbouring columns into place with ordinary stores. `row` and `column` return what `store` needs to know
// of a row and of a pair of columns; they take the number of the row and of the first column, an even one, in
// the output. Where the tensor path stores through output pages, `value` is the value in the page.
#pragma once
#include "../common/index.h"
#include "arithmetic.h"
#include "ops/call.h"
#include "ops/memory.h"
#include "ops/softmax.h"

namespace mk {

// Queries go to the output, keys and values to the cache. q and k are rotated by the angles of the row's
// position, and normalised first if the phase says so. All columns of a normalised head are passed to `store`
// twice. The first time `squares` is set, and `store` adds their squares to Row.norm. The caller adds these
// sums over all lanes or warps that have a part of the row; `scale` turns the result into the factor that
// Row.norm must have the second time.
class ToHeads {
 public:
  struct Row {
    const float* rope;
    uint16_t *q, *k, *v;  // k and v: of the row's token, element 0 of head 0; null for padding
    float norm;           // of the present head: the sum of its squares, then the factor
  };

  MK_FN explicit ToHeads(const Call& c)
      : c_(c),
        d_(*c.dims),
        q_cols_(d_.q_cols()),
        kv_cols_(d_.kv_cols()),
        head_dim_(d_.head_dim),
        bias_(c.weights<float>(c.phase().bias)),
        norm_(c.weights<float>(c.phase().head_norm)) {}

  bool squares = false;

  MK_FN int head_dim() const { return head_dim_; }
  // Whether the column's head is normalised.
  MK_FN bool normed(int col) const { return norm_ && col < q_cols_ + kv_cols_; }
  MK_FN float scale(float squares) const {
    return one_over_root(squares * (1.0f / static_cast<float>(head_dim_)) + d_.rms_eps);
  }

  MK_FN Row row(int r) const {
    Row out{c_.at<float>(Buffer::ROPE) + int64_t{r} * d_.head_dim,
            c_.at<uint16_t>(c_.phase().output) + int64_t{r} * d_.q_cols(), nullptr, nullptr,
            norm_ ? 0.0f : 1.0f};
    const int32_t seq = c_.step->row_seq[r], position = c_.step->positions[r], token = position % kKvBlock;
    if (seq >= 0) {
      const int32_t page = c_.step->block_tables[int64_t{seq} * d_.pages_per_seq() + position / kKvBlock];
      out.k = c_.at<uint16_t>(Buffer::K_CACHE) + k_index(d_, page, 0, 0) + token;
      out.v = c_.at<uint16_t>(Buffer::V_CACHE) + v_index(d_, page, 0, token);
    }
    return out;
  }

  // The buffer (Q, K_CACHE or V_CACHE), the column's element in its head, and its place in the buffer,
  // counted from the address in Row.
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
    // Heads follow each other; two consecutive elements are kKvBlock tokens apart.
    return {Buffer::K_CACHE, element, int64_t{k} * kKvBlock, bias, scale};
  }

  MK_FN void store(Row& row, const Column& column, float a, float b) const {
    a += column.bias.a, b += column.bias.b;
    if (column.to == Buffer::V_CACHE) {
      if (row.v) store_pair(row.v + column.at, a, b);
      return;
    }
    if (squares) {
      row.norm += a * a + b * b;
      return;
    }
    a = a * row.norm * column.scale.a, b = b * row.norm * column.scale.b;
    const Pair angle = load_pair(row.rope + column.element);
    const float x = a * angle.a - b * angle.b, y = b * angle.a + a * angle.b;
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

// The common base of all destinations but ToHeads. They need to know only a column's number.
class To {
 public:
  MK_FN explicit To(const Call& c) : c_(c), bias_(c.weights<float>(c.phase().bias)) {}

  MK_FN int column(int col) const { return col; }

 protected:
  const Call& c_;
  const float* const bias_;
};

// output += .
class ToResidual : public To {
 public:
  using To::To;
  using Row = float*;

  MK_FN Row row(int r) const { return c_.at<float>(c_.phase().output) + int64_t{r} * c_.phase().width; }
  MK_FN Pair value(int col, float a, float b) const {
    if (!bias_) return {a, b};
    const Pair bias = *reinterpret_cast<const Pair*>(bias_ + col);
    return {a + bias.a, b + bias.b};
  }
  MK_FN void store(Row row, int col, float a, float b) const {
    const Pair x = load_pair(row + col), t = value(col, a, b);
    *reinterpret_cast<Pair*>(row + col) = {x.a + t.a, x.b + t.b};
  }
};

// This rank's slot of the output, at the rank that keeps the residual of the row.
class ToPartial : public To {
 public:
  using To::To;
  struct Row {
    Ranks ranks;
    int64_t at;
  };

  MK_FN Row row(int r) const {
    const Sizes& d = *c_.dims;
    return {residual_ranks(d, r), int64_t{d.reduce_row(d.rank, r)} * c_.phase().width};
  }
  MK_FN void store(const Row& row, int col, float a, float b) const {
    MK_LOOP for (int rank = row.ranks.begin; rank < row.ranks.end; ++rank)
        store_pair(c_.copy<uint16_t>(c_.phase().output, rank) + row.at + col, a, b);
  }
};

// output = silu(gate) * up. Here `store` takes gate and up of one column.
class ToGated : public To {
 public:
  using To::To;
  using Row = uint16_t*;

  MK_FN Row row(int r) const { return c_.at<uint16_t>(c_.phase().output) + int64_t{r} * c_.phase().width; }
  MK_FN float value(int col, float gate, float up) const {
    if (bias_) gate += bias_[col], up += bias_[c_.phase().width + col];
    return silu(gate) * up;
  }
  MK_FN void store(Row row, int col, float gate, float up) const { row[col] = to_bf16(value(col, gate, up)); }
};

// The output at the rank that samples the row.
class ToLogits : public To {
 public:
  using To::To;
  using Row = float*;

  MK_FN Row row(int r) const {
    const Sizes& d = *c_.dims;
    return c_.copy<float>(c_.phase().output, r / d.own_logit_rows()) + int64_t{r} * d.vocab + d.first_vocab();
  }
  MK_FN void store(Row row, int col, float a, float b) const {
    row[col] = a;
    if (col + 1 < c_.dims->rank_vocab()) row[col + 1] = b;
  }
};

}  // namespace mk
