// Tells the compiler, the simulator and the verifier how many shared-memory pages instructions use, by
// listing the pages with the interpreter's code (plan.h). The CPU interpreter, in the same library, has
// other types of the same names, so the namespace has another name here.
#define mk mk_pages
#include "plan.h"

#include <map>

#define MK_API extern "C" __attribute__((visibility("default")))

namespace mk {
namespace {

// The numbers of pages that a matmul instruction uses. `held`: the most in the ring at once;
// `held_inputs`: input pages that stay in the ring together; `last`: output pages of its widest chunk.
struct MatmulPages {
  int32_t weights, inputs, output, held, held_inputs, last;
};

MatmulPages matmul_pages(const Sizes& d, const Phase& phase, int32_t rows, int32_t cols) {
  Task task{};
  task.phase = phase;
  task.phase.operation = Operation::kMatmul;
  // The build for steps of one row keeps inputs outside the ring. Others do so only if a norm changes them.
  if (d.ring_pages == kRowPages) task.phase.norm = phase.inputs;
  *reinterpret_cast<Tile*>(task.record + kOperandWord) = {.row = 0, .rows = rows, .col = 0, .cols = cols};
  MatmulPages out{};
  for_pages(d, StepView{}, task, [&](const PageUse& use) {
    ++(use.fill == Fill::kInputs ? out.inputs : out.weights);
    return true;
  });
  if (uses_dots(d)) {
    const Matmul m = matmul_of(task);
    out.held_inputs = dot_input_pages(m);
    out.held = out.held_inputs + lower_of(out.weights, lap_weights(d, m));
  }
  for_chunks(d, task, [&](const Chunk& chunk) {
    out.held = kStages * kStepPages;
    out.inputs += chunk.steps();
    out.weights += chunk.steps() * (chunk.operands() - 1);
    out.output += chunk.outputs();
    out.last = higher_of(out.last, chunk.outputs());
    return true;
  });
  return out;
}

// Returns how many pages an attention item with `rows` token rows and `kv_heads` uses for each KV block.
int32_t block_pages(const Sizes& d, int32_t rows, int32_t kv_heads) {
  const int32_t zero = 0, one = 1;
  StepView step{};
  step.positions = step.item_row = step.item_kv_head = step.item_block = step.item_seq = step.block_tables =
      &zero;
  step.item_blocks = &one;
  step.item_rows = &rows;
  step.item_kv_heads = &kv_heads;
  int32_t pages = 0;
  item_pages(d, step, Task{}, 0, [&](const PageUse&) { return ++pages > 0; });
  return pages;
}

}  // namespace

// Counts the pages of `n` instructions of a matmul phase. Tile i has rows[i] x cols[i] outputs.
MK_API void mk_matmul_pages(const Dims* dims, const Phase* phase, int64_t n, const int32_t* rows,
                            const int32_t* cols, MatmulPages* out) {
  const Sizes d = sizes_of(*dims);
  std::map<std::pair<int32_t, int32_t>, MatmulPages> known;
  for (int64_t i = 0; i < n; ++i) {
    const auto [found, fresh] = known.try_emplace({rows[i], cols[i]});
    if (fresh) found->second = matmul_pages(d, *phase, rows[i], cols[i]);
    out[i] = found->second;
  }
}

// Counts the pages that each of `n` attention items takes. An item without KV blocks takes one page.
MK_API void mk_attention_pages(const Dims* dims, int64_t n, const int32_t* rows, const int32_t* kv_heads,
                               const int32_t* blocks, int64_t* out) {
  Dims all = *dims;
  all.window = 0;  // `blocks` already leaves out those before the window
  const Sizes d = sizes_of(all);
  std::map<std::pair<int32_t, int32_t>, int64_t> known;
  for (int64_t i = 0; i < n; ++i) {
    const auto [found, fresh] = known.try_emplace({rows[i], kv_heads[i]});
    if (fresh) found->second = block_pages(d, rows[i], kv_heads[i]);
    out[i] = blocks[i] == 0 ? 1 : blocks[i] * found->second;
  }
}

// Writes to out[i] how many units (head_units) each KV head has in an item with rows[i] token rows.
MK_API void mk_head_units(const Dims* dims, int64_t n, const int32_t* rows, int64_t* out) {
  const Sizes d = sizes_of(*dims);
  for (int64_t i = 0; i < n; ++i) out[i] = head_units(d, rows[i]);
}

// Returns how many token rows give all consumer warps attention work at once, for one KV head.
MK_API int32_t mk_pass_rows(const Dims* dims) {
  const Sizes d = sizes_of(*dims);
  return higher_of(kConsumerWarps * kQueryTile / (d.group_size() * head_parts(d)), 1);
}

// Returns the number of K and V pages for one KV head and one KV block.
MK_API int32_t mk_kv_pages(const Dims* dims) { return kv_pages(sizes_of(*dims)); }

// Returns how many output columns of a matmul phase fit into a page, or 0 if its results use no pages.
MK_API int32_t mk_output_columns(const Dims* dims, const Phase* phase) {
  const bool paged = by_pages(phase->result) && dims->units == static_cast<int32_t>(Units::kTensor);
  return paged ? output_cols({*phase, {}}) : 0;
}

}  // namespace mk
