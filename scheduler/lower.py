"""From a model and a bucket to tile tasks: which instructions a step consists of, before anyone says where or when."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..isa import BY_NAME, KV_BLOCK, Column, Dims, Dtype, Index, Instruction, Kind
from ..isa.record import SIGNALS
from ..machine import Machine
from ..model.checkpoint import weight_dims
from ..model.config import LlamaConfig
from .cost import panel_blocks, seconds
from .regions import boxes, head_group_boxes, nonempty, overlap

# Step-table room for attention: items per slot beyond one per row, so that few rows can be cut by KV head and KV
# block for balance; rows whose long contexts may be split at once, and the most partials that are kept for them.
_ITEMS_PER_SLOT = 4
_SPLIT_ROWS, _MAX_PARTIALS = 4, 16384
# Logit-bias pairs: the OpenAI API allows 300 per request.
_BIAS_PER_ROW, _MAX_BIAS = 512, 65536


@dataclass(frozen=True)
class Phase:
    """All instructions of one kind in a segment, as operand columns of equal length.

    `block` is the row block that the instruction's rows lie in: token rows, or logit rows in the epilogue.
    """

    instruction: Instruction
    columns: dict[str, Column]
    block: Column

    def __len__(self) -> int:
        return len(self.block)


@dataclass(frozen=True)
class Tasks:
    """A step's instructions: three segments of phases in program order."""

    dims: Dims
    prologue: list[Phase]
    body: list[Phase]
    epilogue: list[Phase]

    @property
    def segments(self) -> tuple[list[Phase], list[Phase], list[Phase]]:
        return self.prologue, self.body, self.epilogue


def program_dims(
    config: LlamaConfig,
    machine: Machine,
    *,
    dtype: Dtype,
    tokens: int,
    logit_rows: int,
    max_seqs: int,
    max_context: int,
) -> Dims:
    """Sizes of a bucket, with room in its step table that depends on the bucket and the worker count only."""
    kv_blocks = -(-max_context // KV_BLOCK)
    return replace(
        weight_dims(config, dtype),
        page=machine.page,
        row_block=min(machine.tile_rows, tokens),
        tokens=tokens,
        logit_rows=logit_rows,
        max_seqs=max_seqs,
        max_context=max_context,
        items=tokens + _ITEMS_PER_SLOT * machine.workers,
        attention_slots=machine.workers,
        partials=min(config.kv_heads * kv_blocks * min(tokens, _SPLIT_ROWS), _MAX_PARTIALS),
        bias_entries=min(_BIAS_PER_ROW * logit_rows, _MAX_BIAS),
    )


def lower(dims: Dims, machine: Machine) -> Tasks:
    """The tasks of one rank."""
    token = (dims.tokens, dims.row_block)
    logit = (dims.logit_rows, min(machine.tile_rows, dims.logit_rows))
    qkv = _tiles("qkv_rope", token, dims.qkv_cols, dims, machine)
    return Tasks(
        dims,
        prologue=[_rows(name, token, _share(dims.tokens, machine)) for name in ("embed", "rope")],
        body=[
            _rows("attn_norm", token, _share(dims.tokens, machine)),
            qkv,
            _attention(qkv, dims),
            _tiles("o_proj", token, dims.hidden, dims, machine),
            _rows("mlp_norm", token, _share(dims.tokens, machine)),
            _tiles("gate_up_silu", token, dims.ffn, dims, machine),
            _tiles("down_proj", token, dims.hidden, dims, machine),
        ],
        epilogue=[
            _rows("final_norm", logit, _share(dims.logit_rows, machine)),
            _tiles("lm_head", logit, dims.vocab, dims, machine),
            _rows("sample", logit, 1),
        ],
    )


def _share(rows: int, machine: Machine) -> int:
    return -(-rows // machine.workers)


def _rows(name: str, shape: tuple[int, int], at_most: int) -> Phase:
    """Runs of up to `at_most` rows, of near-equal length inside each row block. `shape`: rows, rows of a block."""
    total, block = shape
    pieces = -(-block // min(at_most, block))
    cuts = np.arange(pieces + 1, dtype=np.int32) * block // pieces
    start = (np.arange(-(-total // block), dtype=np.int32)[:, None] * block + cuts[:-1]).ravel()
    rows = np.minimum(np.tile(np.diff(cuts), -(-total // block)), total - start)
    start, rows = start[rows > 0], rows[rows > 0]
    return Phase(BY_NAME[name], {"row": start, "rows": rows}, start // block)


def _tiles(name: str, shape: tuple[int, int], cols: int, dims: Dims, machine: Machine) -> Phase:
    """Row blocks x near-equal column tiles that start on multiples of the machine's column unit."""
    total, block = shape
    blocks = -(-total // block)
    units = -(-cols // machine.col_unit)
    count = _column_tiles(BY_NAME[name], block, blocks, cols, dims, machine)
    cuts = np.minimum(np.arange(count + 1) * units // count * machine.col_unit, cols).astype(np.int32)
    at = np.repeat(np.arange(blocks, dtype=np.int32), count)
    columns = {
        "row": at * block,
        "rows": np.minimum(block, total - at * block),
        "col": np.tile(cuts[:-1], blocks),
        "cols": np.tile(np.diff(cuts), blocks),
    }
    return Phase(BY_NAME[name], columns, at)


def _column_tiles(instruction: Instruction, rows: int, blocks: int, cols: int, dims: Dims, machine: Machine) -> int:
    """How many column tiles make the phase shortest: waves of tiles over the workers x seconds of the widest tile.

    A tile holds at most tile_rows x tile_cols outputs, so short row blocks may have wide tiles: then a phase is
    about one tile per worker. Tiles are cut narrower only to fill the workers or to even out the last wave; with
    several panels the next phase fills the last wave, so a part of a wave counts as that.
    """
    units = -(-cols // machine.col_unit)
    widest = max(1, machine.tile_rows * machine.tile_cols // (rows * machine.col_unit))
    fewest = -(-units // widest)
    most = min(units, 2 * max(fewest, -(-machine.workers // blocks)))
    counts = np.arange(fewest, most + 1)
    width = np.minimum(-(-units // counts) * machine.col_unit, cols).astype(np.int32)
    zero = np.zeros_like(width)
    tile = seconds(instruction, {"row": zero, "rows": zero + rows, "col": zero, "cols": width}, dims, machine)
    waves = np.maximum(1.0, counts * blocks / machine.workers)
    if blocks <= panel_blocks(dims, machine):
        waves = np.ceil(waves)
    return int(counts[np.argmin(waves * tile)])


def _attention(qkv: Phase, dims: Dims) -> Phase:
    """One instruction per slot. Heads are grouped just so far that a QKV tile's signals fit its record."""
    instruction = BY_NAME["attention"]
    slot = np.arange(dims.attention_slots, dtype=np.int32)
    group_heads = next(n for n in range(1, dims.kv_heads + 1) if _most_groups(qkv, instruction, dims, n) <= SIGNALS)
    groups = -(-dims.kv_heads // group_heads)
    columns = {"slot": slot, "group_heads": np.full_like(slot, group_heads), "groups": np.full_like(slot, groups)}
    return Phase(instruction, columns, np.zeros_like(slot))


def _most_groups(qkv: Phase, attention: Instruction, dims: Dims, group_heads: int) -> int:
    """The most head groups that one QKV tile has a part of."""
    first = qkv.block == 0
    tiles = {name: column[first] for name, column in qkv.columns.items()}
    written = {a.buffer: boxes(a) for a in qkv.instruction.accesses(tiles, dims) if a.kind is not Kind.READ}
    one = {name: np.zeros(1, dtype=np.int32) for name in attention.operands}
    touched = np.zeros((int(first.sum()), -(-dims.kv_heads // group_heads)), dtype=bool)
    for access in attention.accesses(one, dims):
        if access.index is Index.ITEM and access.buffer in written:
            tile = written[access.buffer]
            groups = head_group_boxes(access, dims, 0, group_heads)
            touched |= nonempty(tile)[:, None] & overlap(tile, groups)
    return int(touched.sum(axis=1).max())
