"""Programs written by hand for any number of ranks: every phase row block by row block, tiles dealt to workers in turn.

Independent of the scheduler, so that a backend's tests do not rest on it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
from program_parts import record, segment

from megakernel.isa import Dims, Dtype
from megakernel.isa.record import ALL_RANKS, OWNER, Records, counter_word
from megakernel.model.checkpoint import weight_dims
from megakernel.model.config import LlamaConfig
from megakernel.program import Program, Segment


def make_dims(config: LlamaConfig, **overrides: Any) -> Dims:
    """Small defaults: 24 token rows in row blocks of 8, pages of 16 tokens, splits possible."""
    dims = replace(
        weight_dims(config, Dtype.F32),
        page=16,
        row_block=8,
        tokens=24,
        logit_rows=24,
        max_seqs=8,
        max_context=config.max_context,
        items=64,
        attention_slots=3,
        partials=64,
        bias_entries=16,
    )
    return replace(dims, **overrides)


class _Builder:
    """Streams of all ranks, and the arrivals at their counters. A counter has the same number on every rank."""

    def __init__(self, dims: Dims, workers: int, counters: int) -> None:
        self.workers, self.ranks = workers, dims.tp
        self.arrivals = defaultdict(lambda: np.zeros((dims.tp, counters), np.int32))  # by segment, and "next"
        self._start("prologue")

    def _start(self, segment: str) -> None:
        self.name = segment
        self.streams: list[list[Records]] = [[] for _ in range(self.ranks * self.workers)]
        self.dealt = [0] * self.ranks

    def end(self, following: str = "") -> Segment:
        """The segment that is done; what follows belongs to the next."""
        done = segment(*self.streams)
        self._start(following)
        return done

    def count(self, counter: int, to: int, arrivals: int, *, next_layer: bool = False) -> None:
        ranks = slice(None) if to == ALL_RANKS else to
        self.arrivals["next" if next_layer else self.name][ranks, counter] += arrivals

    def signal(self, counter: int, to: int, *, next_layer: bool = False) -> int:
        """A signal word for one arrival."""
        self.count(counter, to, 1, next_layer=next_layer)
        return counter_word(counter, rank=to, next_layer=next_layer)

    def add(self, rank: int, record: Records) -> None:
        """To the rank's next worker."""
        self.streams[rank * self.workers + self.dealt[rank] % self.workers].append(record)
        self.dealt[rank] += 1

    def add_to_each_worker(self, rank: int, record: Records) -> None:
        for worker in range(self.workers):
            self.streams[rank * self.workers + worker].append(record)


def make_program(dims: Dims, workers: int = 1, tile: int = 32) -> Program:
    """A forward pass. A tile waits for all that was done to its row block in the phase before, by any rank."""
    size = dims.row_blocks * dims.kv_heads
    x, h, qkv, attn, o_sum, o, h2, act, down_sum = (phase * size for phase in range(9))
    gathered, ended, chosen, y, logits = (9 * size + i for i in range(5))
    counters = 9 * size + 5
    b = _Builder(dims, workers, counters)
    blocks = [
        (row // dims.row_block, row, min(dims.row_block, dims.tokens - row))
        for row in range(0, dims.tokens, dims.row_block)
    ]
    ranks = [(r, replace(dims, rank=r)) for r in range(dims.tp)]
    with_heads = [(r, d) for r, d in ranks if d.rank_heads]
    owned = [(r, block) for r, _ in ranks for block in blocks if dims.one_hop or block[0] % dims.tp == r]

    def tiles(width: int) -> list[tuple[int, int]]:
        return [(c, min(tile, width - c)) for c in range(0, width, tile)]

    def owner(block: int) -> int:
        """Who waits for what is done to the residual of a row block."""
        return ALL_RANKS if dims.one_hop else block % dims.tp

    def readers(rank: int) -> int:
        """Who waits for a norm of this rank."""
        return rank if dims.one_hop or dims.tp == 1 else ALL_RANKS

    wait, signal = counter_word, b.signal

    for r, _ in ranks:
        for i, row, n in blocks:
            b.add(r, record("rope", row, n, signals=[signal(x + i, owner(i))]))
    for r, (i, row, n) in owned:
        b.add(r, record("embed", row, n, signals=[signal(x + i, owner(i))]))
    prologue = b.end("body")

    for r, (i, row, n) in owned:
        b.add(r, record("attn_norm", row, n, waits=[wait(x + i)], signals=[signal(h + i, readers(r))]))
    for r, d in with_heads:
        for i, row, n in blocks:
            for g in range(d.rank_kv_heads):
                first, end = (d.head_dim * head for head in d.query_heads(g))
                k = d.q_cols + g * d.head_dim
                for col, cols in ((first, end - first), (k, d.head_dim), (k + d.kv_cols, d.head_dim)):
                    done = [signal(qkv + i * d.rank_kv_heads + g, r)]
                    b.add(r, record("qkv_rope", row, n, col, cols, waits=[wait(h + i)], signals=done))
    for r, d in with_heads:
        to = r if not d.replicated_o else ALL_RANKS if d.one_hop else OWNER
        grids = {"waits": [wait(qkv, indexed=True)], "signals": [wait(attn, rank=to, indexed=True)]}
        for slot in range(d.attention_slots):
            b.add(r, record("attention", slot, 1, d.rank_kv_heads, **grids))
        for i, _, n in blocks:
            b.count(attn + i, owner(i) if to == OWNER else to, n * d.rank_kv_heads)
    if dims.tp == 1 or dims.replicated_o:
        for r, (i, row, n) in owned:
            for col, cols in tiles(dims.hidden):
                done = [signal(o + i, owner(i))]
                b.add(r, record("o_proj", row, n, col, cols, waits=[wait(attn + i)], signals=done))
    else:
        for r, _ in with_heads:
            for i, row, n in blocks:
                for col, cols in tiles(dims.hidden):
                    done = [signal(o_sum + i, owner(i))]
                    b.add(r, record("o_partial", row, n, col, cols, waits=[wait(attn + i)], signals=done))
        for r, (i, row, n) in owned:
            for col, cols in tiles(dims.hidden):
                done = [signal(o + i, owner(i))]
                b.add(r, record("o_reduce", row, n, col, cols, waits=[wait(o_sum + i)], signals=done))
    for r, (i, row, n) in owned:
        b.add(r, record("mlp_norm", row, n, waits=[wait(o + i)], signals=[signal(h2 + i, readers(r))]))
    for r, d in ranks:
        for i, row, n in blocks:
            for col, cols in tiles(d.rank_ffn):
                done = [signal(act + i, r)]
                b.add(r, record("gate_up_silu", row, n, col, cols, waits=[wait(h2 + i)], signals=done))
    if dims.tp == 1:
        for r, (i, row, n) in owned:
            for col, cols in tiles(dims.hidden):
                done = [signal(x + i, r, next_layer=True)]
                b.add(r, record("down_proj", row, n, col, cols, waits=[wait(act + i)], signals=done))
    else:
        for r, _ in ranks[: dims.ffn_ranks]:
            for i, row, n in blocks:
                for col, cols in tiles(dims.hidden):
                    done = [signal(down_sum + i, owner(i))]
                    b.add(r, record("down_partial", row, n, col, cols, waits=[wait(act + i)], signals=done))
        for r, (i, row, n) in owned:
            for col, cols in tiles(dims.hidden):
                done = [signal(x + i, owner(i), next_layer=True)]
                b.add(r, record("down_reduce", row, n, col, cols, waits=[wait(down_sum + i)], signals=done))
    body = b.end("epilogue")

    half = -(-dims.logit_rows // 2)
    for r, _ in ranks:
        for row in range(0, dims.logit_rows, half):
            n = min(half, dims.logit_rows - row)
            grid = [wait(x, indexed=True)]
            b.add(r, record("final_norm", row, n, waits=grid, signals=[signal(y, readers(r))]))
    for r, d in ranks:
        for col, cols in tiles(d.rank_vocab):
            done = [signal(logits, ALL_RANKS)]
            b.add(r, record("lm_head", 0, dims.logit_rows, col, cols, waits=[wait(y)], signals=done))
    for r, _ in ranks:
        b.add(r, record("join", waits=[wait(logits)], signals=[signal(chosen, r)]))
        row = r * dims.own_logit_rows
        if row < dims.logit_rows:
            n = min(dims.own_logit_rows, dims.logit_rows - row)
            b.add(r, record("sample", row, n, waits=[wait(chosen)]))
    if dims.tp > 1:
        for r, _ in ranks:
            b.count(gathered, r, workers)
            b.add_to_each_worker(r, record("join", signals=[wait(gathered, rank=r)]))
            b.add(r, record("join", waits=[wait(gathered)], signals=[signal(ended, ALL_RANKS)]))
            b.add_to_each_worker(r, record("join", waits=[wait(ended)]))
    epilogue = b.end()

    return Program(
        dims=dims,
        machine="hand",
        ranks=dims.tp,
        workers=workers,
        counters=counters,
        prologue=prologue,
        body=body,
        epilogue=epilogue,
        totals_first=b.arrivals["prologue"] + b.arrivals["body"],
        totals_middle=b.arrivals["body"] + b.arrivals["next"],
        totals_last=b.arrivals["next"] + b.arrivals["epilogue"],
    )


def make_queue_program(dims: Dims, workers: int = 1, tile: int = 32) -> Program:
    """The same with the whole body in one queue for each rank, in the order in which one worker would run it."""
    queues = make_program(dims, 1, tile).body
    drains = [[record("drain", 0, n)] for n in np.diff(queues.offsets) for _ in range(workers)]
    body = segment(*drains)
    return replace(make_program(dims, workers, tile), body=body, queues=queues)
