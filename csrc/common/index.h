// Computes element indices into the KV cache and into PARTIALS, the buffer of partial attention results. Also
// tells which ranks store or receive a row. megakernel/isa/buffers.py has the shapes of the buffers. The
// template parameter `D` is Dims, the sizes of the model and of the batch, or Sizes, which also has
// precomputed sizes.
#pragma once
#include "isa.h"

namespace mk {

// Returns the index of the first element (token 0) of a row of K_CACHE, an array [page][KV head][row][token].
// K is stored transposed: a row has one element of the key for every token of the page. If K is quantised,
// only row 0 is meaningful: the result is then the first byte of the head's part of the page.
template <class D>
MK_DIMS_FN inline int64_t k_index(const D& d, int64_t page, int64_t head, int64_t row) {
  return ((page * d.rank_kv_heads() + head) * d.kv_row() + row) * d.kv_page;
}

// Returns the size in bytes of a quantised block, which has kKvUnit elements of one KV head for every token
// of a page. For each token, the block contains a scale of kKvScale bytes and kKvUnit one-byte values.
MK_DIMS_FN inline int32_t kv_block_bytes(const Dims& d) { return (kKvScale + kKvUnit) * d.kv_page; }

// Returns the index of the first element of a token in V_CACHE, an array [page][KV head][token][element]. If
// V is quantised, only token 0 is meaningful: the result is then the first byte of the head's part of the
// page.
template <class D>
MK_DIMS_FN inline int64_t v_index(const D& d, int64_t page, int64_t head, int64_t token) {
  return ((page * d.rank_kv_heads() + head) * d.kv_page + token) * d.kv_row();
}

// Attention for a long context may be split: several work items (attention items) then divide the KV blocks
// of the same rows among them, and store partial results in the buffer PARTIALS. Returns the index there of
// the result of one row and one KV head for KV block 0; the results for the next KV blocks follow. `row` and
// `head` are counted from the item's first row and first KV head.
MK_DIMS_FN inline int64_t partial_index(const StepView& s, int32_t item, int64_t row, int64_t head) {
  return s.item_partial[item] + (row * s.item_kv_heads[item] + head) * s.item_span[item];
}

// Returns how many tokens of KV block number `block` (d.kv_block successive tokens) the causal mask lets the
// query at `position` see.
MK_DIMS_FN inline int32_t visible_tokens(const Dims& d, int32_t position, int32_t block) {
  const int32_t tokens = position + 1 - block * d.kv_block;
  return tokens < 0 ? 0 : tokens < d.kv_block ? tokens : d.kv_block;
}

// Returns the position of the first token that the query at `position` sees if a sliding window limits it to
// the last `span` tokens, its own included.
MK_DIMS_FN inline int32_t first_visible(int32_t span, int32_t position) {
  return higher_of(position + 1 - span, 0);
}

// Ranks [begin, end).
struct Ranks {
  int32_t begin, end;
};

MK_DIMS_FN inline Ranks own_rank(const Dims& d) { return {d.rank, d.rank + 1}; }

MK_DIMS_FN inline Ranks all_ranks(const Dims& d) { return {0, d.tp}; }

// Returns the ranks that store the residual of token row `row`: every rank if the residual is replicated,
// otherwise only the rank that owns the row.
MK_DIMS_FN inline Ranks residual_ranks(const Dims& d, int32_t row) {
  if (d.replicated_residual) return all_ranks(d);
  const int32_t owner = d.owner(row);
  return {owner, owner + 1};
}

// Returns the ranks to which this rank stores a row that it has normalised. If the residual is replicated,
// that is only this rank, because every rank normalises all rows itself. Otherwise it is every rank.
MK_DIMS_FN inline Ranks norm_ranks(const Dims& d) {
  return d.replicated_residual ? own_rank(d) : all_ranks(d);
}

// Logit rows are the token rows for which logits are computed. Returns whether this rank normalises logit row
// `i`: it does if it stores the residual of that row. Padding rows count as rows of rank 0.
MK_DIMS_FN inline bool norms_logit_row(const Dims& d, const StepView& s, int32_t i) {
  if (d.replicated_residual) return true;
  const int32_t row = s.logit_rows[i];
  return (row < 0 ? 0 : d.owner(row)) == d.rank;
}

}  // namespace mk
