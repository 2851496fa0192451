"""Tests that the shared-memory pages of an instruction hold all data that it reads and stores, and no other data."""

from pathlib import Path

import numpy as np
import pytest
from gpu_programs import make, plan
from numpy.typing import NDArray

from megakernel.cli.simulate import decode_step
from megakernel.isa import BUFFERS, Buffer, Dims, Dtype, Operation, Phase, Result, StepTable, Units
from megakernel.isa.record import OPERAND_WORD, phase_number
from megakernel.scheduler import Options
from megakernel.targets.launch import PAGE_BYTES, PAGES
from megakernel.targets.pages import output_columns

WEIGHTS, INPUTS, OUTPUT = range(3)


def covered(
    boxes: dict[str, NDArray[np.int32]], fill: int, buffer: Buffer, dims: Dims, z: int, rows: int = 0
) -> NDArray[np.int32]:
    """Return, for each element of matrix `z` of a buffer, the number of pages that hold it, as an array [rows, inner].
    Only pages of kind `fill` count (weights, inputs or output). A matrix has `rows` rows; 0: all rows of the buffer."""
    shape = BUFFERS[buffer].shape(dims, 16)
    count = np.zeros((rows or int(np.prod(shape[:-1])), shape[-1]), np.int32)
    width = 32 if BUFFERS[buffer].dtype is Dtype.F32 else 64
    for i in np.flatnonzero((boxes["fill"] == fill) & (boxes["buffer"] == buffer) & (boxes["z"] == z)):
        x, y = boxes["x"][i], boxes["y"][i]
        if boxes["pieces"][i]:
            count[y, x : x + boxes["bytes"][i] // 2] += 1
            assert x + boxes["bytes"][i] // 2 <= shape[-1]
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
        assert not boxes["whole"][here].any() or len(begin) == PAGE_BYTES // (
            2048 if boxes["pieces"][here][0] else 4096
        )


def check_matmul(boxes: dict[str, NDArray[np.int32]], phase: Phase, dims: Dims, words: list[int]) -> None:
    assert phase.weights is not None and phase.inputs is not None and phase.output is not None
    row, rows, col, cols = words
    dots, matrices = dims.worker.units == Units.DOTS, phase.matrices(dims.split)
    layer, columns = int(BUFFERS[phase.weights].layered), slice(col, col + cols)

    # Weights: each weight of the instruction's columns lies in exactly one page. For dot products (`dots`),
    # the gate and up matrices of a layer count as one matrix `z`. For tensor cores, they count as two matrices.
    halves = [(layer, phase.width(dims.split) * h) if dots else (matrices * layer + h, 0) for h in range(matrices)]
    height = phase.width(dims.split) * (matrices if dots else 1)
    seen = {z: covered(boxes, WEIGHTS, phase.weights, dims, z, height) for z in dict(halves)}
    for z, first in halves:
        assert (seen[z][first + col : first + col + cols] == 1).all()
        end = col + cols if dots else -(-(col + cols) // 32) * 32  # a box has 32 rows
        seen[z][first + col : first + end] = 0
    assert not any(count.any() for count in seen.values())

    # Inputs: an instruction loads its inputs once for each chunk of 256 columns (tensor cores) or each time that its
    # pages fill the ring (dot products). Inputs that the instruction normalises itself take no pages.
    count = covered(boxes, INPUTS, phase.inputs, dims, 0)
    if phase.norm is not None:
        times = 0
    elif dots:
        held = -(-rows * -(-count.shape[1] // 1024) // 8)
        pages = len(np.unique(boxes["page"][boxes["fill"] == WEIGHTS]))
        times = -(-pages // ((PAGES - held) // 2 * 2))
    else:
        times = -(-cols // (256 // matrices))
    assert (count[row : row + rows] == times).all()
    count[row : row + (rows if dots else -(-rows // 32) * 32)] = 0
    assert not count.any()

    # Results: each result lies in exactly one page. Other elements of the buffer lie in no page, because the store of
    # the page would overwrite them.
    if not output_columns(phase, dims):
        assert (boxes["fill"] != OUTPUT).all()
        return
    partial = phase.result is Result.PARTIAL
    height = dims.own_rows if partial else dims.bucket.tokens
    out = covered(boxes, OUTPUT, phase.output, dims, dims.split.rank if partial else 0, height)
    first = dims.reduce_place(row) if partial else row
    expected = np.zeros_like(out)
    expected[first : first + rows, columns] = 1
    # The rows for a rank's partial sums may continue after the last token. Pages may cover these further rows, because
    # nobody reads them.
    used = first + rows if partial else dims.bucket.tokens
    assert (out[:used] == expected[:used]).all()


def check_attention(boxes: dict[str, NDArray[np.int32]], dims: Dims, table: StepTable, slot: int) -> None:
    first, end = table.slot_items[slot], table.slot_items[slot + 1]
    assert sorted(set(boxes["item"].tolist())) == list(range(first, end))
    assert (boxes["fill"] == INPUTS).all()
    keys, values = (covered(boxes, INPUTS, b, dims, 1) for b in (Buffer.K_CACHE, Buffer.V_CACHE))
    keys = keys.reshape(-1, dims.split.rank_kv_heads, dims.model.head_dim, dims.bucket.kv_page)
    values = values.reshape(-1, dims.split.rank_kv_heads, dims.bucket.kv_page, dims.model.head_dim)
    for item in range(first, end):
        if table.item_seq[item] < 0:
            assert boxes["bytes"][boxes["item"] == item].tolist() == [0]
            continue
        blocks = np.arange(table.item_block[item], table.item_block[item] + table.item_blocks[item])
        pages = table.block_tables[table.item_seq[item]][blocks]
        heads = table.item_kv_head[item] + np.arange(table.item_kv_heads[item])
        assert (keys[np.ix_(pages, heads)] > 0).all() and (values[np.ix_(pages, heads)] > 0).all()
    order = boxes["item"].tolist()
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("shape", "tp", "matmul", "norm"),
    [
        ("grouped", 1, "tensor", "own"),
        ("grouped", 2, "tensor", "own"),
        ("wide", 1, "dots", "own"),
        ("wide", 1, "dots", "inside"),
        ("wide", 2, "tensor", "next"),
        ("fewer heads than ranks", 4, "dots", "own"),
        ("heads in two parts", 1, "tensor", "own"),
        ("heads in two parts", 4, "dots", "own"),
        ("whole pages", 1, "tensor", "own"),
        ("whole pages", 1, "dots", "own"),
    ],
)
@pytest.mark.parametrize("o", ["sharded", "replicated"])
def test_pages_are_the_regions_of_the_instruction(shape: str, tp: int, matmul: str, norm: str, o: str) -> None:
    _, program, table = make(shape, tp, Options(matmul=matmul, norm=norm, o=o))
    seen, whole = set(), set[tuple[int, bool]]()
    for segment in range(3):
        records, ranks = program.numbered(segment)
        for record, rank in zip(records, ranks, strict=True):
            phase = program.forward.by_number[int(phase_number(record))]
            dims, view = program.dims.on(int(rank)), table.rank(int(rank))
            boxes = plan(program.forward, dims, view, record)
            in_one = boxes["whole"] > 0
            whole |= set(zip(boxes["fill"][in_one].tolist(), (boxes["pieces"][in_one] > 0).tolist(), strict=True))
            words = record[OPERAND_WORD:][: len(phase.operands)].tolist()
            if phase.is_matmul:
                check_pages(boxes)
                check_matmul(boxes, phase, dims, words)
            elif phase.operation is Operation.ATTENTION:
                if len(boxes["page"]):
                    check_pages(boxes)
                check_attention(boxes, dims, view, words[0])
            else:
                assert len(boxes["page"]) == 0
            seen.add(phase.result if phase.is_matmul else phase.operation)
    assert {Result.HEADS, Result.GATED, Result.LOGITS, Operation.ATTENTION} <= seen
    if shape == "whole pages":
        # A page is whole if one copy loads all of it. Each pair has the kind of page, and whether it holds pieces of
        # rows (for dot products) instead of tiles. Attention has whole pages of inputs, and matmuls on tensor cores may
        # have them too.
        assert whole == {(WEIGHTS, matmul == "dots"), (INPUTS, False)}


def test_the_drawing_of_the_ring_has_the_pages_of_the_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/how-ring.svg shows the shared-memory pages that each kind of warp uses. Its script derives their order from
    `megakernel.isa`."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks" / "pictures")
    import how_it_works

    program = how_it_works.decode(3)
    table = decode_step(program.dims, 1, 128)
    drawn = 0
    for record in program.body.stream(how_it_works.WORKER):
        phase = program.forward.by_number[int(phase_number(record))]
        if phase.is_matmul:
            boxes = plan(program.forward, program.dims, table, record)
            pages = dict(zip(boxes["page"].tolist(), boxes["fill"].tolist(), strict=True))
            assert how_it_works.page_order(program, record) == "".join("WX"[pages[n]] for n in range(len(pages)))
            drawn += 1
    assert drawn == 4
