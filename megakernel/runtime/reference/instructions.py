"""Defines what each operation computes: a short NumPy function for each operation and for each kind
of matmul result.

All values are float32; a result is rounded to its buffer's type once, where it is stored. BLAS
libraries add in different orders. Dot products are therefore added in float64, where the order
hardly ever changes the result in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...isa import Buffer, Dims, Dtype, Operation, Phase, Result, Rows, StepTable, from_f32, to_f32
from ...isa.dims import KV_SCALE, KV_UNIT
from ...isa.dtypes import BLOCKS
from ...model.quantise import quantise
from .sampling import F32, draw, kept, log_sum_exp, penalised, uniform


@dataclass(frozen=True)
class Context:
    """The data that one instruction can access: its phase, its rank's sizes and step table, and its
    layer's part of buffers.

    `buffer(buffer, ahead=0)` returns the rank's own copy for the layer that is `ahead` layers
    later, or for the last layer if there are fewer layers. Other ranks' copies can only be written,
    by `send(buffer, rank, index, values)`, whose values have the buffer's own type.
    """

    phase: Phase
    dims: Dims
    table: StepTable
    buffer: Callable[..., NDArray[Any]]
    send: Callable[[Buffer, int, Any, NDArray[Any]], None]

    @property
    def inputs(self) -> Buffer:
        return _given(self.phase.inputs)

    @property
    def output(self) -> Buffer:
        return _given(self.phase.output)

    def read(self, buffer: Buffer, index: Any = ...) -> F32:
        values: NDArray[Any] = self.buffer(buffer)[index]
        return to_f32(values)

    def weights(self, index: Any = ...) -> F32:
        """The phase's weights, which belong to the layer that is `phase.ahead` layers later."""
        values: NDArray[Any] = self.buffer(_given(self.phase.weights), ahead=self.phase.ahead)[index]
        return to_f32(values)

    def biased(self, values: F32, index: Any) -> F32:
        """`values` plus the phase's bias, if it has one."""
        return values if self.phase.bias is None else values + self.read(self.phase.bias, index)

    def write(self, buffer: Buffer, index: Any, values: Any) -> None:
        """Round values to the buffer's own type and store them."""
        self.store(buffer, (self.dims.rank,), index, values)

    def store(self, buffer: Buffer, ranks: Iterable[int], index: Any, values: Any) -> None:
        """Like `write`, but into the copies that `ranks` have of the buffer."""
        own = self.buffer(buffer)
        stored = from_f32(values, Dtype.BF16) if own.dtype == np.uint16 else np.asarray(values, own.dtype)
        for rank in ranks:
            if rank == self.dims.rank:
                own[index] = stored
            else:
                self.send(buffer, rank, index, stored)


def _given(buffer: Buffer | None) -> Buffer:
    assert buffer is not None
    return buffer


def _peers(d: Dims) -> Iterable[int]:
    """The ranks to which a rank stores a row that all ranks need: all ranks, or only itself if
    every rank computes the row.
    """
    return (d.rank,) if d.replicated_residual else range(d.tp)


def product(a: F32, b: F32) -> F32:
    """a @ b, added in float64 and rounded once.

    The order of additions depends on the BLAS library and on the other rows in the batch.
    A different order changes fewer than one in ten million of the rounded numbers.
    """
    return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)


def _rms_norm(x: F32, weight: F32, eps: float) -> F32:
    scale: F32 = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return x / scale * weight


def _gather(c: Context, row: int, rows: int) -> None:
    r = slice(row, row + rows)
    tokens, positions = c.table.token_ids[r], c.table.positions[r]
    last = c.buffer(Buffer.HISTORY)
    ids = [t if t >= 0 else last[-1 - t, p] for t, p in zip(tokens, positions, strict=True)]
    c.write(c.output, r, c.weights(ids))


def _rope(c: Context, row: int, rows: int) -> None:
    r = slice(row, row + rows)
    angle = c.table.positions[r].astype(np.float32)[:, None] * c.weights()
    c.write(c.output, r, np.stack([np.cos(angle), np.sin(angle)], axis=-1).reshape(rows, -1))


def _norm(c: Context, row: int, rows: int) -> None:
    if c.phase.rows is not Rows.LOGIT:
        r = slice(row, row + rows)
        c.store(c.output, _peers(c.dims), r, _rms_norm(c.read(c.inputs, r), c.weights(), c.dims.rms_eps))
        return
    for i in range(row, row + rows):
        source = c.table.logit_rows[i]
        if c.dims.rank not in c.dims.owners(max(source, 0)):
            continue
        x = c.read(c.inputs, source) if source >= 0 else np.zeros(c.phase.inner(c.dims), np.float32)
        c.store(c.output, _peers(c.dims), i, _rms_norm(x, c.weights(), c.dims.rms_eps))


def _matmul(c: Context, row: int, rows: int, col: int, cols: int) -> None:
    """Multiply the rows by each matrix, add the biases, and store what the phase's kind of result requires."""
    columns = slice(col, col + cols)
    a = c.read(c.inputs, slice(row, row + rows))
    if c.phase.norm is not None:
        # A separate norm instruction would store its result in a buffer, so round to the type of that buffer.
        a = to_f32(from_f32(_rms_norm(a, c.read(c.phase.norm), c.dims.rms_eps), Dtype(c.dims.dtype)))
    matrices = (
        [(columns,)] if c.phase.matrices(c.dims) == 1 else [(i, columns) for i in range(c.phase.matrices(c.dims))]
    )
    results = [c.biased(product(a, c.weights(matrix).T), matrix) for matrix in matrices]
    _RESULTS[c.phase.result](c, row, col, *results)


def _heads(c: Context, row: int, col: int, t: F32) -> None:
    d = c.dims
    r = slice(row, row + len(t))
    column = np.arange(col, col + t.shape[1])
    rotated = int(np.count_nonzero(column < d.q_cols + d.kv_cols))
    if c.phase.head_norm is not None:
        assert col % d.head_dim == 0 and len(column) % d.head_dim == 0
        heads = t[:, :rotated].reshape(len(t), -1, d.head_dim)
        kind = (column[: rotated : d.head_dim] >= d.q_cols).astype(int)
        t[:, :rotated] = _rms_norm(heads, c.read(c.phase.head_norm)[kind], d.rms_eps).reshape(len(t), -1)
    even = column[:rotated:2] % d.head_dim
    rope = c.read(Buffer.ROPE, r)
    cos, sin = rope[:, even], rope[:, even + 1]
    a, b = t[:, :rotated:2].copy(), t[:, 1:rotated:2].copy()
    t[:, :rotated:2] = a * cos - b * sin
    t[:, 1:rotated:2] = b * cos + a * sin

    q = column < d.q_cols
    c.write(c.output, (r, column[q]), t[:, q])
    live = np.flatnonzero(c.table.row_seq[r] >= 0)
    page, offset = _slots(c, c.table.row_seq[r][live], c.table.positions[r][live])
    page, offset = page[:, None], offset[:, None]
    for buffer, first in ((Buffer.K_CACHE, d.q_cols), (Buffer.V_CACHE, d.q_cols + d.kv_cols)):
        mine = (column >= first) & (column < first + d.kv_cols)
        values = t[np.ix_(live, mine)]
        if d.quantised_kv:
            assert col % d.head_dim == 0 and len(column) % d.head_dim == 0
            head = np.unique((column[mine] - first) // d.head_dim)
            blocks = quantise(values.reshape(-1, d.head_dim), Dtype.Q8_0)[:, : d.kv_row]
            c.buffer(buffer)[cache_bytes(d, buffer, page, head, offset)] = blocks.reshape(
                len(live), len(head), d.kv_row
            )
            continue
        head, element = np.divmod(column[mine] - first, d.head_dim)
        index = (page, head, element, offset) if buffer is Buffer.K_CACHE else (page, head, offset, element)
        c.write(buffer, index, values)


def _residual(c: Context, row: int, col: int, t: F32) -> None:
    tile = (slice(row, row + len(t)), slice(col, col + t.shape[1]))
    c.write(c.output, tile, c.read(c.output, tile) + t)


def _partial_sum(c: Context, row: int, col: int, t: F32) -> None:
    tile = (_reduce_rows(c.dims, c.dims.rank, row, len(t)), slice(col, col + t.shape[1]))
    c.store(c.output, c.dims.owners(row), tile, t)


def _reduce_rows(d: Dims, rank: int, row: int, rows: int) -> slice:
    """The rows of REDUCE that hold the partial sums of `rank` for the token rows [row, row + rows),
    which must lie in one row block. These rows of REDUCE are on the rank that adds the sums up.
    """
    start = d.reduce_row(rank, row)
    return slice(start, start + rows)


def _gated(c: Context, row: int, col: int, gate: F32, up: F32) -> None:
    with np.errstate(over="ignore"):  # if a gate is a large negative number, exp overflows and SiLU is 0
        tile = (slice(row, row + len(gate)), slice(col, col + gate.shape[1]))
        c.write(c.output, tile, gate / (1 + np.exp(-gate)) * up)


def _logits(c: Context, row: int, col: int, t: F32) -> None:
    columns = slice(c.dims.first_vocab + col, c.dims.first_vocab + col + t.shape[1])
    for i, line in enumerate(t, row):
        c.store(c.output, (i // c.dims.own_logit_rows,), (i, columns), line)


def _reduce(c: Context, row: int, rows: int, col: int, cols: int) -> None:
    tile = (slice(row, row + rows), slice(col, col + cols))
    partials = [c.read(c.inputs, (_reduce_rows(c.dims, k, row, rows), tile[1])) for k in range(c.phase.ranks(c.dims))]
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    c.write(c.output, tile, c.read(c.output, tile) + c.biased(total, tile[1]))


def _slots(c: Context, sequence: Any, position: NDArray[Any]) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """Return (page, offset in the page) of token positions. `sequence` is a number or has the shape of `position`."""
    return c.table.block_tables[sequence, position // c.dims.kv_page], position % c.dims.kv_page


def _attention(c: Context, slot: int, group_heads: int, groups: int) -> None:
    for item in range(*c.table.slot_items[slot : slot + 2]):
        attend(c, item)


def attend(c: Context, item: int) -> bool:
    """Run one attention item. Returns True when the item's rows of ATTN are final. If several
    items share the context of the same rows, only the item that runs last returns True.
    """
    d, t = c.dims, c.table
    rows = range(t.item_row[item], t.item_row[item] + t.item_rows[item])
    heads = range(t.item_kv_head[item], t.item_kv_head[item] + t.item_kv_heads[item])
    if t.item_seq[item] < 0:
        for head in heads:
            _store_heads(c, slice(rows.start, rows.stop), head, np.zeros((), np.float32))
        return True
    found = {}
    for head in heads:
        for block in range(t.item_block[item], t.item_block[item] + t.item_blocks[item]):
            keys, values = _keys_values(c, t.item_seq[item], head, block, t.positions[rows[-1]] + 1)
            for row in rows:
                n = t.positions[row] + 1 - block * d.kv_block
                if n > 0:
                    found[row, head, block] = _partial(c, row, head, keys[:n], values[:n])
    if t.item_split[item] >= 0:
        for (row, head, block), partial in found.items():
            c.write(Buffer.PARTIALS, (_partial_index(t, item, row, head, block), slice(len(partial))), partial)
        arrivals = c.buffer(Buffer.SPLITS)
        arrivals[t.item_split[item]] += 1
        if arrivals[t.item_split[item]] < t.item_splits[item]:
            return False
        arrivals[t.item_split[item]] = 0
    for row in rows:
        blocks = range(t.positions[row] // d.kv_block + 1)
        for head in heads:
            first, end = d.query_heads(head)
            if t.item_split[item] >= 0:
                lines = [_partial_index(t, item, row, head, b) for b in blocks]
                partials = [c.read(Buffer.PARTIALS, (line, slice(end - first))) for line in lines]
            else:
                partials = [found[row, head, b] for b in blocks]
            _store_heads(c, slice(row, row + 1), head, _merge(partials).reshape(-1))
    return True


def _query_columns(d: Dims, head: int) -> slice:
    """The columns of Q for the rank's query heads that share KV head `head`."""
    first, end = d.query_heads(head)
    return slice(first * d.head_dim, end * d.head_dim)


def _store_heads(c: Context, rows: slice, head: int, values: F32) -> None:
    """Store attention's output for one KV head's query heads, for rows of one row block."""
    columns = _query_columns(c.dims, head)
    index = (rows, slice(c.dims.o_first + columns.start, c.dims.o_first + columns.stop))
    ranks = c.dims.owners(rows.start) if c.dims.replicated_o else (c.dims.rank,)
    c.store(c.output, ranks, index, values)


def _keys_values(c: Context, sequence: int, head: int, block: int, end: int) -> tuple[F32, F32]:
    """K and V of a KV block's tokens before `end`, each [tokens, head_dim]."""
    position = np.arange(block * c.dims.kv_block, min((block + 1) * c.dims.kv_block, end))
    page, offset = _slots(c, sequence, position)
    if c.dims.quantised_kv:
        return _widened(c, Buffer.K_CACHE, page, head, offset), _widened(c, Buffer.V_CACHE, page, head, offset)
    return c.read(Buffer.K_CACHE, (page, head, slice(None), offset)), c.read(Buffer.V_CACHE, (page, head, offset))


def cache_bytes(d: Dims, buffer: Buffer, page: Any, head: Any, offset: Any) -> tuple[Any, ...]:
    """An index that selects the bytes of quantised rows of K or V, in the order of their Q8_0 blocks. Its shape is
    [..., kv_row].

    `page`, `head` and `offset` must have the same shape, or broadcast to a common one.
    """
    page, head, offset = (np.expand_dims(each, -1) for each in (page, head, offset))
    block, byte = np.divmod(np.arange(d.kv_row), BLOCKS[Dtype.Q8_0].bytes)
    element = byte - KV_SCALE
    width = np.minimum(d.head_dim - block * KV_UNIT, KV_UNIT)
    value = element * d.kv_page + offset if buffer is Buffer.K_CACHE else offset * width + element
    at = np.where(element < 0, KV_SCALE * offset + byte, KV_SCALE * d.kv_page + value)
    at += block * BLOCKS[Dtype.Q8_0].bytes * d.kv_page
    row = d.kv_page if buffer is Buffer.K_CACHE else d.kv_row
    return page, head, at // row, at % row


def _widened(c: Context, buffer: Buffer, page: Any, head: int, offset: Any) -> F32:
    """The float32 values of quantised rows of K or V, [tokens, head_dim]."""
    rows: NDArray[np.uint8] = c.buffer(buffer)[cache_bytes(c.dims, buffer, page, head, offset)]
    whole = Dtype.Q8_0.row_bytes(c.dims.head_dim)
    return to_f32(np.pad(rows, [(0, 0), (0, whole - c.dims.kv_row)]), Dtype.Q8_0)[:, : c.dims.head_dim]


def _partial(c: Context, row: int, head: int, keys: F32, values: F32) -> F32:
    """Attention of one row's query heads over some tokens: the maximum m, the sum l, and the output
    o, which is not yet divided by l. The shape is [heads, 2 + head_dim].
    """
    q = c.read(c.inputs, (row, _query_columns(c.dims, head))).reshape(-1, c.dims.head_dim)
    scores = product(q, keys.T) * np.float32(c.dims.head_dim**-0.5)
    m = scores.max(axis=1, keepdims=True)
    p = np.exp(scores - m)
    return np.concatenate([m, p.sum(axis=1, keepdims=True), product(p, values)], axis=1)


def _partial_index(t: StepTable, item: int, row: int, head: int, block: int) -> int:
    line = (row - t.item_row[item]) * t.item_kv_heads[item] + head - t.item_kv_head[item]
    return int(t.item_partial[item] + line * t.item_span[item] + block)


def _merge(partials: list[F32]) -> F32:
    """Merge the partial results of all KV blocks into attention's output, [heads, head_dim]:
    rescale to the common maximum, add, divide.
    """
    total = partials[0]
    for partial in partials[1:]:
        m = np.maximum(total[:, :1], partial[:, :1])
        rest = total[:, 1:] * np.exp(total[:, :1] - m) + partial[:, 1:] * np.exp(partial[:, :1] - m)
        total = np.concatenate([m, rest], axis=1)
    return total[:, 2:] / total[:, 1:2]


def _sample(c: Context, row: int, rows: int) -> None:
    t = c.table
    for i in range(row, row + rows):
        token, logprob = 0, np.float32(0.0)
        if t.logit_rows[i] >= 0:
            z = c.read(c.inputs, i)
            token = int(t.target[i]) if t.target[i] >= 0 else _choose(c, i, z)
            logprob = z[token] - log_sum_exp(z)
        c.store(Buffer.TOKENS_OUT, (0,), i, token)
        c.store(Buffer.LOGPROBS_OUT, (0,), i, logprob)
        if t.sample_slot[i] >= 0:
            c.store(Buffer.HISTORY, range(c.dims.tp), (t.sample_slot[i], t.sample_position[i]), token)


def _choose(c: Context, i: int, z: F32) -> int:
    """Sample logit row i: penalties, bias, mask, temperature, min-p, top-k, top-p, one draw."""
    t = c.table
    if t.history_slot[i] >= 0:
        seen = c.buffer(Buffer.HISTORY)[t.history_slot[i], : t.sample_position[i]]
        penalties = {"repetition": t.repetition_penalty, "presence": t.presence_penalty}
        penalties["frequency"] = t.frequency_penalty
        values = {name: float(column[i]) for name, column in penalties.items()}
        z = penalised(z, seen, seen[t.prompt_length[i] :], **values)
    bias = slice(t.bias_begin[i], t.bias_end[i])
    z = z.copy()
    np.add.at(z, t.bias_ids[bias], t.bias_values[bias])
    if t.mask[i] > 0:
        bits = np.unpackbits(t.masks[t.mask[i] - 1].view(np.uint8), bitorder="little")[: len(z)]
        z[bits == 0] = -np.inf
    if t.temperature[i] == 0 or z.max() == -np.inf:
        return int(z.argmax())
    z = z / t.temperature[i]
    ids = kept(z, min_p=float(t.min_p[i]), top_k=int(t.top_k[i]), top_p=float(t.top_p[i]))
    return draw(z, ids, uniform(int(t.seed_low[i]), int(t.seed_high[i]), int(t.sample_position[i]), int(t.choice[i])))


def _nothing(c: Context, *operands: int) -> None:
    pass


_RESULTS: dict[Result, Callable[..., None]] = {
    Result.HEADS: _heads,
    Result.RESIDUAL: _residual,
    Result.PARTIAL: _partial_sum,
    Result.GATED: _gated,
    Result.LOGITS: _logits,
}

EXECUTE: dict[Operation, Callable[..., None]] = {
    Operation.JOIN: _nothing,
    Operation.DRAIN: _nothing,
    Operation.GATHER: _gather,
    Operation.ROPE: _rope,
    Operation.NORM: _norm,
    Operation.MATMUL: _matmul,
    Operation.ATTENTION: _attention,
    Operation.REDUCE: _reduce,
    Operation.SAMPLE: _sample,
}
if set(EXECUTE) != set(Operation) or set(_RESULTS) | {Result.NONE} != set(Result):
    raise AssertionError("the reference backend must implement every Operation and every Result, and nothing else")
