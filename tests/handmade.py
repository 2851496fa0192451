"""A small, plain program made by hand: a known-good input for the verifier that owes nothing to the scheduler.

Tiles go round robin over the workers. Every phase waits for its whole row block of the phase before, through one
counter per phase and row block (and head group before attention). Also `run_once`, which executes a program's
reads and writes under one random interleaving and says what went wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from megakernel.isa import (
    BUFFERS,
    BY_NAME,
    BY_OPCODE,
    INSTRUCTIONS,
    Access,
    Buffer,
    Dims,
    Dtype,
    Index,
    Kind,
    Space,
    record,
)
from megakernel.program import Program, Segment


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


class _Builder:
    def __init__(self, dims: Dims, workers: int) -> None:
        self.dims, self.workers = dims, workers
        self.streams: list[list[list[np.ndarray]]] = [[[] for _ in range(workers)] for _ in range(3)]
        self.counters = 0
        self.turn = 0

    def grid(self, size: int) -> int:
        first, self.counters = self.counters, self.counters + size
        return first

    def add(self, segment: int, name: str, operands: dict[str, int], waits: list[int], signals: list[int]) -> None:
        instruction = BY_NAME[name]
        words = np.zeros(record.WORDS, dtype=np.int32)
        words[0] = instruction.opcode
        for i, operand in enumerate(instruction.operands):
            words[record.OPERAND_WORD + i] = operands[operand]
        words[record.WAIT_WORD : record.WAIT_WORD + len(waits)] = waits
        words[record.SIGNAL_WORD : record.SIGNAL_WORD + len(signals)] = signals
        self.streams[segment][self.turn % self.workers].append(words)
        self.turn += 1

    def segment(self, index: int) -> Segment:
        streams = self.streams[index]
        records = [r for stream in streams for r in stream]
        offsets = np.cumsum([0] + [len(s) for s in streams]).astype(np.int32)
        return Segment(np.array(records, dtype=np.int32).reshape(-1, record.WORDS), offsets)


def handmade(dims: Dims | None = None, workers: int = 2, tile: int = 8) -> Program:
    """One rank. `tile` columns per matmul tile; one head group per KV head."""
    d = dims or small_dims()
    b = _Builder(d, workers)
    word = record.counter_word
    blocks = [(r, min(d.row_block, d.tokens - r)) for r in range(0, d.tokens, d.row_block)]
    n, groups, group_cols = len(blocks), d.kv_heads, d.group_size * d.head_dim
    x, h, qkv, attn = b.grid(n), b.grid(n), b.grid(n * groups), b.grid(n)
    o, h2, act, y = b.grid(n), b.grid(n), b.grid(n), b.grid(1)
    logits = b.grid(1)

    def tiles(width: int) -> list[tuple[int, int]]:
        return [(c, min(tile, width - c)) for c in range(0, width, tile)]

    def group_of(col: int) -> int:
        if col < d.q_cols:
            return col // group_cols
        return (col - d.q_cols) % d.kv_cols // d.head_dim

    for i, (row, rows) in enumerate(blocks):
        b.add(0, "embed", {"row": row, "rows": rows}, [], [word(x + i)])
        b.add(0, "rope", {"row": row, "rows": rows}, [], [word(x + i)])
    for i, (row, rows) in enumerate(blocks):
        b.add(1, "attn_norm", {"row": row, "rows": rows}, [word(x + i)], [word(h + i)])
    for i, (row, rows) in enumerate(blocks):
        for col in range(0, d.qkv_cols, d.head_dim):
            box = {"row": row, "rows": rows, "col": col, "cols": d.head_dim}
            b.add(1, "qkv_rope", box, [word(h + i)], [word(qkv + i * groups + group_of(col))])
    for slot in range(d.attention_slots):
        operands = {"slot": slot, "group_heads": 1, "groups": groups}
        b.add(1, "attention", operands, [word(qkv, indexed=True)], [word(attn, indexed=True)])

    def matmul(name: str, width: int, wait: int, signal: int, next_layer: bool = False) -> None:
        for i, (row, rows) in enumerate(blocks):
            for col, cols in tiles(width):
                box = {"row": row, "rows": rows, "col": col, "cols": cols}
                b.add(1, name, box, [word(wait + i)], [word(signal + i, next_layer=next_layer)])

    matmul("o_proj", d.hidden, attn, o)
    for i, (row, rows) in enumerate(blocks):
        b.add(1, "mlp_norm", {"row": row, "rows": rows}, [word(o + i)], [word(h2 + i)])
    matmul("gate_up_silu", d.ffn, h2, act)
    matmul("down_proj", d.hidden, act, x, next_layer=True)
    b.add(2, "final_norm", {"row": 0, "rows": d.logit_rows}, [word(x, indexed=True)], [word(y)])
    for col, cols in tiles(d.vocab):
        box = {"row": 0, "rows": d.logit_rows, "col": col, "cols": cols}
        b.add(2, "lm_head", box, [word(y)], [word(logits)])
    b.add(2, "sample", {"row": 0, "rows": d.logit_rows}, [word(logits)], [])

    hidden_tiles = len(tiles(d.hidden))
    middle = np.zeros(b.counters, dtype=np.int32)
    for i, (_, rows) in enumerate(blocks):
        middle[x + i], middle[h + i], middle[h2 + i] = hidden_tiles, 1, 1
        middle[qkv + i * groups : qkv + (i + 1) * groups] = d.group_size + 2
        middle[attn + i] = rows * d.kv_heads
        middle[o + i], middle[act + i] = hidden_tiles, len(tiles(d.ffn))
    first, last = middle.copy(), np.zeros_like(middle)
    first[x : x + n] = 1
    last[x : x + n] = hidden_tiles
    last[y], last[logits] = 1, len(tiles(d.vocab))
    segments = [b.segment(i) for i in range(3)]
    return Program(d, "test", 1, workers, b.counters, *segments, first, middle, last)


# -- execution: every element of every buffer remembers the phase that wrote it last


class _State:
    def __init__(self, dims: Dims) -> None:
        self.dims = dims
        self.cells: dict[tuple[Buffer, int], np.ndarray] = {}
        self.error: str | None = None

    def cell(self, buffer: Buffer, layer: int) -> np.ndarray:
        d = self.dims
        if buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
            shape: tuple[int, ...] = (d.tokens, d.kv_cols)
        else:
            shape = BUFFERS[buffer].shape(d, 0)
        key = (buffer, layer if BUFFERS[buffer].layered else 0)
        return self.cells.setdefault(key, np.zeros(shape if len(shape) == 2 else (*shape, 1), dtype=np.int64))

    def touch(
        self, expected: dict[Buffer, tuple[int, int]], buffer: Buffer, kind: Kind, layer: int, box: tuple
    ) -> None:
        r0, r1, c0, c1 = (int(v) for v in box)
        cells = self.cell(buffer, layer)[r0:r1, c0:c1]
        before, after = expected[buffer]
        if (cells != before).any():
            self.error = f"{kind.value} {buffer.name}[{r0}:{r1}, {c0}:{c1}]: version {cells.max()}, not {before}"
        if kind is not Kind.READ:
            cells[:] = after


def _versions(dims: Dims) -> dict[tuple[int, int], dict[Buffer, tuple[int, int]]]:
    """For (opcode, layer), what version of each buffer it finds and leaves in the step's sequential meaning."""
    probe = {name: np.ones(1, dtype=np.int32) for i in INSTRUCTIONS for name in i.operands}
    layered = [i for i in INSTRUCTIONS if i.layered and i.accesses(probe, dims)]
    first = min(i.opcode for i in layered)
    before = [(i, 0) for i in INSTRUCTIONS if not i.layered and i.opcode < first]
    after = [(i, dims.layers) for i in INSTRUCTIONS if not i.layered and i.opcode > first]
    body = [(i, layer) for layer in range(dims.layers) for i in layered]
    version: dict[tuple[Buffer, int], int] = {}
    out = {}
    for number, (instruction, layer) in enumerate([*before, *body, *after], start=1):
        found = {}
        for access in instruction.accesses(probe, dims):
            key = (access.buffer, layer if BUFFERS[access.buffer].layered else 0)
            old = version.get(key, 0)
            if access.kind is not Kind.READ:
                version[key] = number
            found[access.buffer] = (old, number)
        out[instruction.opcode, layer] = found
    return out


def _items(dims: Dims, random_: random.Random) -> list[list[tuple[int, int, int, int, int, int]]]:
    """A random valid table's (row, rows, head, heads, wait block, wait blocks) per slot."""
    slots: list[list[tuple[int, int, int, int, int, int]]] = [[] for _ in range(dims.attention_slots)]
    for block in range(dims.row_blocks):
        row, end = block * dims.row_block, min((block + 1) * dims.row_block, dims.tokens)
        while row < end:
            rows, head = random_.randint(1, end - row), 0
            while head < dims.kv_heads:
                heads = random_.randint(1, dims.kv_heads - head)
                first = random_.randint(0, block)
                random_.choice(slots).append((row, rows, head, heads, first, block - first + 1))
                head += heads
            row += rows
    return slots


Work = tuple[Callable[[], bool], Callable[[], None]]  # ready?, do


def run_once(program: Program, seed: int) -> str | None:
    """Execute once in a random order with a random step table; None if every access saw what it must see."""
    random_ = random.Random(seed)
    d, state, versions = program.dims, _State(program.dims), _versions(program.dims)
    totals = program.totals()
    values = np.zeros_like(totals)
    slots = _items(d, random_)
    logit_rows = [random_.randrange(-1, d.tokens) for _ in range(d.logit_rows)]

    def met(block: int, counter: int) -> bool:
        return bool(values[block, counter] - totals[block, counter] >= 0)

    def access_box(a: Access) -> tuple:
        return a.row[0], a.row_end[0], a.col[0], a.col_end[0]

    def steps(words: np.ndarray, block: int) -> list[Work]:
        """What one run does, as parts that may each be interleaved with other workers."""
        opcode = int(words[0]) & 0xFF
        instruction = BY_OPCODE[opcode]
        columns = instruction.columns(words[None])
        accesses = instruction.accesses(columns, d)
        expected = versions.get((opcode, block), {})
        waits = [int(w) for w in words[record.WAIT_WORD : record.SIGNAL_WORD] if w]
        signals = [int(w) for w in words[record.SIGNAL_WORD :] if w]
        fixed = [int(record.word_counter(np.int32(w))) for w in waits if not w & record.INDEXED]

        def signal(word: int, member: int = 0, count: int = 1) -> None:
            values[block + bool(word & record.NEXT), (word & record.COUNTER_MASK) - 1 + member] += count

        def plain() -> None:
            for a in accesses:
                if a.index is Index.NONE:
                    state.touch(expected, a.buffer, a.kind, block, access_box(a))

        def finish() -> None:
            for w in signals:
                if not w & record.INDEXED:
                    signal(w)

        out: list[Work] = [(lambda: all(met(block, c) for c in fixed), plain)]
        if instruction.name == "attention":
            out += [item(words, block, i, expected, accesses, signal) for i in slots[int(columns["slot"][0])]]
        if instruction.name == "final_norm":
            out += [logit(words, block, i, expected) for i in logit_rows[columns["row"][0] :][: columns["rows"][0]]]
        return [*out, (lambda: True, finish)]

    def item(words, block, item, expected, accesses, signal) -> Work:  # type: ignore[no-untyped-def]
        row, rows, head, heads, first, count = item
        wait, word = int(words[record.WAIT_WORD]), int(words[record.SIGNAL_WORD])
        columns = BY_NAME["attention"].columns(words[None])
        group_heads, groups = int(columns["group_heads"][0]), int(columns["groups"][0])
        waited = range(head // group_heads, (head + heads - 1) // group_heads + 1)
        base = (wait & record.COUNTER_MASK) - 1
        members = [base + b * groups + g for b in range(first, first + count) for g in waited]
        kv_rows = (first * d.row_block, row + rows)

        def do() -> None:
            for a in accesses:
                width = int(a.col_end[0]) // d.kv_heads
                own = a.buffer in (Buffer.Q, Buffer.ATTN)
                r0, r1 = (row, row + rows) if own else kv_rows
                state.touch(expected, a.buffer, a.kind, block, (r0, r1, head * width, (head + heads) * width))
            signal(word, row // d.row_block, rows * heads)

        return (lambda: all(met(block, c) for c in members)), do

    def logit(words, block, row, expected) -> Work:  # type: ignore[no-untyped-def]
        wait = int(words[record.WAIT_WORD])
        counter = (wait & record.COUNTER_MASK) - 1 + row // d.row_block
        indexed = wait & record.INDEXED and row >= 0

        def do() -> None:
            if row >= 0:
                state.touch(expected, Buffer.X, Kind.READ, block, (row, row + 1, 0, d.hidden))

        return (lambda: not indexed or met(block, counter)), do

    runs = [(program.prologue, 0), *((program.body, layer) for layer in range(d.layers)), (program.epilogue, d.layers)]
    streams = [
        [work for segment, block in runs for words in segment.stream(s) for work in steps(words, block)]
        for s in range(program.ranks * program.workers)
    ]
    cursor = [0] * len(streams)
    order = list(range(len(streams)))
    while any(c < len(s) for c, s in zip(cursor, streams, strict=True)):
        if random_.random() < 0.2:
            random_.shuffle(order)  # runs of steps on one worker reach further than a fresh draw each time
        for s in order:
            if cursor[s] < len(streams[s]) and streams[s][cursor[s]][0]():
                streams[s][cursor[s]][1]()
                cursor[s] += 1
                break
        else:
            return "deadlock"
        if state.error:
            return state.error
    if (values != totals).any():
        return "a counter did not end at its total"
    for opcode, layer in versions:
        for a in BY_OPCODE[opcode].accesses({k: np.ones(1, dtype=np.int32) for k in BY_OPCODE[opcode].operands}, d):
            written = state.cell(a.buffer, layer) == versions[opcode, layer][a.buffer][1]
            if BUFFERS[a.buffer].space is Space.OUTPUT and a.kind is Kind.WRITE and not written.all():
                return f"{a.buffer.name} is not all written"
    return None
