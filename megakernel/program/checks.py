"""Checks a program before anything executes it. If a program has no violations, code that reads it stays inside the
program's arrays. Loaders of files, backends, the simulator and the disassembler call `check`, which checks each program
once. Native code checks nothing again.

Most checks look at one instruction at a time. `scheduler.verify` runs these checks first, and then looks at the order
of instructions. It proves that the program ends, and that it computes the same as its phases one after another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import MegakernelError
from ..isa import DRAIN, Dims, Dtype, Index, Operation, Result, Units
from ..isa import record as bits
from ..isa.dims import MOST_EXPERTS
from ..isa.step import step_words
from .part import Part, Use, each, extent, uses
from .phases import MOST, check_phases
from .program import SEGMENTS, TOTALS, Program, Segment

# The maximum number of workers, because a trace stores a worker's number in 16 bits.
MOST_WORKERS = 1 << 16
# The maximum number of a rank's counters in all layers. On a CPU, each takes a cache line, so all take up to 1 GiB.
MOST_COUNTERS = 1 << 24
# The maximum length of a step table in words (256 MiB), because every launch copies the table. The page lists of 64
# sequences of a million tokens take 2^22 words.
MOST_STEP_WORDS = 1 << 26

_KNOWN_BITS = bits.COUNTER_MASK | bits.RANK_MASK << bits.RANK_SHIFT | bits.NEXT | bits.INDEXED
_GROUPS = bits.OPERAND_WORD + Operation.ATTENTION.layout.operands.index("groups")


class Checks:
    """The checks of one program, in several stages, and the decoded program, which all checks use."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @cached_property
    def parts(self) -> list[Part]:
        """The decoded prologue, body and epilogue. They can be decoded if the first stage has found no violation."""
        return [Part(self.program, name) for name in SEGMENTS]

    @cached_property
    def uses(self) -> list[Use]:
        """The buffer regions that instructions access. They are known only if the earlier stages found no violation."""
        return uses(self.parts)

    def stages(
        self, of_target: Callable[[list[Part]], Iterable[str]] = lambda parts: (), *, whole: bool = True
    ) -> Iterator[Iterable[str]]:
        """Yield the violations that each stage of checks finds. Run a stage only if the earlier stages found none.
        `of_target` checks what the kind of processor requires. Without `whole`, attention instructions may be
        missing."""
        yield _layout(self.program)
        yield check_phases(self.program.forward, self.program.dims)
        yield _records(self.program, self.parts, whole)
        yield of_target(self.parts)
        yield _boxes(self.uses)


_SOUND: WeakKeyDictionary[Program, bool] = WeakKeyDictionary()  # sound programs; true if `whole` was checked


def check(program: Program, name: str = "the program", *, whole: bool = True) -> None:
    """Raise MegakernelError, which calls the program `name`, if it has a violation. A program without violations is not
    checked again. With `whole`, each rank must have all attention instructions of a step, as compiled programs do;
    benchmarks leave some out."""
    if _SOUND.get(program, -1) >= whole:
        return
    if (found := next(itertools.chain.from_iterable(Checks(program).stages(whole=whole)), None)) is not None:
        raise MegakernelError(f"{name} is wrong: {found}: compile it again")
    _SOUND[program] = whole


def _arrays(program: Program) -> Iterator[str]:
    if program.ranks < 1 or program.workers < 1 or program.dims.model.layers < 1 or program.counters < 1:
        yield "ranks, workers, layers and counters must all be at least 1"
        return
    for name in SEGMENTS:
        yield from _segment(name, getattr(program, name), program.ranks * program.workers)
    if not len(program.queues.offsets) or (len(program.queues.offsets) - 1) % program.ranks:
        yield f"{len(program.queues.offsets) - 1} queues cannot be divided equally among {program.ranks} ranks"
        return
    yield from _segment("queues", program.queues, len(program.queues.offsets) - 1)
    for name in TOTALS:
        if getattr(program, name).shape != (program.ranks, program.counters):
            yield f"{name}: shape {getattr(program, name).shape}, not ({program.ranks}, {program.counters})"


def _layout(program: Program) -> Iterator[str]:
    """Yield violations in the program's array shapes and sizes. All later checks assume that there are none."""
    dims = program.dims
    found = list(_arrays(program))
    yield from found
    if found:
        return
    if program.ranks >= bits.OWNER:
        yield f"{program.ranks} ranks do not fit a signal word"
    if program.ranks != dims.split.tp or dims.split.rank != 0:
        sizes = f"the sizes of rank {dims.split.rank} of {dims.split.tp}"
        yield f"a program of {program.ranks} ranks has {sizes} instead of rank 0"
    if program.workers > MOST_WORKERS:
        yield f"{program.workers} workers of a rank are more than {MOST_WORKERS}"
    if (dims.model.layers + 1) * program.counters > MOST_COUNTERS:
        yield f"{dims.model.layers + 1} blocks of {program.counters} counters are more than {MOST_COUNTERS}"
    if program.counters > bits.COUNTER_MASK:
        yield f"a block of {program.counters} counters does not fit a wait or signal word"
    if dims.model.layers > bits.MOST_LAYERS:
        yield f"{dims.model.layers} layers are more than {bits.MOST_LAYERS}"
    yield from _sizes(dims)


def _sizes(d: Dims) -> Iterator[str]:
    counts = ("vocab", "hidden", "ffn", "heads", "kv_heads", "head_dim", "kv_page", "row_block", "tokens", "logit_rows")
    low = [name for name in (*counts, "max_seqs", "max_context", "attention_slots") if d.flat[name] < 1]
    if low:
        yield f"{', '.join(low)} must be at least 1"
        return
    more = ("max_seqs", "max_context", "attention_slots", "items", "partials", "bias_entries", "mask_rows", "kv_block")
    high = [name for name in (*counts, *more) if d.flat[name] > MOST]
    rows = max(d.split.tp, 1) * (d.bucket.tokens + d.bucket.row_block)
    if high or max(d.model.heads * d.model.head_dim, rows) > MOST:
        yield f"{', '.join(high) or 'a product of sizes'} must be at most {MOST}"
        return
    m = d.model
    possible = 0 <= m.shared_gate <= m.shared_experts <= m.experts_per_token <= m.experts <= MOST_EXPERTS
    if not possible or (m.experts == 0) != (m.experts_per_token == 0):
        yield f"{m.experts_per_token} experts per token ({m.shared_experts} shared), of {m.experts}, are not possible"
        return
    if rows * m.experts_per_token > MOST or m.experts * max(m.ffn, m.hidden) > MOST:
        yield f"a product of sizes and of {m.experts} experts must be at most {MOST}"
        return
    if (words := step_words(d)) > MOST_STEP_WORDS:
        yield f"a step table of {words} words is longer than {MOST_STEP_WORDS}"
    known = d.model.dtype in (Dtype.F32, Dtype.BF16) and d.worker.units in list(Units)
    if d.split.expert_parallel and not d.split.equal_experts:
        yield f"{m.experts} experts cannot be divided equally among {d.split.tp} ranks"
    flags = {d.split.replicated_o, d.split.replicated_residual, d.split.expert_parallel, m.late_scales}
    flags |= {m.sigmoid_routes, m.choice_bias, m.shared_gate}
    known &= flags | {m.quantised_kv, m.q8_activations, m.normalised_routes, m.clipped_gates, m.whole_norms} <= {0, 1}
    if not known or d.worker.ring_pages < 0 or (d.worker.ring_pages and d.worker.units == Units.CORE):
        ring = f"a ring of {d.worker.ring_pages} pages"
        yield f"dtype {d.model.dtype}, units {d.worker.units}, {ring} or a flag is out of range"
    if d.model.heads % d.model.kv_heads or d.model.head_dim % 2:
        heads = f"{d.model.heads} heads of {d.model.head_dim} elements"
        yield f"{heads} do not fit {d.model.kv_heads} KV heads and RoPE pairs"
    if d.model.window < 0 or d.model.window_from < 0 or d.model.full_every < 1 or d.model.full_at < 0:
        yield f"a window of {d.model.window} tokens in some layers is out of range"
    if d.bucket.kv_block < 1 or d.bucket.kv_block % d.bucket.kv_page:
        yield f"pages of {d.bucket.kv_page} tokens do not divide KV blocks of {d.bucket.kv_block}"
    # A step may need this many attention items. A new item begins with each sequence, with the padding rows, and with
    # each row block (group of rows).
    items = min(d.bucket.tokens, d.bucket.row_blocks + d.bucket.max_seqs)
    if d.bucket.items < items or d.bucket.partials < 0 or d.bucket.bias_entries < 0 or d.bucket.mask_rows < 0:
        yield f"{d.bucket.items} attention items are fewer than the {items} needed, or another size is negative"


def _segment(name: str, segment: Segment, streams: int) -> Iterator[str]:
    shape, offsets = segment.records.shape, segment.offsets
    if len(shape) != 2 or shape[1] != bits.WORDS:
        yield f"{name}: records have shape {shape}, not [n, {bits.WORDS}]"
        return
    ends = offsets.shape == (streams + 1,) and offsets[0] == 0 and offsets[-1] == shape[0]
    if not ends or (offsets[1:] < offsets[:-1]).any():
        yield f"{name}: offsets are not monotone from 0 to {shape[0]} over {streams} streams or queues"


def _records(program: Program, parts: list[Part], whole: bool) -> Iterator[str]:
    """Yield violations in instruction records: first in each record alone, then in all attention instructions and all
    drains together. The data that instructions access is checked later."""
    dims = program.dims.ranks
    for number, part in enumerate(parts):
        yield from _headers(part, number)
        yield from _operands(part, dims)
        yield from _counters(part)
    yield from _attention(parts[1], dims, whole)
    yield from _drains(program, parts[1])


def _headers(part: Part, segment: int) -> Iterator[str]:
    known, home = part.phases.known[part.number], part.phases.segment[part.number]
    yield from each(part, np.nonzero(~known)[0], "the program has no such phase")
    yield from each(part, np.nonzero(part.records[:, 0] != part.number)[0], "word 0 holds more than a phase number")
    for row in np.nonzero((home >= 0) & (home != segment))[0]:
        yield f"{part.label(int(row))}: belongs in the {SEGMENTS[home[row]]}"
    drains = part.rows(DRAIN)
    yield from each(part, drains[part.queue[drains] >= 0], "a queue cannot hold a drain")


def _operands(part: Part, dims: list[Dims]) -> Iterator[str]:
    values = part.records[:, bits.OPERAND_WORD : bits.WAIT_WORD]
    bad = ((values < part.phases.least[part.number]) | (values > part.phases.most[part.number])).any(axis=1)
    yield from each(part, np.nonzero(bad)[0], "an operand is out of range")
    for phase in part.phases.matmuls + part.phases.experts:
        rows = part.rows(phase)
        if not len(rows):
            continue
        columns = phase.columns(part.records[rows])
        most = np.array([phase.width(d.split) for d in dims])[part.rank[rows]]
        bad = columns["col"].astype(np.int64) + columns["cols"] > most
        yield from each(part, rows[bad], "its column tile lies outside the rank's part of the output")
        if "place" in columns:
            yield from each(part, rows[columns["place"] >= dims[0].places], "rows have no such place")
        if phase.result is Result.HEADS:
            unit, what = (dims[0].model.head_dim, "head") if phase.whole_heads(dims[0].model) else (2, "RoPE pair")
            bad = (columns["col"] % unit != 0) | (columns["cols"] % unit != 0)
            yield from each(part, rows[bad], f"its column tile cuts a {what}")


def _counters(part: Part) -> Iterator[str]:
    program, dims = part.program, part.program.dims
    for words, signal in ((part.waits, False), (part.signals, True)):
        what = "signal" if signal else "wait"
        bad = (words.raw & ~np.int32(_KNOWN_BITS) != 0) | (words.counter < 0) | (words.counter >= program.counters)
        yield from each(part, words.row[bad], f"a {what} names no counter of the block of {program.counters}")
        if signal:
            owner = words.rank == bits.OWNER
            bad = (words.rank >= program.ranks) & (words.rank != bits.ALL_RANKS) & ~owner
            yield from each(part, words.row[bad], "a signal names no rank")
            bad = owner & ~words.indexed
            yield from each(part, words.row[bad], "only an indexed signal can go to a row's owner")
            if owner.any() and dims.split.replicated_residual:
                yield from each(part, words.row[owner], "a signal goes to a row's owner, but all ranks keep all rows")
            if part.name != "body":
                yield from each(part, words.row[words.next], "only the body signals the next block")
        else:
            yield from each(part, words.row[words.rank != 0], "a wait names a rank, but is always on the own rank")
            yield from each(part, words.row[words.next], "a wait names the next block, but must name its own")
        if words.indexed.any():
            row = words.row[words.indexed]
            attends = np.isin(row, part.rows(part.phases.attention))
            # An indexed wait or signal names a grid of counters, one for each row block. If attention waits for the
            # grid, there is a counter for each pair (row block, group of KV heads).
            members = np.where(attends & (not signal), part.records[row, _GROUPS].astype(np.int64), 1)
            picks = attends | np.isin(part.number[row], [] if signal else part.phases.logit_norms)
            bad = ~picks | (words.slot[words.indexed] != 0)
            yield from each(part, row[bad], f"a {what} word here cannot be indexed")
            past = ~bad & (words.counter[words.indexed] + members * dims.bucket.row_blocks > program.counters)
            yield from each(part, row[past], f"its {what} grid runs past the block of {program.counters} counters")


def _attention(body: Part, dims: list[Dims], whole: bool) -> Iterator[str]:
    """Yield violations in attention instructions. If `whole`, all instructions of a rank are also compared: the step
    table may give any attention item to any instruction, so all of them must name the same counters."""
    phase = body.phases.attention
    if phase is None:
        return
    every = body.rows(phase)
    for words, what in ((body.waits, "wait"), (body.signals, "signal")) if whole else ():
        grid = np.zeros(len(body.records), dtype=np.bool_)
        grid[words.row[words.indexed & (words.slot == 0)]] = True
        yield from each(body, every[~grid[every]], f"its {what} word 0 must name a grid")
    for rank, d in enumerate(dims):
        rows = every[body.rank[every] == rank]
        if not d.split.rank_heads:
            yield from each(body, rows, f"rank {rank} has no heads")
            continue
        columns = phase.columns(body.records[rows])
        yield from each(body, rows[columns["slot"] >= d.bucket.attention_slots], "the step table has no such slot")
        heads = columns["group_heads"]
        bad = (heads < 1) | (columns["groups"] != -(-d.split.rank_kv_heads // np.maximum(heads, 1)))
        yield from each(body, rows[bad], f"its groups do not cover {d.split.rank_kv_heads} KV heads")
        slots = np.sort(columns["slot"])
        if whole and not np.array_equal(slots, np.arange(d.bucket.attention_slots)):
            wanted = f"each of 0..{d.bucket.attention_slots - 1} once"
            yield f"{phase.name}: rank {rank} has slots {slots.tolist()}, not {wanted}"
        same = body.records[rows][:, [bits.OPERAND_WORD + 1, bits.WAIT_WORD, bits.SIGNAL_WORD]]
        bad = whole & (same != same[:1]).any(axis=1)
        yield from each(body, rows[bad], "its grids differ from those of the rank's first attention")


def _drains(program: Program, body: Part) -> Iterator[str]:
    """Yield violations in the drains, which claim instructions from queues. They must name queues of their own rank,
    claim only existing instructions, and together claim all of them."""
    rows = body.rows(DRAIN)
    lengths = np.diff(program.queues.offsets).astype(np.int64)
    columns = DRAIN.columns(body.records[rows])
    bad = (columns["queue"] < 0) | (columns["queue"] >= program.rank_queues)
    yield from each(body, rows[bad], f"its queue does not exist: its rank has {program.rank_queues} queues")
    if bad.any():
        return
    queue = body.rank[rows] * program.rank_queues + columns["queue"]
    bad = (columns["end"] < 0) | (columns["end"] > lengths[queue])
    yield from each(body, rows[bad], "its end lies outside its queue")
    claimed = np.zeros(len(lengths), dtype=np.int64)
    np.maximum.at(claimed, queue, columns["end"])
    for q in np.nonzero(claimed < lengths)[0]:
        row = int(body.static + program.queues.offsets[q] + claimed[q])
        yield f"{body.label(row)}: no drain of its rank claims it"


def _boxes(found: list[Use]) -> Iterator[str]:
    """Yield violations: accesses outside of buffers, or to rows of the residual that another rank keeps."""
    every = [(use, access) for use in found for access in use.accesses]
    if not every:
        return
    length = [len(use.rows) for use, _ in every]
    row, row_end, col, col_end = (
        np.concatenate([getattr(a, name) for _, a in every]) for name in ("row", "row_end", "col", "col_end")
    )
    height, width = np.repeat(np.array([extent(a.buffer, use.dims) for use, a in every]), length, axis=0).T
    bad = (row < 0) | (row_end > height) | (col < 0) | (col_end > width)
    bad &= (row != row_end) & (col != col_end)
    bad |= (row_end < row) | (col_end < col)
    for i in np.nonzero(bad)[0]:
        which = int(np.searchsorted(np.cumsum(length), i, side="right"))
        use, access = every[which]
        label = use.part.label(int(use.rows[i - sum(length[:which])]))
        yield f"{label}: its box lies outside {access.buffer.name} [{height[i]}, {width[i]}]"
    for use in found:
        if use.dims.split.tp > 1 and not use.dims.split.replicated_residual:
            yield from _check_owners(use)


def _check_owners(use: Use) -> Iterator[str]:
    """Yield messages about instructions that access residual rows of other ranks, or more than one row block. A row
    block is a group of rows with one owner: the residual and partial sums are divided among ranks by row block."""
    d, phases = use.dims, use.part.phases
    residual = any(a.buffer in phases.residual and a.index is Index.NONE for a in use.accesses)
    if not residual and all(a.buffer not in phases.partial for a in use.accesses):
        return
    columns = use.phase.columns(use.part.records[use.rows])
    first, last = columns["row"], columns["row"] + columns["rows"] - 1
    for row in use.rows[first // d.bucket.row_block != last // d.bucket.row_block]:
        yield f"{use.part.label(int(row))}: its rows lie in more than one row block"
    if residual:
        for row in use.rows[d.owner(first) != d.split.rank]:
            yield f"{use.part.label(int(row))}: another rank has these rows of the residual"
