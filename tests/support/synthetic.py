"""Small programs made by hand, and traces of them: by hand where a test knows the answer, in virtual time otherwise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from program_parts import segment

from megakernel.isa import BY_NAME, BY_OPCODE, Dims
from megakernel.isa import record as rec
from megakernel.program import Program, Segment
from megakernel.trace import DTYPE, EPILOGUE, PROLOGUE, IntervalKind, Role, Trace, TraceHeader

Words = list[int]


def dims(layers: int = 2, tokens: int = 64, row_block: int = 32, slots: int = 4, **changes: float) -> Dims:
    base = {
        "vocab": 1024,
        "hidden": 128,
        "ffn": 512,
        "layers": layers,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "attention_bias": 0,
        "mlp_bias": 0,
        "rms_eps": 1e-5,
        "dtype": 1,
        "kv_block": 128,
        "page": 16,
        "row_block": row_block,
        "tokens": tokens,
        "logit_rows": 4,
        "max_seqs": 4,
        "max_context": 256,
        "items": slots,
        "attention_slots": slots,
        "partials": 0,
        "bias_entries": 1,
    }
    return Dims(**(base | changes))  # type: ignore[arg-type]


def record(name: str, operands: Sequence[int] = (), waits: Sequence[int] = (), signals: Sequence[int] = ()) -> Words:
    """One record; waits and signals are words."""
    return rec.encode(BY_NAME[name].opcode, operands, waits, signals).tolist()


def program(
    d: Dims,
    prologue: Sequence[Sequence[Words]],
    body: Sequence[Sequence[Words]],
    epilogue: Sequence[Sequence[Words]],
    *,
    counters: int,
    ranks: int = 1,
) -> Program:
    """Streams are given per (rank, worker). Totals are left at zero: no view reads them."""
    zeros = np.zeros((ranks, counters), dtype=np.int32)
    workers = len(body) // ranks
    return Program(
        dims=d,
        machine="host",
        ranks=ranks,
        workers=workers,
        counters=counters,
        prologue=segment(*prologue),
        body=segment(*body),
        epilogue=segment(*epilogue),
        totals_first=zeros,
        totals_middle=zeros,
        totals_last=zeros,
    )


def llama(layers: int = 2, workers: int = 4, row_blocks: int = 2, tiles: int = 4) -> Program:
    """A whole step in miniature: every instruction but join, dealt to workers in turn."""
    rows, cols = 32, 32
    d = dims(layers, tokens=rows * row_blocks, slots=row_blocks * 2)
    groups = 2
    # Counters of a block, each a row of members per row block.
    x, h, grid, att, x2, h2, act, y, logits = (base * row_blocks * groups for base in range(9))
    word, n = rec.counter_word, row_blocks
    prologue = [record("embed", (b * rows, rows), (), [word(x + b)]) for b in range(n)]
    body: list[Words] = []
    for b in range(n):
        body.append(record("attn_norm", (b * rows, rows), [word(x + b)], [word(h + b)]))
    for b in range(n):
        for t in range(tiles):
            into = word(grid + b * groups + t * groups // tiles)
            body.append(record("qkv_rope", (b * rows, rows, t * cols, cols), [word(h + b)], [into]))
    for slot in range(n * 2):
        indexed = [word(grid, indexed=True)], [word(att, indexed=True)]
        body.append(record("attention", (slot, 1, groups), *indexed))
    for name, source, sink, k in (
        ("o_proj", att, x2, tiles),
        ("mlp_norm", x2, h2, 0),
        ("gate_up_silu", h2, act, 2 * tiles),
        ("down_proj", act, x, tiles),
    ):
        for b in range(n):
            signal = [word(sink + b, next_layer=name == "down_proj")]
            if not k:
                body.append(record(name, (b * rows, rows), [word(source + b)], signal))
            for t in range(k):
                body.append(record(name, (b * rows, rows, t * cols, cols), [word(source + b)], signal))
    epilogue = [record("final_norm", (0, 4), [word(x, indexed=True)], [word(y)])]
    epilogue += [record("lm_head", (0, 4, t * 128, 128), [word(y)], [word(logits)]) for t in range(8)]
    epilogue += [record("sample", (i, 1), [word(logits)], []) for i in range(4)]

    def deal(items: list[Words]) -> list[list[Words]]:
        return [items[w::workers] for w in range(workers)]

    return program(d, deal(prologue), deal(body), deal(epilogue), counters=logits + row_blocks * groups)


MICROSECONDS = {
    "embed": 3,
    "attn_norm": 4,
    "qkv_rope": 22,
    "attention": 45,
    "o_proj": 18,
    "mlp_norm": 4,
    "gate_up_silu": 30,
    "down_proj": 34,
    "final_norm": 5,
    "lm_head": 60,
    "sample": 8,
}


SIGNAL_NS, DISPATCH_NS = 300, 200


def run(p: Program, seed: int = 0, stall: tuple[int, int] | None = None) -> Trace:
    """Execute `p` (made by `llama`) in virtual time: nanosecond ticks, a prefetch LOAD in front of each matmul.

    `stall` = (body record, layer) of an instruction that takes 5 ms longer. Durations do not depend on it.
    """
    rng = np.random.default_rng(seed)
    arrived: dict[int, list[int]] = defaultdict(list)
    streams = [
        [
            (name, block, first + i, words, layer)
            for name, block, layer, seg in _runs(p)
            for first, words_of in [(int(seg.offsets[w]), seg.stream(w))]
            for i, words in enumerate(words_of.tolist())
        ]
        for w in range(p.workers)
    ]
    expected: dict[int, int] = defaultdict(int)
    for stream in streams:
        for _, block, _, words, _ in stream:
            for counter in _counters(p, words, block, wait=False):
                expected[counter] += 1
    clock, heads, rows = [0] * p.workers, [0] * p.workers, []
    while any(h < len(s) for h, s in zip(heads, streams, strict=True)):
        for w, stream in enumerate(streams):
            if heads[w] == len(stream):
                continue
            _, block, index, words, layer = stream[heads[w]]
            waits = _counters(p, words, block, wait=True)
            if any(len(arrived[c]) < expected[c] for c in waits):
                continue
            heads[w] += 1
            ready = max((t for c in waits for t in arrived[c]), default=0) + SIGNAL_NS
            name = BY_OPCODE[words[0] & 0xFF].name
            start = max(clock[w] + DISPATCH_NS, ready if waits else 0)
            if ready > clock[w] and waits:
                rows.append((clock[w], start, index, 1, w, layer, 0, Role.WORKER, IntervalKind.COUNTER_WAIT, 0))
            if BY_OPCODE[words[0] & 0xFF].family.name == "MATMUL":
                load = (clock[w], min(clock[w] + 2500, start), index, 1, w, layer, 0, Role.WORKER, IntervalKind.LOAD, 0)
                rows.append(load)
            end = start + int(MICROSECONDS[name] * 1000 * rng.uniform(0.75, 1.35))
            end += 5_000_000 if stall == (index, layer) else 0
            rows.append((start, end, index, 1, w, layer, 0, Role.WORKER, IntervalKind.COMPUTE, 0))
            clock[w] = end
            for counter in _counters(p, words, block, wait=False):
                arrived[counter].append(end)
    return trace(p, rows)


def stalled() -> tuple[Program, Trace, tuple[int, int]]:
    """A step of three layers in which the instruction (body record, layer) stalls."""
    p, where = llama(layers=3), (2, 1)
    return p, run(p, stall=where), where


def _runs(p: Program) -> list[tuple[str, int, int, Segment]]:
    body = [("body", layer, layer, p.body) for layer in range(p.dims.layers)]
    return [("prologue", 0, PROLOGUE, p.prologue), *body, ("epilogue", p.dims.layers, EPILOGUE, p.epilogue)]


def _counters(p: Program, words: Words, block: int, *, wait: bool) -> list[int]:
    """Counters of a record, with `llama`'s attention items: slot s works on row block s // 2 and KV group s % 2."""
    start, count = (rec.WAIT_WORD, rec.WAITS) if wait else (rec.SIGNAL_WORD, rec.SIGNALS)
    found = []
    for word in (w for w in words[start : start + count] if w):
        counter = (word & rec.COUNTER_MASK) - 1
        base = (block + (1 if word & rec.NEXT else 0)) * p.counters + counter
        if not word & rec.INDEXED:
            found.append(base)
        elif words[0] & 0xFF == BY_NAME["attention"].opcode:
            slot = words[rec.OPERAND_WORD]
            found.append(base + (slot if wait else slot // 2))
        else:
            found += [base + b for b in range(p.dims.row_blocks)]
    return found


def trace(p: Program, rows: Sequence[tuple[int, ...]], *, dropped: int = 0, tick_s: float = 1e-9) -> Trace:
    """A trace of rows with DTYPE's fields in order, sorted as a trace must be."""
    intervals = np.array([tuple(r) for r in rows], dtype=DTYPE)
    intervals = intervals[np.lexsort((intervals["begin"], intervals["worker"], intervals["rank"]))]
    header = TraceHeader(p.hash, "simulator", tick_s, read_s=0.0, clock_error_s=0.0, dropped=dropped)
    return Trace(header, intervals)


# Phases of a layer in `node`: instruction, instructions per worker, mean microseconds, whether it signals every rank.
PHASES = (
    ("attn_norm", 1, 6, True),
    ("qkv_rope", 3, 92, False),
    ("attention", 4, 64, False),
    ("o_partial", 16, 12, True),
    ("o_reduce", 2, 5, False),
    ("mlp_norm", 1, 6, True),
    ("gate_up_silu", 7, 180, False),
    ("down_partial", 16, 41, True),
    ("down_reduce", 2, 5, True),
)
_GROUPS = 4  # counters of a phase: its instructions in order, in so many parts
_SIGNAL, _LOAD, _STORE = 400, 3000, 700  # nanoseconds


def node(
    ranks: int = 8, workers: int = 132, layers: int = 2, slow: float = 1.0, seed: int = 0, clock_error_s: float = 0.0
) -> tuple[Program, Trace]:
    """Layers of a 70B-like model over a node's GPUs, in virtual time, with the roles of a GPU's worker.

    Matmuls take `slow` times as long. At full size the trace has more than 400 thousand intervals.
    """
    d = dims(layers, 8192, 128, hidden=8192, ffn=28672, heads=64, kv_heads=8, head_dim=128, vocab=128256, tp=ranks)
    rng = np.random.default_rng(seed)
    count = sum(n for _, n, _, _ in PHASES)
    body = np.zeros((ranks, workers, count, rec.WORDS), dtype=np.int32)
    lane = np.arange(ranks * workers).reshape(ranks, workers)
    clock = np.zeros((ranks, workers), dtype=np.int64)
    done = np.zeros((len(PHASES), _GROUPS, ranks), dtype=np.int64)  # last arrival at each counter
    loaded, stored = clock.copy(), clock.copy()
    parts: list[tuple[object, ...]] = []
    for layer in range(layers):
        place = 0
        for phase, (name, n, mean, everywhere) in enumerate(PHASES):
            before = (phase - 1) % len(PHASES)
            ahead = phase == len(PHASES) - 1
            done[phase] = 0
            matmul = BY_NAME[name].family.name == "MATMUL"
            for k in range(n):
                wanted = ((k + 1) * _GROUPS - 1) // n
                groups = range(k * _GROUPS // n, wanted + 1)
                here = body[:, :, place]
                here[..., 0] = BY_NAME[name].opcode
                tile = (lane % 64 * 128, 128, (lane // 64 * n + k) % 16 * 256, 256)
                if name == "attention":
                    tile = (lane % workers * n + k, 1, 1, 0)
                for word, value in enumerate(tile[: len(BY_NAME[name].operands)]):
                    here[..., rec.OPERAND_WORD + word] = value
                here[..., rec.WAIT_WORD] = rec.counter_word(before * _GROUPS + wanted)
                for rank in range(ranks):
                    to = rec.ALL_RANKS if everywhere else rank
                    for nth, g in enumerate(groups):
                        signal = rec.counter_word(phase * _GROUPS + g, rank=to, next_layer=ahead)
                        here[rank, :, rec.SIGNAL_WORD + nth] = signal
                first = layer == 0 and phase == 0
                arrived = 0 if first else done[before, wanted][:, None] + _SIGNAL
                begin = np.maximum(clock + 200, arrived)
                last = loaded + rng.integers(0, 2000, clock.shape)
                last_load = np.maximum(last, begin - 12_000) + _LOAD
                begin = np.maximum(begin, last_load if matmul else begin)
                duration = (mean * 1000 * rng.uniform(0.85, 1.15, clock.shape)).astype(np.int64)
                if matmul:
                    duration = (duration * slow).astype(np.int64)
                end = begin + duration
                kept = np.maximum(end, stored) + _STORE
                common = (place, layer)
                if matmul:
                    parts.append((Role.LOADER, IntervalKind.PAGE_WAIT, *common, loaded, last_load - _LOAD))
                    parts.append((Role.LOADER, IntervalKind.LOAD, *common, last_load - _LOAD, last_load))
                if not first:
                    met = np.maximum(arrived, clock - 3000)
                    parts.append((Role.INPUT_LOADER, IntervalKind.COUNTER_WAIT, *common, np.minimum(clock, met), met))
                parts.append((Role.CONSUMER, IntervalKind.COMPUTE, *common, begin, end))
                parts.append((Role.STORER, IntervalKind.STORE, *common, kept - _STORE, kept))
                clock, stored = end, kept
                loaded = np.where(matmul, last_load, loaded)
                latest = kept.max(axis=1)
                for g in groups:
                    done[phase, g] = np.maximum(done[phase, g], latest.max() if everywhere else latest)
                place += 1
    return _node_trace(d, body, parts, ranks, workers, clock_error_s)


def _node_trace(
    d: Dims, body: np.ndarray, parts: list[tuple[object, ...]], ranks: int, workers: int, clock_error_s: float
) -> tuple[Program, Trace]:
    lanes, count = ranks * workers, body.shape[2]
    empty = Segment(np.zeros((0, rec.WORDS), np.int32), np.zeros(lanes + 1, np.int32))
    offsets = (np.arange(lanes + 1) * count).astype(np.int32)
    zeros = np.zeros((ranks, len(PHASES) * _GROUPS), dtype=np.int32)
    p = Program(
        dims=d,
        machine="h100",
        ranks=ranks,
        workers=workers,
        counters=zeros.shape[1],
        prologue=empty,
        body=Segment(body.reshape(-1, rec.WORDS), offsets),
        epilogue=empty,
        totals_first=zeros,
        totals_middle=zeros,
        totals_last=zeros,
    )
    intervals = np.zeros((len(parts), lanes), dtype=DTYPE)
    for row, (role, kind, place, layer, begin, end) in zip(intervals, parts, strict=True):
        row["role"], row["kind"], row["layer"], row["launch"] = role, kind, layer, 1
        row["begin"], row["end"] = np.ravel(begin), np.ravel(end)
        row["rank"], row["worker"] = np.divmod(np.arange(lanes), workers)
        row["instruction"] = offsets[:-1] + place
    flat = intervals.ravel()
    flat = flat[flat["end"] >= flat["begin"]]
    flat = flat[np.lexsort((flat["begin"], flat["worker"], flat["rank"]))]
    header = TraceHeader(p.hash, "simulator", 1e-9, read_s=0.0, clock_error_s=clock_error_s, dropped=0)
    return p, Trace(header, flat)
