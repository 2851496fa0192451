"""The pages that an instruction takes are what it reads and writes: nothing twice, nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_programs import make, plan
from numpy.typing import NDArray

from megakernel.isa import BUFFERS, BY_NAME, BY_OPCODE, Buffer, Dims, StepTable, attention_pages, matmul_pages
from megakernel.isa.launch import PAGE_BYTES, PAGES
from megakernel.isa.record import OPERAND_WORD, opcode
from megakernel.scheduler import Options

WEIGHTS, INPUTS, OUTPUT = range(3)


def covered(boxes: dict[str, NDArray[np.int32]], fill: int, buffer: Buffer, dims: Dims, z: int) -> NDArray[np.int32]:
    """How often each element of matrix z of a buffer lies in a page, [rows, inner]."""
    shape = BUFFERS[buffer].shape(dims, 16)
    rows, inner = int(np.prod(shape[:-1])), shape[-1]
    if buffer is Buffer.REDUCE:
        rows = dims.own_rows
    if buffer is Buffer.W_GATE_UP and not boxes["pieces"].any():
        rows = dims.rank_ffn
    count = np.zeros((rows, inner), np.int32)
    width = 32 if buffer is Buffer.X else 64
    for i in np.flatnonzero((boxes["fill"] == fill) & (boxes["buffer"] == buffer) & (boxes["z"] == z)):
        x, y = boxes["x"][i], boxes["y"][i]
        if boxes["pieces"][i]:
            count[y, x : x + boxes["bytes"][i] // 2] += 1
            assert x + boxes["bytes"][i] // 2 <= inner
        else:
            count[y : y + 32, x : x + width] += 1
    return count


def check_pages(boxes: dict[str, NDArray[np.int32]]) -> None:
    for page in np.unique(boxes["page"]):
        here = boxes["page"] == page
        order = np.argsort(boxes["place"][here])
        begin, size = boxes["place"][here][order], boxes["bytes"][here][order]
        assert (begin[1:] >= begin[:-1] + size[:-1]).all() and begin[-1] + size[-1] <= PAGE_BYTES
        assert len(np.unique(boxes["fill"][here])) == 1


MATMULS: dict[str, tuple[Buffer, Buffer, Buffer | None]] = {
    "qkv_rope": (Buffer.H, Buffer.W_QKV, None),
    "o_proj": (Buffer.ATTN, Buffer.W_O, Buffer.X),
    "o_partial": (Buffer.ATTN, Buffer.W_O, Buffer.REDUCE),
    "gate_up_silu": (Buffer.H, Buffer.W_GATE_UP, Buffer.ACT),
    "down_proj": (Buffer.ACT, Buffer.W_DOWN, Buffer.X),
    "down_partial": (Buffer.ACT, Buffer.W_DOWN, Buffer.REDUCE),
    "lm_head": (Buffer.Y, Buffer.LM_HEAD, None),
}


def check_counts(boxes: dict[str, NDArray[np.int32]], name: str, dims: Dims, words: list[int]) -> None:
    """As many pages of each kind as the instruction table declares."""
    matmul = BY_NAME[name].matmul
    assert matmul is not None
    declared = matmul_pages(matmul, np.array(words[1:2]), np.array(words[3:4]), dims)
    for fill, count in ((WEIGHTS, declared.weights), (INPUTS, declared.inputs), (OUTPUT, declared.output)):
        assert len(np.unique(boxes["page"][boxes["fill"] == fill])) == count[0]


def check_matmul(boxes: dict[str, NDArray[np.int32]], name: str, dims: Dims, words: list[int]) -> None:
    inputs, weights, output = MATMULS[name]
    row, rows, col, cols = words
    gate_up, layer = name == "gate_up_silu", 0 if name == "lm_head" else 1
    columns = slice(col, col + cols)

    # Weights: each of the columns' elements once.
    if dims.dots or not gate_up:
        halves = [(layer, dims.rank_ffn * h) for h in range(2 if gate_up else 1)]
    else:
        halves = [(2 * layer + h, 0) for h in range(2)]
    seen = {z: covered(boxes, WEIGHTS, weights, dims, z) for z in dict(halves)}
    for z, first in halves:
        assert (seen[z][first + col : first + col + cols] == 1).all()
        end = col + cols if dims.dots else -(-(col + cols) // 32) * 32  # boxes are 32 rows
        seen[z][first + col : first + end] = 0
    assert not any(count.any() for count in seen.values())

    # Inputs: once for each chunk of columns, or lap of the ring.
    count = covered(boxes, INPUTS, inputs, dims, 0)
    if dims.dots:
        held = -(-rows * -(-count.shape[1] // 1024) // 8)
        pages = len(np.unique(boxes["page"][boxes["fill"] == WEIGHTS]))
        times = -(-pages // ((PAGES - held) // 2 * 2))
    else:
        times = -(-cols // (128 if gate_up else 256))
    assert (count[row : row + rows] == times).all()
    count[row : row + (rows if dims.dots else -(-rows // 32) * 32)] = 0
    assert not count.any()

    # Results: each once, and nothing else, for they overwrite.
    if output is None or dims.dots:
        assert (boxes["fill"] != OUTPUT).all()
        return
    reduce = output is Buffer.REDUCE
    out = covered(boxes, OUTPUT, output, dims, dims.rank if reduce else 0)
    first = (
        row if not reduce or dims.one_hop else row // dims.row_block // dims.tp * dims.row_block + row % dims.row_block
    )
    expected = np.zeros_like(out)
    expected[first : first + rows, columns] = 1
    # Rows of a partial's slot beyond the last token are nobody's.
    used = dims.tokens if not reduce else first + rows
    assert (out[:used] == expected[:used]).all()


def check_attention(boxes: dict[str, NDArray[np.int32]], dims: Dims, table: StepTable, slot: int) -> None:
    first, end = table.slot_items[slot], table.slot_items[slot + 1]
    assert sorted(set(boxes["item"].tolist())) == list(range(first, end))
    keys, values = (covered(boxes, INPUTS, b, dims, 1) for b in (Buffer.K_CACHE, Buffer.V_CACHE))
    keys = keys.reshape(-1, dims.rank_kv_heads, dims.head_dim, dims.page)
    values = values.reshape(-1, dims.rank_kv_heads, dims.page, dims.head_dim)
    for item in range(first, end):
        if table.item_seq[item] < 0:
            assert boxes["bytes"][boxes["item"] == item].tolist() == [0]
            continue
        blocks = np.arange(table.item_block[item], table.item_block[item] + table.item_blocks[item])
        pages = table.block_tables[table.item_seq[item]][blocks]
        heads = table.item_kv_head[item] + np.arange(table.item_kv_heads[item])
        assert (keys[np.ix_(pages, heads)] > 0).all() and (values[np.ix_(pages, heads)] > 0).all()
    items = slice(first, end)
    blocks = np.where(table.item_seq[items] < 0, 0, table.item_blocks[items])
    declared = attention_pages(table.item_rows[items], table.item_kv_heads[items], blocks, dims)
    assert len(np.unique(boxes["page"])) == declared.sum()
    order = boxes["item"].tolist()
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("shape", "tp", "matmul"),
    [("grouped", 1, "tensor"), ("wide", 1, "dots"), ("wide", 2, "tensor"), ("fewer heads than ranks", 4, "dots")],
)
@pytest.mark.parametrize("o", ["sharded", "replicated"])
def test_pages_are_the_regions_of_the_instruction(shape: str, tp: int, matmul: str, o: str) -> None:
    _, program, table = make(shape, tp, Options(matmul=matmul, o=o))
    seen = set()
    for segment in range(3):
        records, ranks = program.numbered(segment)
        for record, rank in zip(records, ranks, strict=True):
            name = BY_OPCODE[int(opcode(record))].name
            dims, view = program.rank_dims(int(rank)), table.rank(int(rank))
            boxes = plan(dims, view, record)
            words = record[OPERAND_WORD:][: len(BY_NAME[name].operands)].tolist()
            if name in MATMULS:
                check_pages(boxes)
                check_counts(boxes, name, dims, words)
                check_matmul(boxes, name, dims, words)
            elif name == "attention":
                if len(boxes["page"]):
                    check_pages(boxes)
                check_attention(boxes, dims, view, words[0])
            else:
                assert len(boxes["page"]) == 0
            seen.add(name)
    assert {"qkv_rope", "gate_up_silu", "lm_head", "attention"} <= seen
