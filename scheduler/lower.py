"""From a model and a bucket to tile tasks: which instructions a step consists of, before anyone says where or when."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..isa import BY_NAME, INSTRUCTIONS, KV_BLOCK, Column, Dims, Dtype, Family, Index, Instruction, Kind
from ..isa.record import SIGNALS
from ..machine import Machine
from ..model.checkpoint import weight_dims
from ..model.config import LlamaConfig
from .cost import panel_blocks, seconds
from .regions import boxes, head_group_columns, nonempty

# Step-table room for attention: items per slot beyond one per row, so that few rows can be cut by KV head and KV
# block for balance; rows whose long contexts may be split at once, and the most partials that are kept for them.
_ITEMS_PER_SLOT = 4
_SPLIT_ROWS, _MAX_PARTIALS = 4, 16384
# Where a worker has matrix units and pages: any slot's share may end inside a row's KV range, so as many rows as slots.
_MAX_SLOT_PARTIALS = 65536
# Logit-bias pairs: the OpenAI API allows 300 per request.
_BIAS_PER_ROW, _MAX_BIAS = 512, 65536


@dataclass(frozen=True)
class Phase:
    """All instructions of one kind of a rank in a segment, as operand columns of equal length.

    `block` groups them: what one task of a block needs, and what it must precede, holds for the block. It is the
    row block that the instruction's rows lie in: token rows, or logit rows in the epilogue.
    """

    instruction: Instruction
    columns: dict[str, Column]
    block: Column
    rank: int = 0

    def __len__(self) -> int:
        return len(self.block)


@dataclass(frozen=True)
class Tasks:
    """A step's instructions: three segments of phases in program order, the ranks' phases of a kind together."""

    dims: Dims
    prologue: list[Phase]
    body: list[Phase]
    epilogue: list[Phase]

    @property
    def segments(self) -> tuple[list[Phase], list[Phase], list[Phase]]:
        return self.prologue, self.body, self.epilogue


def kinds(phases: list[Phase]) -> list[int]:
    """Which kind of its segment each phase is, counted in program order."""
    changes = [a.instruction is not b.instruction for a, b in itertools.pairwise(phases)]
    return list(itertools.accumulate(changes, initial=0))


def program_dims(
    config: LlamaConfig,
    machine: Machine,
    *,
    dtype: Dtype,
    tokens: int,
    logit_rows: int,
    max_seqs: int,
    max_context: int,
    tp: int = 1,
    slots: int | None = None,
    dots: bool = False,
) -> Dims:
    """Sizes of a bucket, with room in its step table that depends on the bucket and the slots only.

    `slots`: attention instructions of a layer and rank; one for each worker by default.

    Row blocks and how the ranks share the work are those of one rank: `choose` has the rest.
    """
    kv_blocks = -(-max_context // KV_BLOCK)
    slots = slots or machine.workers
    split_rows, partials = (slots, _MAX_SLOT_PARTIALS) if machine.pages else (_SPLIT_ROWS, _MAX_PARTIALS)
    return replace(
        weight_dims(config, dtype),
        page=machine.page,
        row_block=min(machine.tile_rows, tokens),
        tokens=tokens,
        logit_rows=logit_rows,
        max_seqs=max_seqs,
        max_context=max_context,
        items=tokens + _ITEMS_PER_SLOT * slots,
        attention_slots=slots,
        partials=min(config.kv_heads * kv_blocks * min(tokens, split_rows), partials),
        bias_entries=min(_BIAS_PER_ROW * logit_rows, _MAX_BIAS),
        tp=tp,
        pages=machine.pages,
        dots=int(dots),
    )


@dataclass(frozen=True)
class _Rows:
    """Blocks of `length` rows, of `total` rows in all: those numbered `blocks`."""

    total: int
    length: int
    blocks: Column

    def __len__(self) -> int:
        return int(np.minimum(self.length, self.total - self.blocks * self.length).sum())


def lower(dims: Dims, machine: Machine) -> Tasks:
    """The tasks of all ranks."""
    ranks = range(dims.tp)
    return Tasks(
        dims,
        prologue=_phases(("embed", "rope", "first_norm"), ranks, dims, machine),
        body=lower_layer(dims, machine, ranks),
        epilogue=_phases(("final_norm", "lm_head", "sample"), ranks, dims, machine),
    )


def lower_layer(dims: Dims, machine: Machine, ranks: Sequence[int]) -> list[Phase]:
    """The tasks of some ranks in a layer."""
    names = [i.name for i in INSTRUCTIONS if i.layered and i.family is not Family.CONTROL]
    return _phases(names, ranks, dims, machine)


def _phases(names: Iterable[str], ranks: Sequence[int], dims: Dims, machine: Machine) -> list[Phase]:
    """Kind by kind, rank by rank; without those that have nothing to do."""
    out: list[Phase] = []
    for name in names:
        instruction = BY_NAME[name]
        for rank in ranks if instruction.present(dims) else ():
            phase = _phase(instruction, replace(dims, rank=rank), machine, out)
            if len(phase):
                out.append(phase)
    return out


def _phase(instruction: Instruction, d: Dims, machine: Machine, before: list[Phase]) -> Phase:
    """The tasks of rank `d.rank`."""
    every = _Rows(d.tokens, d.row_block, np.arange(d.row_blocks, dtype=np.int32))
    own = every if d.one_hop else replace(every, blocks=every.blocks[d.rank :: d.tp])
    logit_block = min(machine.tile_rows, d.logit_rows)
    logit = _Rows(d.logit_rows, logit_block, np.arange(-(-d.logit_rows // logit_block), dtype=np.int32))
    match instruction.name:
        case "embed" | "first_norm" | "attn_norm" | "mlp_norm" | "next_norm":
            return _runs(instruction, own, d, machine)
        case "rope":
            return _runs(instruction, every, d, machine)
        case "qkv_rope":
            return _tiles(instruction, every, d.qkv_cols, d, machine)
        case "attention":
            qkv = next((p for p in before if p.instruction.name == "qkv_rope" and p.rank == d.rank), None)
            return _attention(instruction, qkv, d)
        case "o_proj" | "down_proj":
            return _tiles(instruction, own, d.hidden, d, machine)
        case "o_partial":
            return _tiles(instruction, every, d.hidden if d.rank_heads else 0, d, machine)
        case "down_partial":
            return _tiles(instruction, every, d.hidden if d.rank_ffn else 0, d, machine)
        case "o_reduce" | "down_reduce":
            # Whole rows: the norm that follows needs them whole.
            phase = _runs(instruction, own, d, machine)
            zero = np.zeros_like(phase.block)
            return replace(phase, columns=phase.columns | {"col": zero, "cols": zero + d.hidden})
        case "gate_up_silu":
            return _tiles(instruction, every, d.rank_ffn, d, machine)
        case "final_norm":
            return _runs(instruction, logit, d, machine)
        case "lm_head":
            return _tiles(instruction, logit, d.rank_vocab, d, machine)
        case "sample":
            first = min(d.rank * d.own_logit_rows, d.logit_rows)
            row = np.arange(first, min(first + d.own_logit_rows, d.logit_rows), dtype=np.int32)
            return Phase(instruction, {"row": row, "rows": np.ones_like(row)}, row // logit_block, d.rank)
    raise AssertionError(f"nothing lowers {instruction.name}")


def _runs(instruction: Instruction, rows: _Rows, d: Dims, machine: Machine) -> Phase:
    """Runs of rows, enough of them for all workers, of near-equal length inside each row block."""
    at_most = max(1, -(-len(rows) // machine.workers))
    pieces = -(-rows.length // min(at_most, rows.length))
    cuts = np.arange(pieces + 1, dtype=np.int32) * rows.length // pieces
    start = (rows.blocks[:, None] * rows.length + cuts[:-1]).ravel()
    count = np.minimum(np.tile(np.diff(cuts), len(rows.blocks)), rows.total - start)
    start, count = start[count > 0], count[count > 0]
    return Phase(instruction, {"row": start, "rows": count}, start // rows.length, d.rank)


def _tiles(instruction: Instruction, rows: _Rows, cols: int, d: Dims, machine: Machine) -> Phase:
    """Row blocks x near-equal column tiles that start on multiples of the column unit."""
    blocks, unit = len(rows.blocks), _column_unit(instruction, d, machine)
    units = -(-cols // unit)
    count = _column_tiles(instruction, rows, cols, d, machine) if blocks and cols else 0
    cuts = np.minimum(np.arange(count + 1) * units // max(count, 1) * unit, cols).astype(np.int32)
    at = np.repeat(rows.blocks, count)
    columns = {
        "row": at * rows.length,
        "rows": np.minimum(rows.length, rows.total - at * rows.length),
        "col": np.tile(cuts[:-1], blocks),
        "cols": np.tile(np.diff(cuts), blocks),
    }
    return Phase(instruction, columns, at, d.rank)


def _column_unit(instruction: Instruction, d: Dims, machine: Machine) -> int:
    """The machine's, or whole pages of what matrix units store by pages."""
    if instruction.matmul is None or not d.pages or d.dots:
        return machine.col_unit
    return max(machine.col_unit, instruction.matmul.output_columns(d))


def _column_tiles(instruction: Instruction, rows: _Rows, cols: int, d: Dims, machine: Machine) -> int:
    """How many column tiles make the phase shortest: waves of tiles over the workers x seconds of the widest tile.

    A tile holds at most tile_rows x tile_cols outputs, so short row blocks may have wide tiles: then a phase is
    about one tile per worker. Tiles are cut narrower only to fill the workers or to even out the last wave; with
    several panels the next phase fills the last wave, so a part of a wave counts as that.
    """
    blocks, unit = len(rows.blocks), _column_unit(instruction, d, machine)
    units = -(-cols // unit)
    widest = max(1, machine.tile_rows * machine.tile_cols // (rows.length * unit))
    fewest = -(-units // widest)
    most = min(units, 2 * max(fewest, -(-machine.workers // blocks)))
    counts = np.arange(fewest, most + 1)
    width = np.minimum(-(-units // counts) * unit, cols).astype(np.int32)
    zero = np.zeros_like(width)
    first = {"row": zero + rows.blocks[0] * rows.length, "rows": zero + rows.length, "col": zero, "cols": width}
    tile = seconds(instruction, first, d, machine)
    waves = np.maximum(1.0, counts * blocks / machine.workers)
    if blocks <= panel_blocks(d, machine):
        waves = np.ceil(waves)
    return int(counts[np.argmin(waves * tile)])


def _attention(instruction: Instruction, qkv: Phase | None, d: Dims) -> Phase:
    """One instruction per slot. Heads are grouped just so far that a QKV tile's signals fit its record."""
    slot = np.arange(d.attention_slots if qkv else 0, dtype=np.int32)
    columns = {name: np.zeros_like(slot) for name in instruction.operands} | {"slot": slot}
    if qkv:
        first = qkv.block == qkv.block[0]
        tiles = replace(qkv, block=qkv.block[first], columns={name: c[first] for name, c in qkv.columns.items()})
        sizes = range(1, d.rank_kv_heads + 1)
        group_heads = next(n for n in sizes if head_groups(tiles, instruction, d, n).sum(axis=1).max() <= SIGNALS)
        columns["group_heads"] += group_heads
        columns["groups"] += -(-d.rank_kv_heads // group_heads)
    return Phase(instruction, columns, np.zeros_like(slot), d.rank)


def head_groups(producers: Phase, attention: Instruction, d: Dims, group_heads: int) -> NDArray[np.bool_]:
    """[tasks, head groups]: which tasks write what items of their rows with some of `group_heads` KV heads read."""
    one = {name: np.zeros(1, dtype=np.int32) for name in attention.operands}
    read = {a.buffer for a in attention.accesses(one, d) if a.index is Index.ITEM and a.kind is Kind.READ}
    out = np.zeros((len(producers), -(-d.rank_kv_heads // group_heads)), dtype=bool)
    for access in producers.instruction.accesses(producers.columns, d):
        if access.buffer in read and access.kind is not Kind.READ:
            low, high = head_group_columns(access.buffer, d, group_heads).T
            out |= nonempty(boxes(access))[:, None] & (access.col[:, None] < high) & (low < access.col_end[:, None])
    return out
