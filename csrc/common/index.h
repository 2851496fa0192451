// Index arithmetic of the buffers that pages and items address, in elements. Shapes:
// megakernel/isa/buffers.py.
#pragma once
#include "isa.h"

namespace mk {

// K_CACHE [page][KV head][element][token]: token 0 of one element.
MK_DIMS_FN inline int64_t k_index(const Dims& d, int64_t page, int64_t head, int64_t element) {
  return ((page * d.kv_heads + head) * d.head_dim + element) * d.page;
}

// V_CACHE [page][KV head][token][element]: element 0 of one token.
MK_DIMS_FN inline int64_t v_index(const Dims& d, int64_t page, int64_t head, int64_t token) {
  return ((page * d.kv_heads + head) * d.page + token) * d.head_dim;
}

// PARTIALS entry of one row and one KV head of a split item (both counted from the item's first) and KV block
// 0.
MK_DIMS_FN inline int64_t partial_index(const StepView& s, int32_t item, int64_t row, int64_t head) {
  return s.item_partial[item] + (row * s.item_kv_heads[item] + head) * s.item_span[item];
}

}  // namespace mk
