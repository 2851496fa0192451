"""Prepares the simulator's input: the waits, signals, loads, arithmetic and stores of each task of a program.

A task is an instruction or, in attention, one or several consecutive attention items (see `_starts_task`). Items are
the pieces of work that the step table assigns to an instruction. The simulated cache of each device holds entries with
integer keys: a weight tile, one KV head of a sequence in one layer, or a row block of an activation buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import (
    BUFFERS,
    DRAIN,
    Buffer,
    Dims,
    Kind,
    Operation,
    Phase,
    Result,
    Rows,
    StepTable,
    Units,
    accesses,
    cost,
    itemsize,
)
from megakernel.isa import record as rec
from megakernel.isa.access import Columns, by_rank
from megakernel.isa.operations.attention import item_work, read_blocks
from megakernel.isa.ragged import ragged
from megakernel.isa.record import Records
from megakernel.machine import Path
from megakernel.program import SEGMENTS, Program
from megakernel.scheduler.simulate.costs import TaskCosts
from megakernel.scheduler.simulate.native import EVERY_RANK, RECORD, SIGNAL, TASK, WAIT, Floats, Int32s, Work
from megakernel.targets.hopper import loads
from megakernel.targets.issue import matmul_issue, sample_steps
from megakernel.targets.launch import PAGE_BYTES
from megakernel.targets.pages import STEP_PAGES, attention_pages, computed_rows, matmul_pages, one_row, tile_work

Ints = NDArray[np.int64]
_Items = tuple[Ints, Ints, Ints]  # per attention item: its task, its index in the step table, its record's index
Column = NDArray[np.integer[Any]]


class _Tasks:
    """A table of the simulator's tasks, with their waits, signals and stores, which is filled in phase by phase."""

    def __init__(self, count: int, ranks: int) -> None:
        self.waits: list[Ints] = []
        self._signals: list[Ints] = []
        self.table = np.zeros(count, dtype=TASK)
        for name in ("weight_key", "read_key", "write_key", "split"):
            self.table[name] = -1
        self.stores = np.zeros((count, ranks))

    def set(self, tasks: Ints, **columns: NDArray[np.number[Any]] | float) -> None:
        for name, values in columns.items():
            self.table[name][tasks] = values

    def wait(self, task: Ints, counter: Column, slot: Column | np.integer[Any] | int) -> None:
        self.waits.append(np.stack(np.broadcast_arrays(task, counter, slot), axis=1))

    def signal(
        self, task: Ints, rank: Column, counter: Column, following: NDArray[np.bool_], arrivals: Column | int
    ) -> None:
        """Let tasks signal counters of a rank or of EVERY_RANK. Where `following` is True, the counters are those of
        the next layer."""
        self._signals.append(np.stack(np.broadcast_arrays(task, rank, counter, following, arrivals), axis=1))

    def words(self) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """Return all waits and all signals, sorted by task. Store in the table where each task's waits and signals
        begin and end."""
        return self._sorted("wait", self.waits, WAIT), self._sorted("signal", self._signals, SIGNAL)

    def _sorted(self, what: str, rows: list[Ints], dtype: np.dtype[np.void]) -> NDArray[np.void]:
        names = dtype.names or ()
        table = np.concatenate([*rows, np.zeros((0, len(names) + 1), np.int64)])
        table = table[np.argsort(table[:, 0], kind="stable")]
        ends = np.cumsum(np.bincount(table[:, 0], minlength=len(self.table)))
        self.table[f"end_{what}"], self.table[f"first_{what}"] = ends, np.append(0, ends[:-1])
        out = np.zeros(len(table), dtype=dtype)
        for i, name in enumerate(names):
            out[name] = table[:, i + 1]
        return out


def make_work(program: Program, table: StepTable, costs: TaskCosts) -> Work:
    """Return one step of `program` as the simulator's input. `table` has the step's inputs, the same on all ranks."""
    records, ranks, number, offsets = _records(program)
    numbers = rec.phase_number(records)
    views = [table.rank(rank) for rank in range(program.ranks)]
    # Handle all instructions (records) of a phase at once, on all ranks whose shards have the same sizes. `alike` has,
    # for each record, the first of these ranks. Attention is handled rank by rank, as its work differs between ranks.
    parts = [view.dims.split.parts for view in views]
    alike = np.array([parts.index(sizes) for sizes in parts])[ranks]
    groups = []
    for phase in program.forward:
        kind = ranks if phase.operation is Operation.ATTENTION else alike
        found = (np.flatnonzero((numbers == phase.number) & (kind == rank)) for rank in range(program.ranks))
        groups += [(phase, view, chosen) for view, chosen in zip(views, found, strict=True) if len(chosen)]
    per_record = np.ones(len(records), dtype=np.int64)
    for phase, view, chosen in groups:
        if phase.operation is Operation.ATTENTION:
            started = np.concatenate([[0], np.cumsum(_starts_task(view))])
            slot = phase.columns(records[chosen])["slot"]
            per_record[chosen] = np.maximum(1, np.diff(started[view.slot_items])[slot])
    first_task = np.concatenate([[0], np.cumsum(per_record)])
    tasks = _Tasks(int(first_task[-1]), program.ranks)
    keys = _Keys(program, views, records, numbers)
    _words(tasks, records, first_task)
    for phase, view, chosen in groups:
        mine, first = records[chosen], first_task[chosen]
        if phase.operation is Operation.ATTENTION:
            items = _items(phase, mine, first, view)
            if len(items[0]):
                _attention(tasks, keys, phase, mine, items, view, costs)
                _item_words(tasks, phase, mine, items, view)
        else:
            _plain(tasks, keys, phase, (mine, first, ranks[chosen]), view.dims, costs, program.workers)
        if phase.operation is Operation.NORM and phase.rows is Rows.LOGIT:
            _logit_waits(tasks, phase, mine, first, ranks[chosen], view)
    drain = numbers == DRAIN.number
    table_of_records = np.zeros(len(records), dtype=RECORD)
    table_of_records["number"], table_of_records["phase"] = number, numbers
    table_of_records["first_task"], table_of_records["end_task"] = first_task[:-1], first_task[1:]
    for name, operand in (("queue", "queue"), ("claims_end", "end")):
        table_of_records[name] = np.where(drain, DRAIN.columns(records)[operand], -1)
    if not costs.synchronised:
        tasks.waits.clear()
    waits, signals = tasks.words()
    sizes = {"ranks": program.ranks, "workers": program.workers, "layers": program.dims.model.layers}
    sizes |= {"counters": program.counters, "queues": program.rank_queues, "splits": program.dims.bucket.items}
    sizes |= {"keys": keys.count, "layered_keys": keys.layered}
    totals = program.native_arrays()["totals"]
    return Work(sizes, offsets, totals, table_of_records, tasks.table, waits, signals, tasks.stores, keys.bytes)


def _records(program: Program) -> tuple[Records, Ints, Int32s, list[Int32s]]:
    """Return the records (instructions) of all workers and queues; the rank of each record; the number of each record
    in a trace; and the offsets at which each worker's records begin in each segment, and each queue's records."""
    records, segment, ranks = program.every
    starts = np.searchsorted(segment, np.arange(len(SEGMENTS)))
    begins = *starts, starts[1] + len(program.body.records)
    each = zip(program.native_arrays()["offsets"], begins, strict=True)
    offsets = [(offsets + begin).astype(np.int32) for offsets, begin in each]
    return records, ranks, (np.arange(len(records)) - starts[segment]).astype(np.int32), offsets


class _Keys:
    """Assigns integer keys to the entries of a device's cache, the same on all ranks: weight tiles, keys and values,
    and row blocks of activations. `bytes` [ranks, keys] has the sizes of the entries."""

    def __init__(self, program: Program, views: list[StepTable], records: Records, numbers: Int32s) -> None:
        dims = program.dims
        # phase number -> (the cache key of its first weight tile, the first column of each tile); keys are consecutive
        self._weights: dict[int, tuple[int, Int32s]] = {}
        count = 0
        for phase in (p for p in program.forward if p.is_matmul):
            cols = np.unique(phase.columns(records[numbers == phase.number])["col"])
            self._weights[phase.number] = count, cols
            count += len(cols)
        self._kv, self._heads = count, max(view.dims.split.rank_kv_heads for view in views)
        count += dims.bucket.max_seqs * self._heads
        self.layered = self._blocks = count
        self._row_block = dims.bucket.row_block
        self._row_blocks = max(dims.bucket.row_blocks, -(-dims.bucket.logit_rows // self._row_block))
        self.count = count + len(BUFFERS) * self._row_blocks
        self.bytes = np.zeros((program.ranks, self.count))

    def weight(self, phase: Phase, col: Int32s) -> Ints:
        first, cols = self._weights[phase.number]
        return first + np.searchsorted(cols, col)

    def kv(self, sequence: Ints, head: Ints) -> Ints:
        return self._kv + sequence * self._heads + head

    def rows(self, buffer: Buffer, row: Int32s) -> Ints:
        return self._blocks + int(buffer) * self._row_blocks + row.astype(np.int64) // self._row_block

    def at_least(self, rank: Ints | int, key: Ints, size: NDArray[np.floating]) -> None:
        np.maximum.at(self.bytes.reshape(-1), rank * self.count + key, size)


def _plain(
    tasks: _Tasks,
    keys: _Keys,
    phase: Phase,
    mine: tuple[Records, Ints, Ints],
    dims: Dims,
    costs: TaskCosts,
    workers: int,
) -> None:
    """Set the loads and the arithmetic of the tasks of one phase other than attention. `mine` has each task's record,
    number and rank. All these ranks have the shard sizes in `dims`, and `workers` workers each."""
    records, task, rank = mine
    columns = phase.columns(records)
    rows = columns["rows"].astype(np.float64)
    work, loaded = cost(phase, columns, dims), loads(phase, columns, dims)
    weights, read = loaded.weights, loaded.read
    if phase.is_matmul:
        weight_key = keys.weight(phase, columns["col"])
        keys.at_least(rank, weight_key, weights)
        tasks.set(task, weight_key=weight_key)
    _activations(tasks, keys, phase, columns, (task, rank, loaded.regions), dims)
    matrix_s, idle_s = costs.seconds(costs.matmul_flops, work.matrix_flops, rows), np.zeros(len(task))
    if phase.is_matmul and dims.worker.ring_pages:
        matrix_s, idle_s = _paged(tasks, task, phase, columns, dims, costs, workers)
    elif dims.worker.ring_pages:
        # Each weight of a router or expert counts as loaded by one instruction only, so it needs no cache entry. It is
        # not loaded ahead, because the warps that compute load all data themselves.
        matrix_s = work.matrix_flops / costs.vector_flops  # of routers and experts, which are dot products
        if costs.paths and phase.operation is Operation.SAMPLE:
            # Each warp loads the next group of logits while it processes one, so the slower of the two counts.
            slowest_s = max(costs.paths["sample_step"].warm, costs.latency_s)
            matrix_s = rows * (costs.latency_s + sample_steps(dims) * slowest_s)
    else:
        tasks.set(task, ring_bytes=weights)
    if costs.paths and costs.fixed:
        tasks.set(task, **fixed_s(phase, dims, costs.paths, costs.latency_s))
    # The times add up, because a matmul that normalises its inputs does so before its matrix work.
    compute_s = matrix_s + work.vector_flops / costs.vector_flops
    # `stage` bytes must arrive before arithmetic can start. For dot products, these are two pages of weights.
    stage = 2 * PAGE_BYTES if dims.worker.units == Units.DOTS else costs.stage_bytes
    tail_s = compute_s * np.minimum(1.0, stage / np.maximum(weights + read, 1))
    tasks.set(task, weight_bytes=weights, read_bytes=read, compute_s=compute_s, tail_s=tail_s + idle_s)


def _activations(
    tasks: _Tasks, keys: _Keys, phase: Phase, columns: Columns, mine: tuple[Ints, Ints, Floats], dims: Dims
) -> None:
    """Set how many bytes tasks store on each rank, and which entries of the simulated L2 cache they read and write. An
    entry is a row block of a buffer; only the first buffer that the phase reads and the first that it writes have
    entries. `mine` has three arrays with one element per task: its number, its rank, and the bytes that it reads.
    """
    task, rank, regions = mine
    reads: list[Buffer] = []
    writes: list[Buffer] = []
    for access in accesses(phase, columns, dims):
        if access.kind is not Kind.WRITE:
            reads.append(access.buffer)
        if access.kind is not Kind.READ:
            writes.append(access.buffer)
            tasks.stores[task] += by_rank(access.rank, access.size(columns["rows"], dims), rank, dims.split.tp)
    if reads:
        tasks_per_block = np.maximum(dims.bucket.row_block / np.maximum(columns["rows"], 1), 1)
        key = keys.rows(reads[0], columns["row"])
        keys.at_least(rank, key, regions * tasks_per_block)
        tasks.set(task, read_key=key)
    if writes:
        key = keys.rows(writes[0], columns["row"])
        for to in np.flatnonzero(tasks.stores[task].any(axis=0)).tolist():
            keys.at_least(to, key, tasks.stores[task, to])
        tasks.set(task, write_key=key)


def _paged(
    tasks: _Tasks, task: Ints, phase: Phase, columns: Columns, dims: Dims, costs: TaskCosts, workers: int
) -> tuple[Floats, Floats]:
    """Set the bytes of shared memory that matmul tasks load into. Return the seconds of their arithmetic, and the
    seconds in which they load nothing."""
    taken = matmul_pages(phase, columns["rows"], columns["cols"], dims)
    rows, cols = columns["rows"].astype(np.int64), columns["cols"].astype(np.int64)
    loaders_s = consumers_s = np.zeros(len(task))
    if costs.paths:
        roles = matmul_issue(phase, columns["rows"], columns["cols"], dims, costs.paths)
        loaders_s, consumers_s = roles.loaders, roles.consumers
        tasks.set(task, ask_s=loaders_s)
    if dims.worker.units == Units.DOTS:
        # Weights may need more pages than an SM's shared memory has. They are then loaded in several laps, and every
        # lap loads all inputs again.
        held = taken.held_inputs
        tasks.set(task, ring_bytes=PAGE_BYTES * taken.weights, held_bytes=PAGE_BYTES * held)
        weights = phase.inner(dims.split) * phase.matrices(dims.split) * cols
        computing_s = np.maximum((2 * rows * weights).astype(np.float64) / costs.vector_flops, consumers_s)
        # Each lap first loads all inputs again. The last page of inputs replaces an input page of the previous lap. So
        # its load starts only when the previous lap has been computed, and no other load is in progress then.
        laps = taken.inputs / np.maximum(held, 1)
        asking_s = held * costs.paths["input_page"].warm if costs.paths else 0.0
        again, of_lap = np.maximum(laps - 1, 0), computing_s / np.maximum(laps, 1)
        idle_s = again * (asking_s + costs.latency_s)
        return computing_s + idle_s, idle_s + again * of_lap
    # A tile's last results wait in the ring's pages to be stored, so the next instruction loads into other pages.
    tasks.set(task, ring_bytes=PAGE_BYTES * STEP_PAGES * taken.inputs, output_bytes=PAGE_BYTES * taken.last)
    flops, loaded = tile_work(phase, rows, cols, dims)
    computed = computed_rows(rows).astype(np.float64)
    matrix_s = costs.seconds(costs.matmul_flops, flops.astype(np.float64), computed)
    # Between two k steps, both warpgroups do other work at the same time, so the matrix units are idle then.
    computing_s = matrix_s + consumers_s
    arriving_s = loaded / (costs.cache_bytes_per_s / workers)
    return np.maximum(in_turn_s(computing_s, arriving_s, costs.ahead_steps), loaders_s), np.zeros(len(task))


def in_turn_s(one: Floats, other: Floats, steps: float) -> Floats:
    """Return the seconds of a pipeline of two stages, which alone take `one` and `other` seconds. Each stage may be up
    to `steps` steps of work ahead of the other stage.

    A stage needs a random time for each step (exponentially distributed, as for memory that others use too). So a
    stage is sometimes idle because the other is late: the throughput is that of a closed queue of two such stages.
    """
    slow, fast = np.maximum(one, other), np.minimum(one, other)
    part = np.clip(fast / np.maximum(slow, 1e-30), 0.0, 1 - 1e-9)
    seconds: Floats = slow * (1 - part ** (steps + 1)) / (1 - part**steps)
    return seconds


_ENDS = {
    Result.HEADS: "end_heads",
    Result.RESIDUAL: "end_residual",
    Result.STORED: "end_residual",
    Result.GATED: "end_gated",
    Result.GELU_GATED: "end_gated",
    Result.LOGITS: "end_logits",
}


def fixed_s(phase: Phase, dims: Dims, paths: dict[str, Path], latency_s: float) -> dict[str, float]:
    """Return the seconds that an instruction takes before its waits (`prepare_s`), from the end of its waits to its
    first page (`start_s`), and from its last page to its end (`end_s`), and a bit for each that says whether it makes
    accesses to L2 (`accessing`). `latency_s` is the latency of a load."""
    normed, start, end = phase.norm is not None, Path(0.0, 0.0), paths["other"]
    prepare = paths["prepare"] if normed or one_row(dims) else start
    if phase.operation is Operation.ATTENTION:
        start, end = paths["attention_start"], paths["attention_end"]
    elif phase.is_matmul and dims.worker.units == Units.TENSOR:
        start, end = paths["tile_start"], paths["tile_end"]
    elif phase.is_matmul:
        start, end = paths["start_normed" if normed else "start"], paths[_ENDS.get(phase.result, "end_partial")]
        cold = start.cold if normed else max(start.cold, paths["input"].cold + latency_s)
        # The first pair of pages takes longer, because its code is not cached yet. Only the end of the last unit of
        # columns is counted here. The other ends overlap the loads of the next unit, and `matmul_issue` counts them.
        start = start._replace(cold=cold + paths["dots"].cold - paths["dots"].warm)
    accessing = sum(path.accesses << bit for bit, path in enumerate((prepare, start, end)))
    return {"prepare_s": prepare.cold, "start_s": start.cold, "end_s": end.cold, "accessing": accessing}


def _attention(
    tasks: _Tasks, keys: _Keys, phase: Phase, records: Records, items: _Items, view: StepTable, costs: TaskCosts
) -> None:
    """Set the loads, arithmetic and stores of one rank's attention tasks. Tasks that read the same K and V of a
    sequence share a cache entry, so that the data come from memory only once."""
    dims = view.dims
    task, item, _ = items
    items_of = np.bincount(task - task[0])[task - task[0]]
    row, rows = view.item_row[item].astype(np.int64), view.item_rows[item].astype(np.int64)
    heads, sequence = view.item_kv_heads[item].astype(np.int64), view.item_seq[item].astype(np.int64)
    live = sequence >= 0
    flops, kv_bytes = (amount[item] for amount in item_work(view))
    pairs = (rows * dims.model.group_size).astype(np.float64)  # of a query row and a query head
    compute_s = costs.seconds(costs.attention_flops, flops, pairs)
    # `size` has the bytes of the queries of each item. The item's output has the same size.
    per_head = dims.model.group_size * dims.model.head_dim * itemsize(dims.model)
    size: Floats = (rows * heads).astype(np.float64) * per_head
    whole = live & (view.item_split[item] < 0)
    shared = whole & (items_of == 1)
    key = np.where(shared, keys.kv(np.maximum(sequence, 0), view.item_kv_head[item].astype(np.int64)), -1)
    keys.at_least(dims.split.rank, key[shared], kv_bytes[shared])
    access = next(a for a in accesses(phase, phase.columns(records[:1]), dims) if a.kind is Kind.WRITE)
    owner = access.rank if access.rank is not None else dims.owner(row).astype(np.int32)
    out_key = keys.rows(access.buffer, view.item_row[item])
    for to, part in enumerate(by_rank(owner, size, dims.split.rank, dims.split.tp).T):
        np.add.at(tasks.stores[:, to], task, part)
        keys.bytes[to] = np.maximum(keys.bytes[to], np.bincount(out_key, weights=part, minlength=keys.count))
    ring = np.zeros(len(item))
    if dims.worker.ring_pages:
        share = PAGE_BYTES / dims.model.layers  # the mean over layers, whose spans may differ
        for span, layers in dims.model.spans.items():
            blocks = read_blocks(view, span)[item]
            ring += share * layers * attention_pages(view.item_rows[item], view.item_kv_heads[item], blocks, dims)
    for name, part in (("read_bytes", kv_bytes + size * live), ("ring_bytes", ring), ("compute_s", compute_s)):
        np.add.at(tasks.table[name], task, part)
    if costs.paths and costs.fixed:
        tasks.set(task, **fixed_s(phase, dims, costs.paths, costs.latency_s))
    tasks.set(
        task,
        read_key=key,
        write_key=out_key,
        split=view.item_split[item],
        parts=np.maximum(view.item_splits[item], 1),
        tail_s=tasks.table["compute_s"][task]
        * np.minimum(1.0, costs.stage_bytes / np.maximum(tasks.table["read_bytes"][task], 1)),
    )


def _items(phase: Phase, records: Records, first: Ints, view: StepTable) -> _Items:
    """Return the attention items that the step table assigns to `records`. `first` has each record's first task."""
    slot = phase.columns(records)["slot"]
    begin, count = view.slot_items[slot].astype(np.int64), np.diff(view.slot_items)[slot].astype(np.int64)
    record, nth = ragged(count)
    item = begin[record] + nth
    started = np.cumsum(_starts_task(view))
    return first[record] + started[item] - started[begin[record]], item, record


def _starts_task(view: StepTable) -> NDArray[np.bool_]:
    """Return, for each attention item, whether it begins a new task of the simulator. An item continues the previous
    item's task if each of the two has a single row, with its whole context. They must also have the same row block, KV
    heads and counters to wait for."""
    single = (view.item_rows == 1) & (view.item_split < 0) & (view.item_seq >= 0)
    same = single[1:] & single[:-1]
    own = view.item_row // view.dims.bucket.row_block
    for column in (own, view.item_kv_head, view.item_kv_heads, view.item_wait_block, view.item_wait_blocks):
        same &= column[1:] == column[:-1]
    starts = np.concatenate([[True], ~same])
    starts[view.slot_items[:-1][view.slot_items[:-1] < len(starts)]] = True
    return starts


def _words(tasks: _Tasks, records: Records, first_task: Ints) -> None:
    """Add the waits and signals whose counters do not depend on the step's inputs. If an instruction has several tasks,
    all its tasks wait, and its last task signals."""
    waits, signals = rec.waits(records), rec.signals(records)
    record, slot = np.nonzero((waits != 0) & (waits & rec.INDEXED == 0))
    of, nth = ragged(np.diff(first_task)[record])
    tasks.wait(first_task[record][of] + nth, rec.word_counter(waits[record, slot])[of], slot[of])

    record, slot = np.nonzero((signals != 0) & (signals & rec.INDEXED == 0))
    word = signals[record, slot]
    to = rec.word_rank(word)
    to = np.where(to == rec.ALL_RANKS, EVERY_RANK, to)
    tasks.signal(first_task[record + 1] - 1, to, rec.word_counter(word), word & rec.NEXT != 0, 1)


def _item_words(tasks: _Tasks, phase: Phase, records: Records, items: _Items, view: StepTable) -> None:
    """Add the waits and signals of attention. A record names grids of counters, and each item selects some of them."""
    dims = view.dims
    task, item, record = items
    columns = phase.columns(records)
    wait, signal = records[record, rec.WAIT_WORD], records[record, rec.SIGNAL_WORD]
    groups, group_heads = columns["groups"][record], columns["group_heads"][record]
    head, heads = view.item_kv_head[item], view.item_kv_heads[item]
    group = head // group_heads
    wide = (head + heads - 1) // group_heads - group + 1
    members = view.item_wait_blocks[item] * wide
    of, nth = ragged(members)
    block = view.item_wait_block[item][of] + nth // wide[of]
    counter = rec.word_counter(wait)[of] + block * groups[of] + group[of] + nth % wide[of]
    leads = np.append(True, task[1:] != task[:-1])
    some = (wait & rec.INDEXED != 0)[of] & leads[of]
    tasks.wait(task[of][some], counter[some], 0)

    row = view.item_row[item]
    to = rec.word_rank(signal)
    owner = np.full_like(row, EVERY_RANK) if dims.split.replicated_residual else dims.owner(row)
    to = np.where(to == rec.OWNER, owner, np.where(to == rec.ALL_RANKS, EVERY_RANK, to))
    counter = rec.word_counter(signal) + row // dims.bucket.row_block
    arrivals = np.bincount(task - task[0], weights=view.item_rows[item] * heads).astype(np.int64)[task - task[0]]
    some = (signal & rec.INDEXED != 0) & leads
    tasks.signal(task[some], to[some], counter[some], (signal & rec.NEXT != 0)[some], arrivals[some])


def _logit_waits(tasks: _Tasks, phase: Phase, records: Records, first: Ints, rank: Ints, view: StepTable) -> None:
    """Let each record of the norm before the logits wait for the row blocks of all rows that it normalises."""
    dims = view.dims
    columns = phase.columns(records)
    record, nth = ragged(columns["rows"])
    row = view.logit_rows[columns["row"][record] + nth]
    own = row >= 0
    if not dims.split.replicated_residual:
        own &= dims.owner(row) == rank[record]
    blocks = dims.bucket.row_blocks
    record, block = np.divmod(np.unique(record[own] * blocks + row[own] // dims.bucket.row_block), blocks)
    words = rec.waits(records)[record]
    at, slot = np.nonzero(words & rec.INDEXED)
    tasks.wait(first[record[at]], rec.word_counter(words[at, slot]) + block[at], slot)
