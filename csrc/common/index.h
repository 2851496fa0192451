// Index arithmetic of the buffers that pages, items and owners address, in elements. Shapes:
// megakernel/isa/buffers.py. `D`: Dims, or Sizes.
#pragma once
#include "isa.h"

namespace mk {

// K_CACHE [page][KV head][element][token]: token 0 of one element.
template <class D>
MK_DIMS_FN inline int64_t k_index(const D& d, int64_t page, int64_t head, int64_t element) {
  return ((page * d.rank_kv_heads() + head) * d.head_dim + element) * d.page;
}

// V_CACHE [page][KV head][token][element]: element 0 of one token.
template <class D>
MK_DIMS_FN inline int64_t v_index(const D& d, int64_t page, int64_t head, int64_t token) {
  return ((page * d.rank_kv_heads() + head) * d.page + token) * d.head_dim;
}

// PARTIALS entry of one row and one KV head of a split item (both counted from the item's first) and KV block
// 0.
MK_DIMS_FN inline int64_t partial_index(const StepView& s, int32_t item, int64_t row, int64_t head) {
  return s.item_partial[item] + (row * s.item_kv_heads[item] + head) * s.item_span[item];
}

// Tokens of a KV block that the row at `position` may see.
MK_DIMS_FN inline int32_t visible_tokens(const Dims& d, int32_t position, int32_t block) {
  const int32_t tokens = position + 1 - block * d.kv_block;
  return tokens < 0 ? 0 : tokens < d.kv_block ? tokens : d.kv_block;
}

// Ranks [begin, end).
struct Ranks {
  int32_t begin, end;
};

MK_DIMS_FN inline Ranks own_rank(const Dims& d) { return {d.rank, d.rank + 1}; }

MK_DIMS_FN inline Ranks all_ranks(const Dims& d) { return {0, d.tp}; }

// Who keeps the residual of a token row: the owner of its row block, or every rank.
MK_DIMS_FN inline Ranks residual_ranks(const Dims& d, int32_t row) {
  if (d.one_hop) return all_ranks(d);
  const int32_t owner = row / d.row_block % d.tp;
  return {owner, owner + 1};
}

// Who gets a normalised row: every rank, where not each computes it itself.
MK_DIMS_FN inline Ranks norm_ranks(const Dims& d) { return d.one_hop ? own_rank(d) : all_ranks(d); }

// Whether this rank normalises logit row `i`: it keeps the residual; rank 0 does the padding.
MK_DIMS_FN inline bool norms_logit_row(const Dims& d, const StepView& s, int32_t i) {
  const int32_t row = s.logit_rows[i];
  if (d.one_hop) return true;
  return row < 0 ? d.rank == 0 : residual_ranks(d, row).begin == d.rank;
}

// REDUCE, on a rank that keeps residual rows: a slot for each rank's partials, of so many rows,
template <class D>
MK_DIMS_FN inline int32_t reduce_slot(const D& d) {
  return d.own_rows();
}
// in each of which token row `row` has this row:
template <class D>
MK_DIMS_FN inline int32_t reduce_place(const D& d, int32_t row) {
  return d.one_hop ? row : row / d.row_block / d.tp * d.row_block + row % d.row_block;
}
// the row where `rank` stores its partial of it.
template <class D>
MK_DIMS_FN inline int64_t reduce_row(const D& d, int32_t rank, int32_t row) {
  return int64_t{rank} * reduce_slot(d) + reduce_place(d, row);
}

}  // namespace mk
