"""Helpers for tests of the simulator: handmade work, costs that give simple times, and a check of all waits."""

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

import numpy as np
from atomic_steps import Item, Model, Table

from megakernel.isa import CONTROL, Operation, StepTable
from megakernel.isa.record import Records
from megakernel.program import SEGMENTS, Program
from megakernel.runtime import Chunk, SampleRow, build_step
from megakernel.scheduler.simulate.costs import TaskCosts
from megakernel.scheduler.simulate.native import EVERY_RANK, RECORD, SIGNAL, TASK, WAIT, Work, run
from megakernel.trace import EPILOGUE, PROLOGUE, IntervalKind, Intervals, Trace

# All rates and capacities are practically unlimited and all delays are 0, so that a test sets only what it measures.
_RATES = "vector_flops memory_bytes_per_s cache_bytes_per_s cache_bytes worker_bytes_per_s egress_bytes_per_s"
_RATES += " switch_bytes_per_s ring_bytes"
_SECONDS = "dispatch_s signal_s remote_signal_s launch_s"
FREE = TaskCosts(
    matmul_flops=((1.0, 1e30),),
    attention_flops=((1.0, 1e30),),
    **dict.fromkeys(_RATES.split(), 1e30) | dict.fromkeys(_SECONDS.split(), 0.0),  # type: ignore[arg-type]
    row_quantum=1,
    in_flight=2,
    claim_in_flight=2,
    roles=True,
)


@dataclass
class Task:
    """An instruction. `stores` maps ranks to bytes; `signals` are pairs of a rank (or EVERY_RANK) and a counter."""

    weights: float = 0.0
    reads: float = 0.0
    compute: float = 0.0
    stores: dict[int, float] = field(default_factory=dict)
    waits: Sequence[int] = ()
    signals: Sequence[tuple[int, int]] = ()
    weight_key: int = -1
    ask: float = 0.0  # seconds
    output: float = 0.0  # bytes of the ring that the output occupies until it is stored
    drain: int = 0  # if nonzero, the task runs a queue's records until so many are claimed


Stream = Sequence[Task]
Node = tuple[int, int]  # (layer or PROLOGUE or EPILOGUE, number of the record)


def hand_work(
    streams: Sequence[Stream], *, ranks: int = 1, counters: int = 4, keys: Sequence[float] = (), queue: Stream = ()
) -> Work:
    """Return work of one layer for the simulator. `streams` lists all streams of rank 0, then those of rank 1, etc.
    `keys` are the sizes of the cache entries in bytes. `queue` is the queue of rank 0."""
    tasks = [t for stream in [*streams, queue] for t in stream]
    offsets = np.cumsum([0, *map(len, streams)], dtype=np.int32)
    totals = np.zeros((ranks, counters), np.int32)
    for t in tasks:
        for to, counter in t.signals:
            totals[slice(None) if to == EVERY_RANK else to, counter] += 1

    waits = np.array([(c, i) for t in tasks for i, c in enumerate(t.waits)], WAIT)
    signals = np.array([(to, c, 0, 1) for t in tasks for to, c in t.signals], SIGNAL)
    table = np.zeros(len(tasks), TASK)
    named = {"weight_bytes": "weights", "read_bytes": "reads", "ask_s": "ask", "compute_s": "compute"}
    for name, attribute in (named | {"weight_key": "weight_key", "output_bytes": "output"}).items():
        table[name] = [getattr(t, attribute) for t in tasks]
    table["ring_bytes"] = table["weight_bytes"] + table["read_bytes"]
    table["read_key"] = table["write_key"] = table["split"] = -1
    for name in ("wait", "signal"):
        ends = np.cumsum([len(getattr(t, f"{name}s")) for t in tasks])
        table[f"end_{name}"], table[f"first_{name}"] = ends, np.append(0, ends[:-1])
    records = np.zeros(len(tasks), RECORD)
    records["phase"] = len(CONTROL) + 1  # any that computes
    records["number"] = records["first_task"] = np.arange(len(tasks))
    records["end_task"] = records["first_task"] + 1
    records["queue"] = [0 if t.drain else -1 for t in tasks]
    records["claims_end"] = [t.drain for t in tasks]
    empty = np.full(len(streams) + 1, len(tasks), np.int32)
    sizes = {"ranks": ranks, "workers": len(streams) // ranks, "layers": 1, "counters": counters, "queues": 1}
    queues = np.array([offsets[-1], *[len(tasks)] * ranks], np.int32)
    stores = np.array([[t.stores.get(r, 0.0) for r in range(ranks)] for t in tasks], np.float64).reshape(-1, ranks)
    return Work(
        sizes | {"splits": 1, "keys": max(len(keys), 1), "layered_keys": 0},
        [empty, offsets, empty, queues],
        [totals, totals, np.zeros_like(totals)],
        records,
        table,
        waits,
        signals,
        stores,
        np.tile(np.array(keys or [0.0], np.float64), (ranks, 1)),
    )


def hand_run(work: Work, **changes: float) -> tuple[ctypes.Structure, Intervals]:
    """Simulate `work` with the costs of FREE, except for those in `changes`."""
    return run(work, replace(FREE, **changes), 10_000)  # type: ignore[arg-type]


def by_node(intervals: Intervals) -> dict[Node, Intervals]:
    nodes, which = np.unique(intervals[["layer", "instruction"]], return_inverse=True)
    return {node: intervals[which == i] for i, node in enumerate(nodes.tolist())}


def ended(intervals: Intervals, number: int) -> float:
    return float(intervals["end"][intervals["instruction"] == number].max()) * 1e-9


@dataclass
class Ordered:
    """A task with the counters that it waits for. `adds` has pairs (counter, number added to it by the task)."""

    key: Node
    stream: int  # -1: the task is in a queue
    waits: tuple[int, ...]
    adds: list[tuple[int, int]]


def ordered(program: Program, table: StepTable) -> list[Ordered]:
    """Return the tasks of a step, in the order of their records. This code is independent of the simulator."""
    views = [table.rank(rank) for rank in range(program.ranks)]
    model = Model(program, Table([_items(view) for view in views], table.logit_rows.tolist()))
    out: list[Ordered] = []
    layers = program.dims.model.layers
    for layer, block, segment in [(PROLOGUE, 0, 0), *[(n, n, 1) for n in range(layers)], (EPILOGUE, layers, 2)]:
        records, ranks = program.numbered(segment)
        offsets = getattr(program, SEGMENTS[segment]).offsets
        streams = np.searchsorted(offsets, np.arange(len(records)), side="right") - 1
        streams[offsets[-1] :] = -1
        for number, (record, rank, stream) in enumerate(zip(records, ranks.tolist(), streams.tolist(), strict=True)):
            *items, last = model.steps(record, rank, block, block % layers)
            alike = None
            first = len(out)
            for item, step in zip(_of_slot(program, views[rank], record), items, strict=True):
                # Attention to a context may be split into parts, which signal only once in total: count the first part.
                adds = [(c, 0 if item.part else n) for c, n in step.adds]
                single = item.rows == 1 and item.parts == 1 and item.start >= 0
                rows = item.row // program.dims.bucket.row_block
                same = (rows, item.head, item.heads, item.start) if single else None
                if same and same == alike:
                    out[-1].adds = [(c, n + m) for (c, n), (_, m) in zip(out[-1].adds, adds, strict=True)]
                else:
                    out.append(Ordered((layer, number), stream, step.waits, adds))
                alike = same
            if len(out) > first:
                out[-1].adds += last.adds
            else:
                out.append(Ordered((layer, number), stream, last.waits, last.adds))
    return out


def held_up(program: Program, table: StepTable, start: Node) -> set[Node]:
    """Return all records that depend on the end of `start`, directly or indirectly. A record depends on the previous
    record of its stream, and on the records that signal the counters for which it waits."""
    after: dict[Node, Node] = {}
    signals: dict[Node, set[int]] = defaultdict(set)
    waiting: dict[int, set[Node]] = defaultdict(set)
    last: dict[int, Node] = {}
    for task in ordered(program, table):
        if last.get(task.stream, task.key) != task.key:
            after[last[task.stream]] = task.key
        last[task.stream] = task.key
        signals[task.key].update(counter for counter, _ in task.adds)
        for counter in task.waits:
            waiting[counter].add(task.key)
    found: set[Node] = set()
    todo = [start]
    while todo:
        at = todo.pop()
        then = {after[at]} if at in after else set()
        then = then.union(*(waiting[counter] for counter in signals[at])) - found
        todo += then
        found |= then
    return found


def _of_slot(program: Program, view: StepTable, record: Records) -> list[Item]:
    phase = program.forward.by_number[int(record[0])]
    if phase.operation is not Operation.ATTENTION:
        return []
    return _items(view).get(int(phase.columns(record[None])["slot"][0]), [])


def _items(view: StepTable) -> dict[int, list[Item]]:
    names = ("row", "rows", "kv_head", "kv_heads", "seq", "wait_block", "split", "block", "splits")
    columns = [getattr(view, f"item_{name}").tolist() for name in names]
    items = []
    for row, rows, head, heads, seq, wait, split, block, splits in zip(*columns, strict=True):
        start = wait * view.dims.bucket.row_block if seq >= 0 else -1
        items.append(Item(row, rows, head, heads, start, split, int(block > 0), max(splits, 1)))
    ends = view.slot_items.tolist()
    return {slot: items[a:b] for slot, (a, b) in enumerate(pairwise(ends))}


def step_of(program: Program) -> StepTable:
    """Return the table of a step that uses all token rows for which the program was compiled."""
    d = program.dims
    n = min(d.bucket.tokens, d.bucket.max_seqs)
    rows = [d.bucket.tokens // n + (i < d.bucket.tokens % n) for i in range(n)]
    start = d.bucket.max_context - max(rows) - 1
    pages = range(d.bucket.pages_per_seq)
    sample = [[SampleRow(0)] if i < d.bucket.logit_rows else [] for i in range(n)]
    return build_step(d, [Chunk(i, start, [0] * rows[i], pages, sample[i]) for i in range(n)])


def unmet_waits(program: Program, tasks: list[Ordered], trace: Trace) -> list[str]:
    """Return descriptions of all errors in a simulated trace. `tasks` is the result of `ordered`. There are three kinds
    of errors: a record runs the wrong number of tasks; it computes before the results for which it waits are stored; or
    the additions to a counter do not sum to its total. The check uses no code of the simulator."""
    rows = trace.intervals
    ran = by_node(rows[np.argsort(rows["end"], kind="stable")])
    arrived = np.zeros(program.total_counters * program.ranks, np.int64)
    latest: dict[int, int] = defaultdict(int)
    waits: list[tuple[int, int, str]] = []
    for key, group in groupby(tasks, key=lambda task: task.key):
        own = list(group)
        # A record computes and stores its items in order. A record that stores nothing ends when it has computed.
        mine = ran.get(key, rows[:0])
        computed, stored = (mine[mine["kind"] == kind] for kind in (IntervalKind.COMPUTE, IntervalKind.STORE))
        begins, ends = computed["begin"].tolist(), (stored if len(stored) else computed)["end"].tolist()
        if len(begins) != len(own) or len(ends) != len(own):
            return [f"record {key[1]} of layer {key[0]} ran {len(begins)} of {len(own)} tasks"]
        for task, begins_at, ends_at in zip(own, begins, ends, strict=True):
            waits += [(counter, begins_at, f"layer {key[0]} record {key[1]}") for counter in task.waits]
            for counter, count in task.adds:
                arrived[counter] += count
                latest[counter] = max(latest[counter], ends_at)
    wrong = [name for counter, begins_at, name in waits if latest[counter] > begins_at]
    return wrong + [f"counter {c}" for c in np.flatnonzero(arrived != program.totals().reshape(-1))]
