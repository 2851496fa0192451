"""Tests of shared-memory pages: how many each instruction takes, whether they fit into the ring, and how programs use
them."""

from dataclasses import replace

import numpy as np
import pytest
from compiled import compiled as compiled_for
from compiled import of
from mutate import edit_operand, rows_of
from sizes import least_dims

from megakernel import machine as machines
from megakernel.errors import MegakernelError
from megakernel.isa import CONTROL, Dtype, Operation, Units
from megakernel.isa.record import phase_number
from megakernel.model import families, load_config
from megakernel.model.config import ModelConfig
from megakernel.program import Program
from megakernel.scheduler import Options, Spec, describe, passes
from megakernel.scheduler.verify import verify
from megakernel.targets import launch, pages
from megakernel.targets.pages import attention_pages, matmul_pages

LLAMA_1B = load_config("random:llama-3.2-1b")
LLAMA_70B = load_config("random:llama-3.1-70b")
H200 = machines.load("h200")


def compiled(tokens: int, config: ModelConfig = LLAMA_1B, logit_rows: int = 1, tp: int = 1, **options: str) -> Program:
    two = replace(config, layers=2)
    return compiled_for(two, H200, tokens, logit_rows, tp, Options(**options), max_context=1024)


# By phase of Llama 3.2 1B: the rows and columns of a tile, and its pages of weights, of inputs and of outputs, and how
# many it holds at once. The first tiles are for tensor cores, and the others for dot products.
@pytest.mark.parametrize(
    ("name", "tile", "taken"),
    [
        ("qkv_rope", (128, 256), (64, 32, 0, 12)),
        ("o_proj", (40, 384), (96, 64, 12, 12)),
        ("gate_up_silu", (128, 256), (128, 64, 4, 12)),
        ("qkv_rope", (1, 96), (24, 2, 0, 13)),
        ("o_proj", (3, 24), (8, 1, 0, 9)),
        ("gate_up_silu", (1, 96), (48, 4, 0, 13)),
        ("down_proj", (3, 24), (32, 12, 0, 13)),
        ("gate_up_silu+norm", (1, 96), (48, 0, 0, 12)),
        ("qkv_rope+norm", (3, 24), (8, 0, 0, 8)),
    ],
)
def test_pages_of_tiles(name: str, tile: tuple[int, int], taken: tuple[int, ...]) -> None:
    units = Units.DOTS if tile[1] < 128 else Units.TENSOR
    dims = least_dims(LLAMA_1B, Dtype.BF16).changed(ring_pages=launch.PAGES, units=int(units))
    forward = passes.apply(families.forward(LLAMA_1B), dims.split, "inside" if "norm" in name else "own")
    sizes = forward.by_name[name.removesuffix("+norm")], *np.array(tile)[:, None]
    found = matmul_pages(*sizes, dims)
    assert tuple(int(n[0]) for n in (found.weights, found.inputs, found.output, found.held)) == taken
    alone = matmul_pages(*sizes, dims.changed(ring_pages=launch.PAGES - 1))  # whose build keeps inputs elsewhere
    assert units is Units.TENSOR or (alone.weights, alone.inputs, alone.held_inputs) == (taken[0], 0, 0)


@pytest.mark.parametrize(
    ("heads", "item", "taken"),
    [
        ((64, 4, 8), (1, 8, 3), 8 * 3 * 2),  # one pass loads K and V of all 8 heads
        ((64, 4, 8), (32, 1, 3), 3 * 2),
        ((64, 4, 8), (40, 1, 2), 2 * 2 * 2),  # two passes
        ((128, 4, 8), (7, 3, 5), 3 * 5 * 4),
        ((256, 4, 1), (32, 1, 3), 2 * 3 * 8),  # a head has two parts
        ((80, 8, 1), (1, 1, 3), 3 * 4),
        ((80, 8, 1), (1, 1, 0), 1),
    ],
)
def test_pages_of_attention(heads: tuple[int, int, int], item: tuple[int, ...], taken: int) -> None:
    """`heads` has their size, the query heads of each KV head, and the KV heads; `item` has rows, KV heads and blocks.
    A head is loaded once for each pass that it is in."""
    head_dim, group, kv_heads = heads
    dims = least_dims(LLAMA_1B, Dtype.BF16).changed(heads=group * kv_heads, kv_heads=kv_heads, head_dim=head_dim)
    assert attention_pages(*np.array(item)[:, None], dims) == taken


@pytest.mark.parametrize(("tokens", "tp"), [(1, 1), (4, 1), (7, 1), (300, 1), (1, 8), (40, 8), (600, 4)])
def test_programs_for_gpus_are_made_of_boxes_and_fit_the_ring(tokens: int, tp: int) -> None:
    program = compiled(tokens, logit_rows=min(tokens, 5), tp=tp)
    d = program.dims
    assert (d.bucket.kv_page, d.bucket.kv_block, d.worker.ring_pages + (tokens == tp == 1)) == (128, 128, launch.PAGES)
    assert verify(program).violations == []
    assert d.worker.units == Units.DOTS or d.bucket.row_block % 32 == 0 or d.bucket.row_block == tokens
    for phase in (phase for phase in program.forward.body if phase.is_matmul):
        unit = 8 if d.worker.units == Units.DOTS else max(32, pages.output_columns(phase, d))
        assert (phase.columns(of(program, phase.name))["col"] % unit == 0).all()


def test_one_row_is_read_by_dots_once_on_all_sms() -> None:
    program = compiled(1)
    assert describe(program)["matmul"] == "dots"
    for segment, phases in ((program.body, program.forward.body), (program.epilogue, program.forward.epilogue)):
        worker = np.repeat(np.arange(program.workers), np.diff(segment.offsets))
        for phase in (phase for phase in phases if phase.is_matmul):
            rows = phase_number(segment.records) == phase.number
            cols = phase.columns(segment.records[rows])["cols"]
            work = np.bincount(worker[rows], weights=cols, minlength=program.workers)
            assert work.max() <= 1.04 * work.mean(), phase.name


def test_an_engine_settles_its_matmuls_by_its_largest_bucket() -> None:
    def settled(tokens: int, config: ModelConfig = LLAMA_1B, tp: int = 1, target: machines.Machine = H200) -> str:
        return Spec(config, target, Dtype.BF16, tokens, 1, 1, 128, tp).matmul

    # Matmuls as dot products have up to four input pages, which hold 32 pieces of 1,024 elements. The longest input row
    # of the 1B model has 8,192 elements (8 pieces), so four rows fit. The longest row of the 70B model has 28,672
    # elements (28 pieces), so one row fits. On 8 ranks, each has only 3,584 of the 28,672 elements. The longest row is
    # then the residual's, with 8,192 elements, so four rows fit.
    assert [settled(n) for n in (1, 4, 5)] == ["dots", "dots", "tensor"]
    assert [settled(n, LLAMA_70B) for n in (1, 2)] == ["dots", "tensor"]
    assert [settled(n, LLAMA_70B, tp=8) for n in (4, 5)] == ["dots", "tensor"]
    assert settled(1, target=machines.host(2)) == "auto"  # a CPU has no such choice
    said = Spec(LLAMA_1B, H200, Dtype.BF16, 900, 1, 1, 128, options=Options(matmul="dots"))
    assert said.matmul == "dots"


def test_dots_cut_a_larger_bucket_into_blocks_that_they_hold() -> None:
    program = compiled(19, logit_rows=9, matmul="dots")
    assert program.dims.worker.units == Units.DOTS and program.dims.bucket.row_block == 4
    head = next(phase for phase in program.forward.epilogue if phase.is_matmul)
    assert head.columns(of(program, head.name))["rows"].max() == 4
    assert verify(program).violations == []


def test_dots_that_do_not_hold_a_row_are_refused() -> None:
    with pytest.raises(MegakernelError, match=r"as dot products.*--matmul tensor"):
        compiled(1, replace(LLAMA_1B, ffn=32768 + 32), matmul="dots")
    assert compiled(1, replace(LLAMA_1B, ffn=32768 + 32)).dims.worker.units == Units.TENSOR


def test_a_cpu_knows_neither_pages_nor_dots() -> None:
    host = compiled_for(LLAMA_1B, machines.host(2), 1, options=Options(matmul="dots"), max_context=256)
    assert (host.dims.worker.ring_pages, host.dims.worker.units) == (0, Units.CORE) and describe(host)["matmul"] is None


def names(program: Program, instruction: str, *complaints: str) -> None:
    """Check that the verifier reports each complaint about an instruction, whose name begins with `instruction`."""
    found = verify(program).violations
    for complaint in complaints:
        assert any(v.startswith(instruction) and complaint in v for v in found), found[:3]


def operand(program: Program, name: str, which: str, value: int) -> Program:
    return edit_operand(program, "body", rows_of(program, "body", name)[0], which, value)


def test_an_instruction_that_holds_more_than_the_ring_is_named() -> None:
    tensor, few = compiled(300), compiled(2, norm="own")
    assert (tensor.dims.worker.units, few.dims.worker.units) == (Units.TENSOR, Units.DOTS)
    cases = ((tensor, "qkv_rope(", 12, 11), (tensor, "attention", 2, 1), (few, "qkv_rope(", 3, 2))
    for program, name, holds, has in cases:
        small = replace(program, dims=program.dims.changed(ring_pages=has))
        names(small, name, f"holds {holds} pages at once, but the ring has {has}")


def test_rows_that_no_page_or_dot_holds_are_named() -> None:
    names(operand(compiled(300), "qkv_rope", "rows", 129), "qkv_rope(row=0, rows=129", "more than 128 rows")
    few = compiled(4)
    names(replace(few, dims=few.dims.changed(ffn=8192 + 1024, tokens=4)), "down_proj", "more than 3 rows")
    inside = operand(compiled(4, norm="inside"), "qkv_rope", "rows", 5)
    names(inside, "qkv_rope(row=0, rows=5", "more rows than a matmul can normalise")


@pytest.mark.parametrize(
    ("name", "which", "change"), [("gate_up_silu", "cols", -8), ("down_proj", "rows", -8), ("o_proj", "cols", 16)]
)
def test_a_tile_whose_boxes_reach_into_the_next_is_named(name: str, which: str, change: int) -> None:
    program = compiled(300)
    old = int(program.forward.by_name[name].columns(of(program, name))[which][0])
    names(operand(program, name, which, old + change), f"{name}(", "is not made of boxes of 32 rows")


@pytest.mark.parametrize("queue", ["none", "attention", "body"])
@pytest.mark.parametrize("tp", [1, 2])
def test_phases_hold_each_instruction_once(tp: int, queue: str) -> None:
    program = compiled(40, tp=tp, queue=queue)
    for index, segment in enumerate((program.prologue, program.body, program.epilogue)):
        phases = program.phases(index)
        numbers = [np.unique(phase_number(phase.records)).tolist() for phase in phases]
        assert all(len(number) == 1 for number in numbers) and sorted(numbers) == numbers
        every = np.concatenate([segment.records, program.queues.records if index == 1 else segment.records[:0]])
        control = [phase.number for phase in CONTROL]
        wanted = every[~np.isin(phase_number(every), control)]
        got = np.concatenate([phase.records for phase in phases])
        assert sorted(map(bytes, got)) == sorted(map(bytes, wanted))
        for phase in phases:
            assert len(phase.offsets) == tp * program.workers + 1 and phase.offsets[-1] == len(phase.records)
        if queue == "none":
            for s in range(tp * program.workers):
                own = np.concatenate([phase.stream(s) for phase in phases])
                stream = segment.stream(s)
                assert sorted(map(bytes, own)) == sorted(bytes(r) for r in stream if r[0] not in control)
        elif index == 1:
            [number] = program.forward.numbers(Operation.ATTENTION)
            attention = next(p for p in phases if phase_number(p.records[0]) == number)
            lengths = np.diff(attention.offsets)
            assert lengths.max() - lengths.min() <= 1
