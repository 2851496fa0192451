// The step's tables assign work items (some rows, heads and KV blocks of one sequence) to each attention
// instruction. The query rows of an item that share a KV head are divided into tiles of 16. Each of the eight
// consumer warps processes one tile at a time, over all KV blocks of the item; in builds for one row, all
// warps share the work on one tile. A warp skips the pages of KV heads that its tile does not use.
//
// A warp has registers for the results of kHeadPart elements of a head. If heads have two parts, two warps
// process each tile: both compute all scores, and each computes the results of its own part.
#pragma once
#include "../plan.h"
#include "call.h"
#include "memory.h"
#include "softmax.h"

namespace mk {

// A tile of the query rows that share one KV head of an item. Each combination of a token row and a
// query head is a query row.
struct QueryRows {
  int first_row, rows;    // the item's token rows: the first and their number
  int first_head, heads;  // the KV head's query heads: the first (within the rank) and their number
  int begin;              // index of the tile's first query row among the rows * heads query rows

  MK_FN bool has(int i) const { return begin + i < rows * heads; }
  MK_FN int row(int i) const { return (begin + i) / heads; }  // token row, counted from first_row
  MK_FN int head(int i) const { return (begin + i) % heads; }
};

MK_FN ItemWork item_work(const Call& call, int item) {
  const StepView& s = *call.step;
  return {s.item_seq[item],
          s.item_kv_head[item],
          s.item_kv_heads[item],
          s.item_split[item],
          s.positions[kOneRow ? 0 : s.item_row[item]],
          visible_blocks(s, item, call.dims->span(call.task->where.layer))};
}

MK_FN void look_up_items(Call& call) {
  Early& own = call.early;
  own.begin = first_item(*call.step, *call.task);
  own.end = end_item(*call.step, *call.task);
  if (own.begin < own.end) own.first = item_work(call, own.begin);
}

template <class P, class Pages>
class AttentionItem {
 public:
  MK_FN AttentionItem(P& p, const Call& call, Pages& pages, int item)
      : p_(p), call_(call), d_(*call.dims), s_(*call.step), pages_(pages), item_(item) {
    if constexpr (kTogether) read_ = item == call.early.begin ? call.early.first : item_work(call, item);
  }

  MK_FN void run() {
    if (work().seq < 0) {
      pages_.skip(1);
      store_zeros();
    } else {
      if (blocks().begin == blocks().end) pages_.skip(1);
      MK_LOOP for (int pass = 0; pass < units(); pass += kPassUnits) run_pass(pass);
      if (work().split >= 0) {
        if (!last_of_split()) return;
        merge_split();
      }
    }
    p_.fence_async();
    const int rows = work().seq < 0 ? s_.item_rows[item_] : this->rows();
    pages_.done(row(), rows * work().kv_heads);
  }

 private:
  // Builds for one row have read the step table in advance. Others read it here, to save registers.
  MK_FN ItemWork work() const { return kTogether ? read_ : item_work(call_, item_); }
  MK_FN KvBlocks blocks() const { return work().blocks; }
  MK_FN int32_t span() const { return d_.span(call_.task->where.layer); }

  MK_FN int32_t position(int row) const { return kTogether ? read_.position : s_.positions[row]; }
  MK_FN int parts() const { return head_parts(d_); }
  // Which part of a head's elements this warp computes. Its neighbour computes the other part.
  MK_FN int part() const { return parts() > 1 ? here(call_.warp) % kMaxHeadParts : 0; }
  MK_FN int row() const { return kOneRow ? 0 : s_.item_row[item_]; }
  MK_FN int rows() const { return kOneRow ? 1 : s_.item_rows[item_]; }  // not for padding items
  MK_FN int of_head() const { return head_units(d_, rows()); }
  MK_FN int units() const { return work().kv_heads * of_head(); }

  // For each KV block, a narrow head has one page of keys and one page of values. A wider head has two
  // pages of keys and two of values for each of its parts.
  MK_FN bool narrow() const { return d_.head_dim <= kTileInner; }

  // A unit is 16 query rows with one KV head, or with a part of a wide head. Processes up to eight units
  // of the item at once, one per warp, from number `begin` on; if the warps work together, one unit.
  MK_FN void run_pass(int begin) {
    const int of_head = this->of_head(), end = lower_of(begin + kPassUnits, units()),
              unit = kTogether ? begin : begin + call_.warp;
    // The KV head of this warp's unit (tile and part of a head), counted from the item's first KV head.
    // It is -1 if no unit is left for the warp.
    const int own = unit < end ? unit / of_head : -1;
    const int first = unit % of_head / parts() * kQueryTile;
    const int last = own < 0 ? -1 : last_position(query_rows(own, first));
    const bool split = work().split >= 0;
    // `heads`: how many KV heads the units of this pass use. `before`: how many of these heads come
    // before this warp's.
    const int heads = (end - 1) / of_head - begin / of_head + 1, before = own - begin / of_head;
    const float scale = 1.0f / sqrtf(static_cast<float>(d_.head_dim));
    typename P::AttentionTile tile(p_, d_);
    // If the warps work together, four use the first half of the keys and values, four the second half.
    const bool halves = kTogether && !narrow(), second = call_.warp >= kConsumerWarps / 2;
    bool started = false;
    for (int block = blocks().begin; block < blocks().end; ++block) {
      item_ = here(item_);
      if (last < block * kKvBlock) {
        pages_.skip(heads * kv_pages(d_));
        continue;
      }
      pages_.skip(before * kv_pages(d_));
      if constexpr (kWide) tile.clear();
      MK_LOOP for (int of = 0; of < parts(); ++of) {
        if (halves && second) pages_.skip(1);
        const unsigned char* keys = pages_.take();
        // Read the queries only after take(). Another instruction writes them, and the input loader
        // fills the page of keys only after waiting for that instruction's counters. Builds for wide
        // heads read the queries again for each KV block, because registers are scarce.
        if (kWide || !started) {
          const QueryRows q = query_rows(here(own), here(first));
          tile.start([&](int i) { return q.has(i) ? query(q, i) + of * kHeadPart : nullptr; },
                     [&](int i) { return position(q.first_row + q.row(i)); });
        }
        started = true;
        tile.template scores<0>(keys + (kTogether && narrow() && second ? kPageBytes / 2 : 0));
        if (!narrow() && !kTogether) {
          pages_.release();
          keys = pages_.take();
        }
        if constexpr (!kTogether) tile.template scores<1>(keys + (narrow() ? kPageBytes / 2 : 0));
        pages_.release();
        if (halves && !second) pages_.skip(1);
      }
      tile.softmax(p_, *call_.shared, scale, kWide ? d_.score_cap : 0.0f, block, span());
      if (!split) tile.merge();
      if constexpr (kWide) pages_.skip(2 * part());
      if (halves && second) pages_.skip(1);
      tile.template values<0>(*call_.shared, pages_.take(), split);
      pages_.release();
      if (halves && !second) pages_.skip(1);
      if (!narrow() && !kTogether) {
        tile.template values<1>(*call_.shared, pages_.take(), split);
        pages_.release();
      }
      if constexpr (kWide) pages_.skip(2 * (parts() - 1 - part()));
      if (split) {
        const int head = here(own);
        const QueryRows q = query_rows(head, first);
        tile.store_block([&](int i) { return partial(q.row(i), head, q.head(i), block); }, part());
      }
      pages_.skip((heads - 1 - before) * kv_pages(d_));
    }
    if (own < 0 || split) return;
    const QueryRows q = query_rows(own, first);
    if (sinks()) {
      tile.add_sinks([&](int i) { return q.has(i) ? sinks()[q.first_head + q.head(i)] : minus_infinity(); });
    }
    const Ranks ranks = output_ranks();
    MK_LOOP for (int rank = ranks.begin; rank < ranks.end; ++rank) {
      tile.store_results([&](int i) {
        return q.has(i) ? output(rank, q.first_row + q.row(i), q.first_head + q.head(i)) + part() * kHeadPart
                        : nullptr;
      });
    }
  }

  // Used if several work items divide the KV blocks of the same rows. Called after this item has stored
  // its partial results. Returns true only in the last of these items, which merges all results.
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

  // Merges the partial results of all KV blocks. Each warp merges other token rows and query heads.
  MK_FN void merge_split() {
    int turn = 0;
    MK_LOOP for (int r = 0; r < s_.item_rows[item_]; ++r) {
      const int row = s_.item_row[item_] + r;
      for (int head = 0; head < work().kv_heads; ++head) {
        const QueryRows q = query_rows(head, 0);
        for (int g = 0; g < q.heads; ++g, ++turn) {
          if (turn % kConsumerWarps == call_.warp) merge_row(row, r, head, q.first_head, g);
        }
      }
    }
  }

  MK_FN void merge_row(int row, int r, int head, int first_head, int g) {
    const Ranks ranks = output_ranks();
    const int first = first_visible(span(), position(row)) / kKvBlock;
    for (int e = 2 * p_.lane(); e < d_.head_dim; e += 2 * P::kLanes) {
      Softmax sums;
      float a = 0.0f, b = 0.0f;
      MK_UNROLL_4 for (int block = first; block <= position(row) / kKvBlock; ++block) {
        const float* from = partial(r, head, g, block);
        const float m = load_float(from), l = load_float(from + 1);
        const float block_a = load_float(from + 2 + e), block_b = load_float(from + 3 + e);
        const Rescale scale = sums.merge(m, l);
        a = scale.merged(a, block_a);
        b = scale.merged(b, block_b);
      }
      if (sinks()) {
        const float keep = sums.merge(sinks()[first_head + g], 1.0f).keep;
        a *= keep, b *= keep;
      }
      const float share = 1.0f / sums.l;
      MK_LOOP for (int rank = ranks.begin; rank < ranks.end; ++rank)
          store_word(output(rank, row, first_head + g) + e, pack_bf16(a * share, b * share));
    }
  }

  MK_FN void store_zeros() {
    const Ranks ranks = output_ranks();
    MK_LOOP for (int r = call_.warp; r < s_.item_rows[item_]; r += kConsumerWarps) {
      for (int head = 0; head < work().kv_heads; ++head) {
        const QueryRows q = query_rows(head, 0);
        MK_LOOP for (int rank = ranks.begin; rank < ranks.end; ++rank) {
          MK_LOOP for (int e = 2 * p_.lane(); e < q.heads * d_.head_dim; e += 2 * P::kLanes)
              store_word(output(rank, q.first_row + r, q.first_head) + e, 0);
        }
      }
    }
  }

  // Returns the sinks, or null if the phase has none. A sink is a score for one of the rank's query
  // heads: it counts in the softmax's sum, but no value belongs to it.
  MK_FN const float* sinks() const {
    return kHasExperts ? call_.weights<float>(call_.phase().weights) : nullptr;
  }

  MK_FN QueryRows query_rows(int head, int begin) const {
    const int kv_head = work().kv_head + head, first = d_.query_head(kv_head);
    return {row(), rows(), first, d_.query_head_end(kv_head) - first, begin};
  }

  // Returns the position of the tile's last row, which sees more tokens than the others, or -1 if the tile
  // has no row.
  MK_FN int32_t last_position(const QueryRows& q) const {
    if (!q.has(0)) return -1;
    const int last = lower_of(kQueryTile, q.rows * q.heads - q.begin) - 1;
    return position(q.first_row + q.row(last));
  }

  MK_FN const uint16_t* query(const QueryRows& q, int i) const {
    return call_.at<uint16_t>(call_.phase().inputs) + int64_t{q.first_row + q.row(i)} * d_.q_cols() +
           (q.first_head + q.head(i)) * d_.head_dim;
  }

  // Returns the address of a partial result (m, l and o, softmax.h). `row` and the KV head `head` are
  // counted from the item's first. `group_head` selects one of the query heads that share the KV head.
  MK_FN float* partial(int row, int head, int group_head, int block) const {
    const int64_t entry = partial_index(s_, item_, row, head) + block;
    return call_.at<float>(Buffer::PARTIALS) + (entry * d_.group_size() + group_head) * (d_.head_dim + 2);
  }

  // Returns the address where the O projection of `rank` reads a query head's output.
  MK_FN uint16_t* output(int rank, int row, int head) const {
    return call_.copy<uint16_t>(call_.phase().output, rank) + int64_t{row} * d_.o_cols() + d_.o_first() +
           head * d_.head_dim;
  }
  // Returns the ranks to which this item's output is sent. All its rows are stored on the same ranks, so it
  // is enough to look up the first row.
  MK_FN Ranks output_ranks() const {
    return d_.replicated_o ? residual_ranks(d_, s_.item_row[item_]) : own_rank(d_);
  }

  P& p_;
  const Call& call_;
  const Sizes& d_;
  const StepView& s_;
  Pages& pages_;
  int item_;
  ItemWork read_;  // only if kTogether
};

template <class P, class Pages>
MK_FN void attention(P& p, const Call& call, Pages& pages) {
  const int begin = kTogether ? call.early.begin : first_item(*call.step, *call.task);
  const int end = kTogether ? call.early.end : end_item(*call.step, *call.task);
  for (int item = begin; item < end; ++item) AttentionItem<P, Pages>(p, call, pages, item).run();
}

}  // namespace mk
