"""Small, plain programs made by hand: known-good inputs for the verifier that owe nothing to the scheduler.

Tiles go round robin over a rank's workers, or into a queue. Every phase waits for its whole row block of the phase
before, through one counter per phase and row block (and head group before attention), which has the same number on
all ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import program_parts

from megakernel.isa import BY_NAME, Dims, Dtype, record
from megakernel.program import Program


def small_dims(**changes: int) -> Dims:
    fields = {
        "vocab": 20,
        "hidden": 16,
        "ffn": 24,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 4,
        "attention_bias": 0,
        "mlp_bias": 0,
        "rms_eps": 1e-5,
        "dtype": int(Dtype.F32),
        "kv_block": 128,
        "page": 16,
        "row_block": 4,
        "tokens": 7,
        "logit_rows": 3,
        "max_seqs": 2,
        "max_context": 128,
        "items": 8,
        "attention_slots": 2,
        "partials": 8,
        "bias_entries": 1,
        **changes,
    }
    return Dims(**fields)  # type: ignore[arg-type]


def rank_dims(tp: int, **changes: int) -> Dims:
    """Sizes of which most ranks get a part, of uneven length."""
    return small_dims(
        **{"tp": tp, "vocab": 150, "ffn": 70, "row_block": 2, "hidden": 8, "layers": 2, "heads": 3, "kv_heads": 3}
        | changes
    )


class _Builder:
    """Streams and queues of all ranks, and what arrives at each counter."""

    def __init__(self, dims: Dims, workers: int) -> None:
        self.dims, self.workers = dims, workers
        self.streams: list[list[list[np.ndarray]]] = [[[] for _ in range(dims.tp * workers)] for _ in range(3)]
        self.queues: list[list[np.ndarray]] = [[] for _ in range(dims.tp)]
        self.arrivals = np.zeros((3, 2, dims.tp, 1000), dtype=np.int32)  # [segment, next block, rank, counter]
        self.counters = 0
        self.turn = 0

    def grid(self, size: int) -> int:
        first, self.counters = self.counters, self.counters + size
        return first

    def words(
        self, segment: int, name: str, operands: dict[str, int], waits: list[int], signals: list[int]
    ) -> np.ndarray:
        """A record; counts its arrivals, but for those that attention items bring."""
        values = [operands[operand] for operand in BY_NAME[name].operands]
        for word in signals:
            if not word & record.INDEXED:
                rank = word >> record.RANK_SHIFT & record.RANK_MASK
                ranks: slice | int = slice(None) if rank == record.ALL_RANKS else rank
                self.arrivals[segment, int(bool(word & record.NEXT)), ranks, (word & record.COUNTER_MASK) - 1] += 1
        return program_parts.record(name, *values, waits=waits, signals=signals)

    def put(self, segment: int, rank: int, worker: int, words: np.ndarray) -> None:
        self.streams[segment][rank * self.workers + worker].append(words)

    def program(self) -> Program:
        prologue, body, epilogue = (a[:, :, : self.counters] for a in self.arrivals)
        queues = {"queues": program_parts.segment(*self.queues)} if any(self.queues) else {}
        return Program(
            self.dims,
            "test",
            self.dims.tp,
            self.workers,
            self.counters,
            *(program_parts.segment(*streams) for streams in self.streams),
            prologue[0] + body[0],
            body[0] + body[1],
            body[1] + epilogue[0],
            **queues,
        )


def handmade(dims: Dims | None = None, workers: int = 2, tile: int = 8, queue: str = "none") -> Program:
    """`tile` columns per matmul tile; one head group per KV head. `queue`: none, attention (a queue of each rank has
    its slots), or body (a queue has all of the rank's body, claimed in two tranches)."""
    d = dims or small_dims()
    b = _Builder(d, workers)
    ranks = [replace(d, rank=rank) for rank in range(d.tp)]
    dealt = d.tp > 1 and not d.one_hop
    blocks = [(r, min(d.row_block, d.tokens - r)) for r in range(0, d.tokens, d.row_block)]
    n = len(blocks)
    groups = max(r.rank_kv_heads for r in ranks)
    x, h, qkv, attn, reduced = b.grid(n), b.grid(n), b.grid(n * groups), b.grid(n), b.grid(n)
    o, h2, act, reduced2, y, logits = b.grid(n), b.grid(n), b.grid(n), b.grid(n), b.grid(1), b.grid(1)

    def signal(counter: int, rank: int, **bits: bool) -> int:
        return record.counter_word(counter, rank=rank, **bits)

    def to_peers(rank: int) -> int:
        """Where to say that rows are complete which every rank has or gets."""
        return rank if d.tp == 1 else record.ALL_RANKS

    def to_normed(rank: int) -> int:
        return record.ALL_RANKS if dealt else rank

    def to_owner(block: int) -> int:
        return block % d.tp if dealt or d.tp == 1 else record.ALL_RANKS

    def having(i: int) -> list[Dims]:
        return [r for r in ranks if not dealt or i % d.tp == r.rank]

    def after_own(normed: int) -> list[int]:
        """Where every rank has all rows, one without heads or FFN columns updates X after its own norm has read it."""
        return [normed] if d.one_hop and d.tp > 1 else []

    def add(
        segment: int, rank: Dims, name: str, operands: dict[str, int], waits: list[int], signals: list[int]
    ) -> None:
        words = b.words(segment, name, operands, waits, signals)
        if segment == 1 and (queue == "body" or (queue == "attention" and name == "attention")):
            b.queues[rank.rank].append(words)
        else:
            b.put(segment, rank.rank, b.turn % workers, words)
        b.turn += 1

    def tiles(width: int, step: int = tile) -> list[tuple[int, int]]:
        return [(c, min(step, width - c)) for c in range(0, width, step)]

    def matmul(name: str, i: int, rank: Dims, width: int, counters: list[int], signals: list[int]) -> None:
        for col, cols in tiles(width):
            box = {"row": blocks[i][0], "rows": blocks[i][1], "col": col, "cols": cols}
            add(1, rank, name, box, [record.counter_word(c + i) for c in counters], signals)

    for i, (row, rows) in enumerate(blocks):
        for r in ranks:
            add(0, r, "rope", {"row": row, "rows": rows}, [], [signal(x + i, i % d.tp if dealt else r.rank)])
        for r in having(i):
            add(0, r, "embed", {"row": row, "rows": rows}, [], [signal(x + i, r.rank)])
    for i, (row, rows) in enumerate(blocks):
        for r in having(i):
            rows_of = {"row": row, "rows": rows}
            add(1, r, "attn_norm", rows_of, [record.counter_word(x + i)], [signal(h + i, to_normed(r.rank))])
    for i, (row, rows) in enumerate(blocks):
        for r in ranks:
            for col in range(0, r.qkv_cols, d.head_dim):
                head = col // d.head_dim
                if col < r.q_cols:
                    group = (r.first_head + head) // d.group_size - r.first_kv_head
                else:
                    group = (head - r.rank_heads) % r.rank_kv_heads
                box = {"row": row, "rows": rows, "col": col, "cols": d.head_dim}
                done = signal(qkv + i * r.rank_kv_heads + group, r.rank)
                add(1, r, "qkv_rope", box, [record.counter_word(h + i)], [done])
    for r in ranks[: d.head_ranks]:
        to = r.rank
        if d.replicated_o and d.tp > 1:
            to = record.ALL_RANKS if d.one_hop else record.OWNER
        for slot in range(d.attention_slots):
            operands = {"slot": slot, "group_heads": 1, "groups": r.rank_kv_heads}
            wait = record.counter_word(qkv, indexed=True)
            add(1, r, "attention", operands, [wait], [signal(attn, to, indexed=True)])
        for i, (_, rows) in enumerate(blocks):
            at = {record.OWNER: i % d.tp, record.ALL_RANKS: slice(None)}.get(to, to)
            b.arrivals[1, 0, at, attn + i] += rows * r.rank_kv_heads
        if queue == "attention":
            for worker in range(workers):
                claim = {"queue": 0, "end": d.attention_slots}
                b.put(1, r.rank, worker, b.words(1, "drain", claim, [], []))
    sharded = d.tp > 1 and not d.replicated_o
    for i in range(n):
        if sharded:
            for r in ranks[: d.head_ranks]:
                matmul("o_partial", i, r, d.hidden, [attn], [signal(reduced + i, to_owner(i))])
        for r in having(i):
            name, wait = ("o_reduce", reduced) if sharded else ("o_proj", attn)
            matmul(name, i, r, d.hidden, [wait, *after_own(h)], [signal(o + i, r.rank if dealt else to_peers(r.rank))])
    for i, (row, rows) in enumerate(blocks):
        for r in having(i):
            rows_of = {"row": row, "rows": rows}
            add(1, r, "mlp_norm", rows_of, [record.counter_word(o + i)], [signal(h2 + i, to_normed(r.rank))])
    for i in range(n):
        for r in ranks:
            matmul("gate_up_silu", i, r, r.rank_ffn, [h2], [signal(act + i, r.rank)])
    for i in range(n):
        if d.tp > 1:
            for r in ranks[: d.ffn_ranks]:
                matmul("down_partial", i, r, d.hidden, [act], [signal(reduced2 + i, to_owner(i))])
        for r in having(i):
            name, wait = ("down_reduce", reduced2) if d.tp > 1 else ("down_proj", act)
            onward = signal(x + i, r.rank if dealt else to_peers(r.rank), next_layer=True)
            matmul(name, i, r, d.hidden, [wait, *after_own(h2)], [onward])
    if queue == "body":
        for stream in range(d.tp * workers):
            length = len(b.queues[stream // workers])
            for end in (length // 3, length):
                b.streams[1][stream].append(b.words(1, "drain", {"queue": 0, "end": end}, [], []))

    rows_of = {"row": 0, "rows": d.logit_rows}
    for r in ranks:
        wait = record.counter_word(x, indexed=True)
        add(2, r, "final_norm", rows_of, [wait], [signal(y, to_normed(r.rank))])
    for r in ranks:
        for col, cols in tiles(r.rank_vocab, tile if d.tp == 1 else 32):
            box = rows_of | {"col": col, "cols": cols}
            add(2, r, "lm_head", box, [record.counter_word(y)], [signal(logits, to_peers(0))])
    for r in ranks:
        row = r.rank * d.own_logit_rows
        if row < d.logit_rows:
            box = {"row": row, "rows": min(d.own_logit_rows, d.logit_rows - row)}
            add(2, r, "sample", box, [record.counter_word(logits)], [])
    if d.tp > 1:
        _exit_barrier(b, d, workers)
    return b.program()


def _exit_barrier(b: _Builder, d: Dims, workers: int) -> None:
    gather, leave = b.grid(1), b.grid(1)
    for rank in range(d.tp):
        for worker in range(workers):
            b.put(2, rank, worker, b.words(2, "join", {}, [], [record.counter_word(gather, rank=rank)]))
        meet = b.words(
            2, "join", {}, [record.counter_word(gather)], [record.counter_word(leave, rank=record.ALL_RANKS)]
        )
        b.put(2, rank, 0, meet)
        for worker in range(workers):
            b.put(2, rank, worker, b.words(2, "join", {}, [record.counter_word(leave)], []))
