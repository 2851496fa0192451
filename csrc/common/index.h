// Index arithmetic that the CPU and CUDA interpreters share: where an element lies in the KV cache or in
// PARTIALS (the buffer of partial attention results), and which ranks store a token row.
// megakernel/isa/buffers.py has the shapes of the buffers. The template parameter `D` is Dims (the sizes of
// the model and the batch), or Sizes, which adds precomputed sizes.
#pragma once
#include "isa.h"

namespace mk {

// Returns the index, in the array K_CACHE [KV page][KV head][element][token], of element `row` of the
// key of the page's first token. The keys of a page are stored transposed: element 0 of all tokens, then
// element 1 and so on. For quantised K, `row` must be 0, and the result is the head's first byte.
template <class D>
MK_DIMS_FN inline int64_t k_index(const D& d, int64_t page, int64_t head, int64_t row) {
  return ((page * d.rank_kv_heads() + head) * d.kv_row() + row) * d.kv_page;
}

// Quantised KV cache: returns the size in bytes of a quantisation block. It covers kKvUnit elements of one KV
// head, for all tokens of a KV page. Each token has one scale (kKvScale bytes) and kKvUnit one-byte values.
MK_DIMS_FN inline int32_t kv_block_bytes(const Dims& d) { return (kKvScale + kKvUnit) * d.kv_page; }

// Returns the index of a token's element 0 in the array V_CACHE [KV page][KV head][token][element]. If V is
// quantised, call this with token 0 only. The result is then the first byte of the head's data in the page.
template <class D>
MK_DIMS_FN inline int64_t v_index(const D& d, int64_t page, int64_t head, int64_t token) {
  return ((page * d.rank_kv_heads() + head) * d.kv_page + token) * d.kv_row();
}

// Returns the index in the buffer PARTIALS of attention's partial result for one row, one KV head and KV
// block 0. The results for the next KV blocks follow it. `row` and `head` are counted from the work
// item's first row and KV head.
MK_DIMS_FN inline int64_t partial_index(const StepView& s, int32_t item, int64_t row, int64_t head) {
  return s.item_partial[item] + (row * s.item_kv_heads[item] + head) * s.item_span[item];
}

// Returns how many tokens of KV block `block` the query at `position` sees under the causal mask.
MK_DIMS_FN inline int32_t visible_tokens(const Dims& d, int32_t position, int32_t block) {
  const int32_t tokens = position + 1 - block * d.kv_block;
  return tokens < 0 ? 0 : tokens < d.kv_block ? tokens : d.kv_block;
}

// Returns the position of the first token that the query at `position` sees if a sliding window limits it to
// the last `span` tokens, its own included.
MK_DIMS_FN inline int32_t first_visible(int32_t span, int32_t position) {
  return higher_of(position + 1 - span, 0);
}

// The ranks from `begin` to `end` - 1.
struct Ranks {
  int32_t begin, end;
};

template <class D>
MK_DIMS_FN inline Ranks own_rank(const D& d) {
  return {d.rank, d.rank + 1};
}

template <class D>
MK_DIMS_FN inline Ranks all_ranks(const D& d) {
  return {0, d.tp};
}

// Returns the ranks that store the residual of token row `row`: every rank if the residual is replicated.
// Otherwise only one rank, called the row's owner, stores it.
template <class D>
MK_DIMS_FN inline Ranks residual_ranks(const D& d, int32_t row) {
  if (d.replicated_residual) return all_ranks(d);
  const int32_t owner = d.owner(row);
  return {owner, owner + 1};
}

// Returns the ranks to which this rank sends a row that it has normalised. If every rank has a copy of the
// residual, each rank normalises all rows for itself, so the result is this rank alone. Otherwise only the
// rank that stores the row's residual normalises it, and the result is all ranks.
template <class D>
MK_DIMS_FN inline Ranks norm_ranks(const D& d) {
  return d.replicated_residual ? own_rank(d) : all_ranks(d);
}

// Returns whether this rank normalises row i of the list `logit_rows` (the token rows that need logits). A
// rank normalises the rows whose residual it stores. Entries that are only padding are negative, and count as
// rows of rank 0.
template <class D>
MK_DIMS_FN inline bool norms_logit_row(const D& d, const StepView& s, int32_t i) {
  if (d.replicated_residual) return true;
  const int32_t row = s.logit_rows[i];
  return (row < 0 ? 0 : d.owner(row)) == d.rank;
}

}  // namespace mk
