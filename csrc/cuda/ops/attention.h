// Attention of the work items of a slot. Of an item, the query rows that share a KV head (token row, then
// head of the group) are cut into tiles of 16; a unit is a tile of a KV head, and the consumer warps take
// eight units at a time through all KV blocks. Pages come in the order of plan.h; a warp passes those of
// other heads.
#pragma once
#include "../../common/index.h"
#include "call.h"
#include "memory.h"
#include "softmax.h"
#if defined(__CUDACC__)
#include "attention_mma.h"
#else
#include "attention_loops.h"
#endif

namespace mk {

// A tile of query rows of one KV head of an item.
struct QueryRows {
  int first_row, rows;    // token rows of the item
  int first_head, heads;  // query heads of the rank
  int begin;              // of the tile, among rows * heads

  MK_FN bool has(int i) const { return begin + i < rows * heads; }
  MK_FN int row(int i) const { return (begin + i) / heads; }  // counted from first_row
  MK_FN int head(int i) const { return (begin + i) % heads; }
};

template <class P, class Pages, int kHead>
class AttentionItem {
 public:
  MK_FN AttentionItem(P& p, const Call& call, Pages& pages, int item)
      : p_(p), call_(call), d_(*call.dims), s_(*call.step), pages_(pages), item_(item) {}

  MK_FN void run() {
    if (s_.item_seq[item_] < 0) {
      pages_.skip(1);
      store_zeros();
    } else {
      const int tiles = ceil_div(s_.item_rows[item_] * d_.group_size(), kQueryTile);
      const int units = s_.item_kv_heads[item_] * tiles;
      for (int pass = 0; pass < units; pass += kConsumerWarps)
        run_pass(pass, lower(pass + kConsumerWarps, units), tiles);
      if (s_.item_split[item_] >= 0) {
        if (!last_of_split()) return;
        merge_split();
      }
    }
    p_.fence_async();
    pages_.done(item_);
  }

 private:
  static constexpr bool kNarrow =
      kHead == 64;  // both halves of a KV block's keys share a page, values need one
  static constexpr int kHalfOfPage = kPageBytes / 2;

  // Units [begin, end), one to a warp.
  MK_FN void run_pass(int begin, int end, int tiles) {
    const int unit = begin + call_.warp;
    const int own = unit < end ? unit / tiles : -1;  // KV head of the item
    const QueryRows q = query_rows(own < 0 ? 0 : own, unit % tiles * kQueryTile);
    AttentionTile<P, kHead> tile(p_, d_.head_dim);
    const float scale = 1.0f / sqrtf(static_cast<float>(d_.head_dim));
    bool started = false;
    for (int block = s_.item_block[item_]; block < s_.item_block[item_] + s_.item_blocks[item_]; ++block) {
      const auto visible = [&](int i) {
        return q.has(i) ? visible_tokens(d_, s_.positions[q.first_row + q.row(i)], block) : 0;
      };
      for (int head = begin / tiles; head <= (end - 1) / tiles; ++head) {
        if (head != own || !sees(q, block)) {
          pages_.skip(kNarrow ? 2 : 4);
          continue;
        }
        const unsigned char* keys = pages_.take();
        if (!started)
          tile.start([&](int i) { return query(q, i); });  // the item's counters hold when its pages are full
        started = true;
        tile.template scores<0>(keys);
        if constexpr (kNarrow) {
          tile.template scores<1>(keys + kHalfOfPage);
        } else {
          pages_.release();
          tile.template scores<1>(pages_.take());
        }
        pages_.release();
        tile.softmax(scale, visible);
        if (s_.item_split[item_] < 0) tile.merge(visible);
        take_values<0>(tile, q, own, block);
        if constexpr (!kNarrow) take_values<1>(tile, q, own, block);
      }
    }
    if (own < 0 || s_.item_split[item_] >= 0) return;
    tile.results([&](int i, int element, float a, float b) {
      if (q.has(i) && element < d_.head_dim)
        store(q.first_row + q.row(i), q.first_head + q.head(i), element, pack_bf16(a, b));
    });
  }

  // The block's values of elements 64 * kHalf ..: into the sum, or with m and l to PARTIALS.
  template <int kHalf>
  MK_FN void take_values(AttentionTile<P, kHead>& tile, const QueryRows& q, int head, int block) {
    tile.values(pages_.take(), 64 * kHalf);
    pages_.release();
    if (s_.item_split[item_] < 0) {
      tile.template merge_values<kHalf>();
      return;
    }
    const auto entry = [&](int i) -> float* {
      if (!q.has(i) || visible_tokens(d_, s_.positions[q.first_row + q.row(i)], block) == 0) return nullptr;
      return partial(q.row(i), head, q.head(i), block);
    };
    if constexpr (kHalf == 0) {
      tile.block_sums([&](int i, float m, float l) {
        if (float* to = entry(i)) *reinterpret_cast<Two*>(to) = {m, l};
      });
    }
    tile.block_values([&](int i, int e, float a, float b) {
      const int element = 64 * kHalf + e;
      float* to = entry(i);
      if (to && element < d_.head_dim) *reinterpret_cast<Two*>(to + 2 + element) = {a, b};
    });
  }

  // Whether all items of this one's split have left their partials, this one as the last.
  MK_FN bool last_of_split() {
    p_.consumer_sync();
    if (call_.warp == 0) {
      int32_t* arrivals = call_.at<int32_t>(Buffer::SPLITS) + s_.item_split[item_];
      const bool last = p_.arrive_acq_rel(arrivals) + 1 == s_.item_splits[item_];
      if (p_.lane() == 0) {
        call_.shared->last = last;
        if (last) *arrivals = 0;
      }
    }
    p_.consumer_sync();
    return call_.shared->last;
  }

  // Of all blocks' partials: a warp per query row and head.
  MK_FN void merge_split() {
    int turn = 0;
    for (int r = 0; r < s_.item_rows[item_]; ++r) {
      const int row = s_.item_row[item_] + r;
      for (int head = 0; head < s_.item_kv_heads[item_]; ++head) {
        const QueryRows q = query_rows(head, 0);
        for (int g = 0; g < q.heads; ++g, ++turn) {
          if (turn % kConsumerWarps == call_.warp) merge_row(row, r, head, q.first_head, g);
        }
      }
    }
  }

  MK_FN void merge_row(int row, int r, int head, int first_head, int g) {
    for (int e = 2 * p_.lane(); e < d_.head_dim; e += 2 * P::kLanes) {
      Softmax sums;
      float a = 0.0f, b = 0.0f;
      MK_UNROLL_4 for (int block = 0; block <= s_.positions[row] / kKvBlock; ++block) {
        const float* from = partial(r, head, g, block);
        const float m = load_float(from), l = load_float(from + 1);
        const float block_a = load_float(from + 2 + e), block_b = load_float(from + 3 + e);
        sums.merge(m, l);
        a = sums.merged(a, block_a);
        b = sums.merged(b, block_b);
      }
      store(row, first_head + g, e, pack_bf16(a / sums.l, b / sums.l));
    }
  }

  MK_FN void store_zeros() {
    for (int r = call_.warp; r < s_.item_rows[item_]; r += kConsumerWarps) {
      for (int head = 0; head < s_.item_kv_heads[item_]; ++head) {
        const QueryRows q = query_rows(head, 0);
        for (int e = 2 * p_.lane(); e < q.heads * d_.head_dim; e += 2 * P::kLanes)
          store(q.first_row + r, q.first_head, e, 0);
      }
    }
  }

  MK_FN QueryRows query_rows(int head, int begin) const {
    const int kv_head = s_.item_kv_head[item_] + head, first = d_.query_head(kv_head);
    return {s_.item_row[item_], s_.item_rows[item_], first, d_.query_head_end(kv_head) - first, begin};
  }

  // Whether a row of the tile sees the block: the last one sees most.
  MK_FN bool sees(const QueryRows& q, int block) const {
    if (!q.has(0)) return false;
    const int last = lower(q.begin + kQueryTile, q.rows * q.heads) - 1;
    return visible_tokens(d_, s_.positions[q.first_row + last / q.heads], block) > 0;
  }

  MK_FN const uint16_t* query(const QueryRows& q, int i) const {
    if (!q.has(i)) return nullptr;
    return call_.at<uint16_t>(Buffer::Q) + int64_t{q.first_row + q.row(i)} * d_.q_cols() +
           (q.first_head + q.head(i)) * d_.head_dim;
  }

  // m, l, o of a row and KV head, counted from the item's first, and of a head of the group.
  MK_FN float* partial(int row, int head, int group_head, int block) const {
    const int64_t entry = partial_index(s_, item_, row, head) + block;
    return call_.at<float>(Buffer::PARTIALS) + (entry * d_.group_size() + group_head) * (d_.head_dim + 2);
  }

  // Two elements of a query head's output, or of those after it, where the O projection reads them.
  MK_FN void store(int row, int head, int element, uint32_t pair) const {
    const Ranks ranks = d_.replicated_o ? residual_ranks(d_, row) : own_rank(d_);
    const int64_t at = int64_t{row} * d_.o_cols() + d_.o_first() + head * d_.head_dim + element;
    for (int rank = ranks.begin; rank < ranks.end; ++rank)
      *reinterpret_cast<uint32_t*>(call_.copy<uint16_t>(Buffer::ATTN, rank) + at) = pair;
  }

  P& p_;
  const Call& call_;
  const Dims& d_;
  const StepView& s_;
  Pages& pages_;
  const int item_;
};

template <class P, class Pages>
MK_FN void attention(P& p, const Call& call, const Attention& op, Pages& pages) {
  for (int item = call.step->slot_items[op.slot]; item < call.step->slot_items[op.slot + 1]; ++item) {
    if (call.dims->head_dim <= 64) {
      AttentionItem<P, Pages, 64>(p, call, pages, item).run();
    } else {
      AttentionItem<P, Pages, 128>(p, call, pages, item).run();
    }
  }
}

}  // namespace mk
