// Index arithmetic, in elements, for buffers that are addressed by page, item or owner.
// megakernel/isa/buffers.py has the shapes. `D` is Dims or Sizes.
#pragma once
#include "isa.h"

namespace mk {

// The index in K_CACHE [page][KV head][row][token] of token 0 of one row. A row holds one element unless K is
// quantised.
template <class D>
MK_DIMS_FN inline int64_t k_index(const D& d, int64_t page, int64_t head, int64_t row) {
  return ((page * d.rank_kv_heads() + head) * d.kv_row() + row) * d.kv_page;
}

// The bytes of a block of kKvUnit elements in a head's page, if K and V are quantised.
MK_DIMS_FN inline int32_t kv_block_bytes(const Dims& d) { return (kKvScale + kKvUnit) * d.kv_page; }

// The index in V_CACHE [page][KV head][token][element] of element 0 of one token. In a quantised page, only
// token 0 has an index.
template <class D>
MK_DIMS_FN inline int64_t v_index(const D& d, int64_t page, int64_t head, int64_t token) {
  return ((page * d.rank_kv_heads() + head) * d.kv_page + token) * d.kv_row();
}

// The PARTIALS entry of one row and one KV head of a split item (both counted from the item's first) for KV
// block 0.
MK_DIMS_FN inline int64_t partial_index(const StepView& s, int32_t item, int64_t row, int64_t head) {
  return s.item_partial[item] + (row * s.item_kv_heads[item] + head) * s.item_span[item];
}

// The number of tokens of a KV block that the row at `position` may see.
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

// The ranks that keep the residual of a token row: the owner of its row block, or every rank.
MK_DIMS_FN inline Ranks residual_ranks(const Dims& d, int32_t row) {
  if (d.replicated_residual) return all_ranks(d);
  const int32_t owner = d.owner(row);
  return {owner, owner + 1};
}

// The ranks that receive a normalised row: every rank, unless each computes it itself.
MK_DIMS_FN inline Ranks norm_ranks(const Dims& d) {
  return d.replicated_residual ? own_rank(d) : all_ranks(d);
}

// Whether this rank normalises logit row `i`: it does if it keeps the residual of that row. Padding
// rows count as rows of rank 0.
MK_DIMS_FN inline bool norms_logit_row(const Dims& d, const StepView& s, int32_t i) {
  if (d.replicated_residual) return true;
  const int32_t row = s.logit_rows[i];
  return (row < 0 ? 0 : d.owner(row)) == d.rank;
}

}  // namespace mk
