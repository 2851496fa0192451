"""What the simulator's tests need: work made by hand, costs that are easy to reckon with, and a check of every wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megakernel.isa import BY_NAME, StepTable
from megakernel.isa import record as rec
from megakernel.program import Program
from megakernel.scheduler.simulate.costs import Costs
from megakernel.scheduler.simulate.native import EVERY_RANK, RECORD, SIGNAL, TASK, WAIT, Result, Work, run
from megakernel.trace import EPILOGUE, PROLOGUE, IntervalKind, Intervals, Trace

# Everything free, and as fast as can be.
FREE = Costs(
    matmul_flops=((1.0, 1e30),),
    attention_flops=((1.0, 1e30),),
    row_quantum=1,
    vector_flops=1e30,
    memory_bytes_per_s=1e30,
    cache_bytes_per_s=1e30,
    cache_bytes=1e30,
    worker_bytes_per_s=1e30,
    egress_bytes_per_s=1e30,
    switch_bytes_per_s=1e30,
    latency_s=0.0,
    store_s=0.0,
    dispatch_s=0.0,
    claim_s=0.0,
    signal_s=0.0,
    remote_signal_s=0.0,
    launch_s=0.0,
    ring_bytes=1e30,
    stage_bytes=0.0,
    in_flight=2,
    claim_in_flight=2,
    roles=True,
)


@dataclass
class Task:
    """One instruction. `stores`: bytes by rank. `signals`: (rank or EVERY_RANK, counter)."""

    weights: float = 0.0
    reads: float = 0.0
    compute: float = 0.0
    stores: dict[int, float] = field(default_factory=dict)
    waits: Sequence[int] = ()
    signals: Sequence[tuple[int, int]] = ()
    weight_key: int = -1
    output: float = 0.0  # bytes of the ring
    drain: int = 0  # claims so many of the queue


Stream = Sequence[Task]


def hand_work(
    streams: Sequence[Stream], *, ranks: int = 1, counters: int = 4, keys: Sequence[float] = (), queue: Stream = ()
) -> Work:
    """One layer of these streams, rank by rank; `keys` are the sizes of cache pieces, `queue` is rank 0's."""
    tasks = [t for stream in [*streams, queue] for t in stream]
    cuts = np.cumsum([0, *map(len, streams)])
    offsets = (cuts, np.array([cuts[-1], len(tasks)]))
    totals = np.zeros((ranks, counters), np.int32)
    for t in tasks:
        for to, counter in t.signals:
            totals[slice(None) if to == EVERY_RANK else to, counter] += 1

    def ints(values: Sequence[int]) -> np.ndarray:
        return np.array(values, np.int32)

    waits = np.array([(c, i) for t in tasks for i, c in enumerate(t.waits)], WAIT)
    signals = np.array([(to, c, 0, 1) for t in tasks for to, c in t.signals], SIGNAL)
    table = np.zeros(len(tasks), TASK)
    for name, attribute in (("weight_bytes", "weights"), ("read_bytes", "reads"), ("compute_s", "compute")):
        table[name] = [getattr(t, attribute) for t in tasks]
    table["output_bytes"] = [t.output for t in tasks]
    table["ring_bytes"] = table["weight_bytes"] + table["read_bytes"]
    table["weight_key"] = [t.weight_key for t in tasks]
    table["read_key"] = table["write_key"] = table["split"] = -1
    for name in ("wait", "signal"):
        ends = np.cumsum([len(getattr(t, f"{name}s")) for t in tasks])
        table[f"end_{name}"], table[f"first_{name}"] = ends, np.append(0, ends[:-1])
    records = np.zeros(len(tasks), RECORD)
    records["opcode"] = BY_NAME["qkv_rope"].opcode
    records["number"] = records["first_task"] = np.arange(len(tasks))
    records["end_task"] = records["first_task"] + 1
    records["queue"] = [0 if t.drain else -1 for t in tasks]
    records["claims_end"] = [t.drain for t in tasks]
    empty = np.full(len(streams) + 1, len(tasks), np.int32)
    return Work(
        ranks=ranks,
        workers=len(streams) // ranks,
        layers=1,
        counters=counters,
        queues=1,
        splits=1,
        keys=max(len(keys), 1),
        layered_keys=0,
        prologue=empty,
        body=ints(offsets[0]),
        epilogue=empty,
        queue_records=ints([*offsets[1], *[len(tasks)] * (ranks - 1)]),
        totals_first=totals,
        totals_middle=totals,
        totals_last=np.zeros_like(totals),
        records=records,
        tasks=table,
        stores=np.array([[t.stores.get(r, 0.0) for r in range(ranks)] for t in tasks], np.float64).reshape(-1, ranks),
        waits=waits,
        signals=signals,
        key_bytes=np.tile(np.array(keys or [0.0], np.float64), (ranks, 1)),
        compute_bound=np.ones(64, np.uint8),
    )


def hand_run(work: Work, **changes: float) -> tuple[Result, Intervals]:
    """Simulate at FREE's costs but for `changes`."""
    return run(work, replace(FREE, **changes), (-1, -1, -1, 0.0), 10_000)  # type: ignore[arg-type]


def ended(intervals: Intervals, number: int) -> float:
    """When a record's last interval ended, in seconds."""
    return float(intervals["end"][intervals["instruction"] == number].max()) * 1e-9


def unmet_waits(program: Program, table: StepTable, trace: Trace) -> list[str]:
    """Consumers that begin to compute before all that the program makes them wait for is stored, and counters whose
    arrivals are not their totals. Shares nothing with the simulator but the trace."""
    rows = trace.intervals
    begin, end, stored = defaultdict(list), defaultdict(list), defaultdict(list)
    for row in rows[np.argsort(rows["end"], kind="stable")]:
        key = (int(row["layer"]), int(row["instruction"]))
        if row["kind"] == IntervalKind.COMPUTE:
            begin[key].append(int(row["begin"]))
            end[key].append(int(row["end"]))
        elif row["kind"] == IntervalKind.STORE:
            stored[key].append(int(row["end"]))
    arrived: dict[tuple[int, int, int], int] = defaultdict(int)
    latest: dict[tuple[int, int, int], int] = defaultdict(int)
    waits: list[tuple[tuple[int, int, int], int, str]] = []
    for layer, block, segment in _runs(program):
        records, ranks = program.numbered(segment)
        for number, (words, rank) in enumerate(zip(records.tolist(), ranks.tolist(), strict=True)):
            key = (layer, number)
            tasks = _tasks(program, table, words, rank)
            # Items are computed and stored in order; what stores nothing ends with its arithmetic.
            begins, ends = begin[key], stored[key] or end[key]
            if len(begins) != len(tasks) or len(ends) != len(tasks):
                return [f"record {number} of layer {layer} ran {len(begins)} of {len(tasks)} tasks"]
            for task, (items, arrivals) in enumerate(tasks):
                for counter in items:
                    waits.append(((block, rank, counter), begins[task], f"layer {layer} record {number}"))
                for to, ahead, counter, count in arrivals:
                    at = (block + ahead, to, counter)
                    arrived[at] += count
                    latest[at] = max(latest[at], ends[task])
    wrong = [name for at, begins_at, name in waits if latest[at] > begins_at]
    totals = program.totals()
    got = np.zeros_like(totals)
    for (block, rank, counter), count in arrived.items():
        got[block, rank, counter] += count
    return wrong + [f"counter {c} of block {b}, rank {r}" for b, r, c in np.argwhere(got != totals)]


def _runs(program: Program) -> list[tuple[int, int, int]]:
    layers = program.dims.layers
    return [(PROLOGUE, 0, 0), *[(layer, layer, 1) for layer in range(layers)], (EPILOGUE, layers, 2)]


Arrivals = list[tuple[int, int, int, int]]


def _tasks(program: Program, table: StepTable, words: list[int], rank: int) -> list[tuple[list[int], Arrivals]]:
    """Of each task of a record: the counters it waits for, and (rank, next block, counter, arrivals)."""
    view, name = table.rank(rank), rec.opcode(np.array(words))
    d = view.dims
    wait_words = [w for w in words[rec.WAIT_WORD : rec.WAIT_WORD + rec.WAITS] if w]
    plain = [(w & rec.COUNTER_MASK) - 1 for w in wait_words if not w & rec.INDEXED]
    signals: Arrivals = []
    for w in words[rec.SIGNAL_WORD : rec.SIGNAL_WORD + rec.SIGNALS]:
        if w and not w & rec.INDEXED:
            to = w >> rec.RANK_SHIFT & rec.RANK_MASK
            for r in range(program.ranks) if to == rec.ALL_RANKS else [to]:
                signals.append((r, int(w & rec.NEXT != 0), (w & rec.COUNTER_MASK) - 1, 1))
    if name == BY_NAME["final_norm"].opcode:
        row, rows = words[rec.OPERAND_WORD : rec.OPERAND_WORD + 2]
        blocks = {int(r) // d.row_block for r in view.logit_rows[row : row + rows] if r >= 0}
        mine = [b for b in blocks if d.one_hop or b % d.tp == rank]
        return [
            (plain + [(w & rec.COUNTER_MASK) - 1 + b for w in wait_words if w & rec.INDEXED for b in mine], signals)
        ]
    if name != BY_NAME["attention"].opcode:
        return [(plain, signals)]
    slot, group_heads, groups = words[rec.OPERAND_WORD : rec.OPERAND_WORD + 3]
    out: list[tuple[list[int], Arrivals]] = []
    before = None
    grid = (words[rec.WAIT_WORD] & rec.COUNTER_MASK) - 1
    word = words[rec.SIGNAL_WORD]
    for i in range(int(view.slot_items[slot]), int(view.slot_items[slot + 1])):
        block, heads = int(view.item_wait_block[i]), int(view.item_kv_heads[i])
        first = int(view.item_kv_head[i])
        members = {
            grid + b * groups + h // group_heads
            for b in range(block, block + int(view.item_wait_blocks[i]))
            for h in range(first, first + heads)
        }
        single = view.item_rows[i] == 1 and view.item_split[i] < 0 and view.item_seq[i] >= 0
        own, to = int(view.item_row[i]) // d.row_block, word >> rec.RANK_SHIFT & rec.RANK_MASK
        ranks = (
            range(d.tp)
            if to == rec.ALL_RANKS or (to == rec.OWNER and d.one_hop)
            else [own % d.tp if to == rec.OWNER else to]
        )
        # A split's arrivals count once; here with its first part.
        whole = view.item_split[i] < 0 or view.item_block[i] == 0
        count = int(view.item_rows[i]) * heads if whole else 0
        counter = (word & rec.COUNTER_MASK) - 1 + own
        alike = (own, first, heads, block, int(view.item_wait_blocks[i])) if single else None
        if alike and alike == before:
            out[-1][1][:] = [(r, ahead, c, n + count) for r, ahead, c, n in out[-1][1]]
            continue
        before = alike
        out.append((plain + sorted(members), [(r, int(word & rec.NEXT != 0), counter, count) for r in ranks]))
    if not out:
        return [(plain, signals)]
    out[-1][1].extend(signals)
    return out
