"""ATTENTION computes attention items: some token rows, some KV heads and some KV tokens of a sequence. The step table,
an input of each launch, says which items an instruction computes.

Therefore an instruction also selects at run time which counters it waits for. Q, K and V have one counter for each row
block (group of token rows) and each group of `group_heads` KV heads. The output has one counter per row block. When the
output of an item's rows and KV heads is complete, the item adds (rows x KV heads) to the counter. If several items
share this output, only the last item to finish adds. A record names only the first counter of Q, K, V and the output.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..access import EVERY, OWN, Access, Columns, Index, Kind, item_columns
from ..buffers import Buffer, given, kv_bytes
from ..context import F32, Context, capped, product
from ..dims import Dims, ModelSizes, ceil_div
from ..dtypes import Dtype
from ..integers import codes, multiply, rounded
from ..phases import Phase
from ..ragged import ragged
from ..step import StepTable
from .spec import Cut, OperationSpec, contents, work

Floats = NDArray[np.float64]


def _accesses(p: Phase, c: Columns, d: Dims) -> list[Access]:
    zero = np.zeros_like(c["slot"])
    out: int | None = OWN
    if d.split.replicated_o and d.split.tp > 1:
        out = EVERY if d.split.replicated_residual else None

    def rows(buffer: Buffer, kind: Kind, rank: int | None = OWN) -> Access:
        first, end = item_columns(buffer, d, 0, d.split.rank_kv_heads)
        return Access(buffer, kind, zero, zero + d.bucket.tokens, zero + first, zero + end, Index.ITEM, rank)

    return [
        rows(given(p.inputs), Kind.READ),
        rows(Buffer.K_CACHE, Kind.READ),
        rows(Buffer.V_CACHE, Kind.READ),
        rows(given(p.output), Kind.WRITE, out),
    ]


# -- the work of a step


def attention_cost(model: ModelSizes, row_kv_heads: int, kv_tokens: float) -> tuple[float, float]:
    """Return the FLOPs of an attention item, and the bytes of K and V if every row reads them separately.
    `row_kv_heads` is the product of the item's query rows and KV heads. Each row attends to `kv_tokens` tokens.

    FLOPs = 4 x query heads x head_dim x tokens: two products (QK and PV) with two FLOPs each.
    """
    flops = 4.0 * row_kv_heads * model.group_size * model.head_dim * kv_tokens
    return flops, row_kv_heads * kv_tokens * kv_bytes(model)


def item_work(view: StepTable) -> tuple[Floats, Floats]:
    """Return two arrays [items] for the rank of `view`: the FLOPs of each attention item, and the bytes of K and V that
    the item reads. An item reads K and V once for all its rows. Padding items have zeros.

    The numbers are means over the layers, because layers with a sliding window have less work.
    """
    dims, n = view.dims, int(view.slot_items[-1])
    row, rows = view.item_row[:n].astype(np.int64), view.item_rows[:n].astype(np.int64)
    live = view.item_seq[:n] >= 0
    begin = view.item_block[:n].astype(np.int64) * dims.bucket.kv_block
    end = begin + view.item_blocks[:n].astype(np.int64) * dims.bucket.kv_block
    of, nth = ragged(rows)
    after = view.positions.astype(np.int64) + 1
    pairs, tokens = np.zeros(n), np.zeros(n)
    for span, layers in dims.model.spans.items():
        first = np.maximum(after - span, 0)
        sees = np.minimum(after[row[of] + nth], end[of]) - np.maximum(first[row[of] + nth], begin[of])
        pairs += layers * np.bincount(of, weights=np.maximum(sees, 0), minlength=n)
        tokens += layers * np.maximum(np.minimum(after[row + rows - 1], end) - np.maximum(first[row], begin), 0)
    pairs, tokens = pairs / dims.model.layers, tokens / dims.model.layers
    per_pair, per_token = attention_cost(dims.model, 1, 1.0)
    first, heads = view.item_kv_head[:n].astype(np.int64), np.where(live, view.item_kv_heads[:n], 0)
    # Several ranks may use the same KV head, each for some of the query heads that share it. So only
    # the query heads of this rank are counted.
    query_heads = [end - begin for begin, end in map(dims.split.query_heads, range(dims.split.rank_kv_heads))]
    before = np.cumsum([0, *query_heads])
    asked = (before[first + heads] - before[first]) / dims.model.group_size
    return per_pair * asked * pairs, per_token * heads.astype(np.float64) * tokens


def read_blocks(view: StepTable, span: int) -> NDArray[np.int32]:
    """Return to how many KV blocks each attention item's rows attend if a row attends to at most `span` tokens."""
    first = np.maximum(view.positions[view.item_row] + 1 - span, 0) // view.dims.bucket.kv_block
    end = view.item_block + view.item_blocks
    blocks: NDArray[np.int32] = np.maximum(end - np.maximum(view.item_block, first), 0)
    return blocks


def slot_work(table: StepTable) -> Floats:
    """Return the FLOPs of each attention slot (an attention instruction) and the bytes of K and V that it reads:
    [ranks, slots, 2]. Both are means over all layers."""
    dims = table.dims
    out = np.zeros((dims.split.tp, dims.bucket.attention_slots, 2))
    for rank in range(dims.split.tp):
        view = table.rank(rank)
        slot = np.repeat(np.arange(dims.bucket.attention_slots), np.diff(view.slot_items))
        for i, amount in enumerate(item_work(view)):
            out[rank, :, i] = np.bincount(slot, weights=amount, minlength=dims.bucket.attention_slots)
    return out


# -- what it computes


def _attention(c: Context, slot: int, group_heads: int, groups: int) -> None:
    for item in range(*c.table.slot_items[slot : slot + 2]):
        attend(c, item)


def attend(c: Context, item: int) -> bool:
    """Run one attention item. Return whether its output in ATTN is complete. If items share this output (a split), it
    is complete only after the last item."""
    d, t = c.dims, c.table
    rows = range(t.item_row[item], t.item_row[item] + t.item_rows[item])
    heads = range(t.item_kv_head[item], t.item_kv_head[item] + t.item_kv_heads[item])
    if t.item_seq[item] < 0:
        for head in heads:
            _store_heads(c, slice(rows.start, rows.stop), head, np.zeros((), np.float32))
        return True
    found, size = {}, d.bucket.kv_block
    # The tokens [first, end) to which each row attends.
    sees = {row: (max(t.positions[row] + 1 - d.model.span(c.layer), 0), t.positions[row] + 1) for row in rows}
    begin = max(t.item_block[item], sees[rows[0]][0] // size)
    for head in heads:
        for block in range(begin, t.item_block[item] + t.item_blocks[item]):
            keys, values = _keys_values(c, t.item_seq[item], head, block, sees[rows[-1]][1])
            for row in rows:
                own = slice(*(max(token - block * size, 0) for token in sees[row]))
                if len(keys[own]):
                    found[row, head, block] = _partial(c, row, head, keys[own], values[own])
    if t.item_split[item] >= 0:
        for (row, head, block), partial in found.items():
            c.write(Buffer.PARTIALS, (_partial_index(t, item, row, head, block), slice(len(partial))), partial)
        arrivals = c.buffer(Buffer.SPLITS)
        arrivals[t.item_split[item]] += 1
        if arrivals[t.item_split[item]] < t.item_splits[item]:
            return False
        arrivals[t.item_split[item]] = 0
    for row in rows:
        blocks = range(sees[row][0] // size, ceil_div(sees[row][1], size))
        for head in heads:
            first, end = d.split.query_heads(head)
            if t.item_split[item] >= 0:
                lines = [_partial_index(t, item, row, head, b) for b in blocks]
                partials = [c.read(Buffer.PARTIALS, (line, slice(end - first))) for line in lines]
            else:
                partials = [found[row, head, b] for b in blocks]
            if c.phase.weights is not None:
                partials.append(_sink(c, slice(first, end)))
            _store_heads(c, slice(row, row + 1), head, _merge(partials).reshape(-1))
    return True


def _query_columns(d: Dims, head: int) -> slice:
    first, end = d.split.query_heads(head)
    return slice(first * d.model.head_dim, end * d.model.head_dim)


def _store_heads(c: Context, rows: slice, head: int, values: F32) -> None:
    """Store attention's output of the query heads that use KV head `head`. All `rows` must be in one row block."""
    columns = _query_columns(c.dims, head)
    index = (rows, slice(c.dims.split.o_first + columns.start, c.dims.split.o_first + columns.stop))
    ranks = c.dims.owners(rows.start) if c.dims.split.replicated_o else (c.dims.split.rank,)
    c.store(c.output, ranks, index, values)


def _keys_values(c: Context, sequence: int, head: int, block: int, end: int) -> tuple[NDArray[Any], F32]:
    """Return K and V of a KV block's tokens before `end`: [tokens, head_dim] each. If K is quantised, it is returned as
    Q8_0 blocks: [tokens, bytes]."""
    positions = np.arange(block * c.dims.bucket.kv_block, min((block + 1) * c.dims.bucket.kv_block, end))
    read = c.cache_blocks if c.dims.model.quantised_kv else c.read_cache
    return read(Buffer.K_CACHE, sequence, head, positions), c.read_cache(Buffer.V_CACHE, sequence, head, positions)


def _partial(c: Context, row: int, head: int, keys: NDArray[Any], values: F32) -> F32:
    """Attend to some KV tokens with the query heads of a token row that use KV head `head`. Return the maximum score,
    the sum of exponentials, and the output times this sum: [heads, 2 + head_dim]."""
    q = c.read(c.inputs, (row, _query_columns(c.dims, head))).reshape(-1, c.dims.model.head_dim)
    quantised = c.dims.model.quantised_kv
    scores = multiply(rounded(q), codes(keys, Dtype.Q8_0)) if quantised else product(q, keys.T)
    scores = capped(scores * np.float32(c.dims.model.head_dim**-0.5), c.dims.model.score_cap)
    m = scores.max(axis=1, keepdims=True)
    p = np.exp(scores - m)
    return np.concatenate([m, p.sum(axis=1, keepdims=True), product(p, values)], axis=1)


def _sink(c: Context, heads: slice) -> F32:
    """Return the partial results of attention sinks: a sink acts like a token with this score, and with V = 0."""
    sinks = c.weights(heads)[:, None]
    nothing = np.zeros((len(sinks), c.dims.model.head_dim), np.float32)
    return np.concatenate([sinks, np.ones_like(sinks), nothing], axis=1)


def _partial_index(t: StepTable, item: int, row: int, head: int, block: int) -> int:
    line = (row - t.item_row[item]) * t.item_kv_heads[item] + head - t.item_kv_head[item]
    return int(t.item_partial[item] + line * t.item_span[item] + block)


def _merge(partials: list[F32]) -> F32:
    """Merge the partial results of all KV blocks (rescale to one maximum, add, divide): [heads, head_dim]."""
    total = partials[0]
    for partial in partials[1:]:
        m = np.maximum(total[:, :1], partial[:, :1])
        rest = total[:, 1:] * np.exp(total[:, :1] - m) + partial[:, 1:] * np.exp(partial[:, :1] - m)
        total = np.concatenate([m, rest], axis=1)
    return total[:, 2:] / total[:, 1:2]


ATTENTION = OperationSpec(
    "runs the work items in list `slot` of the step table. An item computes softmax(Q K^T / sqrt(head_dim)) V for some"
    " rows and KV heads of a sequence over some blocks of its KV tokens. Each block gives a maximum score, a sum of "
    "exponentials and an unnormalised output, which are merged in ascending order; if several items share a row, the "
    "last to finish merges. If the phase has weights, each query head has a sink: a score that takes part in the sums "
    "and has no value",
    Cut.SLOTS,
    _accesses,
    cost=lambda p, c, d: work(c),  # it depends on the step table: see item_work
    buffers=lambda p, d: {
        **({} if p.weights is None else {"weights": contents(Buffer.SINKS, d)}),
        "inputs": contents(Buffer.Q, d),
        "output": contents(Buffer.ATTN, d),
    },
    execute=_attention,
    paged=True,
)
