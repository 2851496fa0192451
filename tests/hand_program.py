"""Programs written by hand: every phase row block by row block, tiles dealt to workers in turn.

Independent of the scheduler, so that a backend's tests do not rest on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megakernel.isa import BY_NAME, Dims, Dtype
from megakernel.isa.record import OPERAND_WORD, SIGNAL_WORD, WAIT_WORD, WORDS, Records, counter_word
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


def make_record(name: str, *operands: int, waits: list[int] | None = None, signals: list[int] | None = None) -> Records:
    words = np.zeros(WORDS, np.int32)
    words[0] = BY_NAME[name].opcode
    if len(operands) != len(BY_NAME[name].operands):
        raise ValueError(f"{name} takes {BY_NAME[name].operands}")
    words[OPERAND_WORD : OPERAND_WORD + len(operands)] = operands
    for first, listed in ((WAIT_WORD, waits or []), (SIGNAL_WORD, signals or [])):
        words[first : first + len(listed)] = listed
    return words


@dataclass
class _Builder:
    workers: int
    streams: list[list[Records]] = field(default_factory=list)
    dealt: int = 0

    def add(self, record: Records) -> None:
        self.streams[self.dealt % self.workers].append(record)
        self.dealt += 1

    def segment(self) -> Segment:
        lengths = [len(s) for s in self.streams]
        records = np.array([r for s in self.streams for r in s], np.int32).reshape(-1, WORDS)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        self.streams = [[] for _ in range(self.workers)]
        return Segment(records, offsets)


def make_program(dims: Dims, workers: int = 1, tile: int = 32) -> Program:
    """A forward pass. A tile waits for all that was done to its row block in the phase before."""
    d = dims
    blocks = d.row_blocks
    b = _Builder(workers, [[] for _ in range(workers)])
    rows = [(i * d.row_block, min(d.row_block, d.tokens - i * d.row_block)) for i in range(blocks)]
    # One group of columns per KV head for q, k, v alike; the tiles of a group are q heads, k head and v head.
    x, h, qkv, attn, o, h2, act = (phase * blocks * d.kv_heads for phase in range(7))
    single, y, logits = (7 * blocks * d.kv_heads + i for i in range(3))
    counters = 7 * blocks * d.kv_heads + 3
    totals = np.zeros((2, counters), np.int32)  # arrivals from the prologue or body; from the epilogue

    def tiles(width: int) -> list[tuple[int, int]]:
        return [(c, min(tile, width - c)) for c in range(0, width, tile)]

    def word(counter: int, **flags: bool) -> int:
        return counter_word(counter, **flags)

    for i, (row, n) in enumerate(rows):
        b.add(make_record("embed", row, n, signals=[word(x + i)]))
        b.add(make_record("rope", row, n, signals=[word(x + i)]))
    prologue = b.segment()

    for i, (row, n) in enumerate(rows):
        b.add(make_record("attn_norm", row, n, waits=[word(x + i)], signals=[word(h + i)]))
        totals[0, h + i] = 1
    group = d.group_size * d.head_dim
    for i, (row, n) in enumerate(rows):
        for g in range(d.kv_heads):
            member = qkv + i * d.kv_heads + g
            for col, cols in (
                (g * group, group),
                (d.q_cols + g * d.head_dim, d.head_dim),
                (d.q_cols + d.kv_cols + g * d.head_dim, d.head_dim),
            ):
                b.add(make_record("qkv_rope", row, n, col, cols, waits=[word(h + i)], signals=[word(member)]))
            totals[0, member] = 3
    for slot in range(d.attention_slots):
        grids = {"waits": [word(qkv, indexed=True)], "signals": [word(attn, indexed=True)]}
        b.add(make_record("attention", slot, 1, d.kv_heads, **grids))
    for i, (row, n) in enumerate(rows):
        totals[0, attn + i] = n * d.kv_heads
        for col, cols in tiles(d.hidden):
            b.add(make_record("o_proj", row, n, col, cols, waits=[word(attn + i)], signals=[word(o + i)]))
        totals[0, o + i] = len(tiles(d.hidden))
    for i, (row, n) in enumerate(rows):
        b.add(make_record("mlp_norm", row, n, waits=[word(o + i)], signals=[word(h2 + i)]))
        totals[0, h2 + i] = 1
    for i, (row, n) in enumerate(rows):
        for col, cols in tiles(d.ffn):
            b.add(make_record("gate_up_silu", row, n, col, cols, waits=[word(h2 + i)], signals=[word(act + i)]))
        totals[0, act + i] = len(tiles(d.ffn))
    for i, (row, n) in enumerate(rows):
        for col, cols in tiles(d.hidden):
            done = [word(x + i, next_layer=True)]
            b.add(make_record("down_proj", row, n, col, cols, waits=[word(act + i)], signals=done))
    body = b.segment()

    half = -(-d.logit_rows // 2)
    for row in range(0, d.logit_rows, half):
        n = min(half, d.logit_rows - row)
        b.add(make_record("final_norm", row, n, waits=[word(x, indexed=True)], signals=[word(y)]))
        totals[1, y] += 1
    for col, cols in tiles(d.vocab):
        b.add(make_record("lm_head", 0, d.logit_rows, col, cols, waits=[word(y)], signals=[word(logits)]))
    totals[1, logits] = len(tiles(d.vocab))
    b.add(make_record("join", waits=[word(logits)], signals=[word(single)]))
    totals[1, single] = 1
    b.add(make_record("sample", 0, d.logit_rows, waits=[word(single)]))
    epilogue = b.segment()

    first, middle, last = totals[0].copy(), totals[0].copy(), totals[1]
    first[x : x + blocks] = 2
    middle[x : x + blocks] = last[x : x + blocks] = len(tiles(d.hidden))
    return Program(
        dims=d,
        machine="hand",
        ranks=1,
        workers=workers,
        counters=counters,
        prologue=prologue,
        body=body,
        epilogue=epilogue,
        totals_first=first[None],
        totals_middle=middle[None],
        totals_last=last[None],
    )
