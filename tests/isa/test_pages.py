"""Pages of shared memory: how many each instruction takes, that they fit, and programs made for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from gpu_programs import make, plan
from mutate import edit

from megakernel import machine as machines
from megakernel.errors import MegakernelError
from megakernel.isa import BY_NAME, BY_OPCODE, INSTRUCTIONS, Dtype, Matmul, attention_pages, launch, matmul_pages, pages
from megakernel.isa.record import OPERAND_WORD, opcode
from megakernel.model import load_config
from megakernel.model.checkpoint import weight_dims
from megakernel.model.config import LlamaConfig
from megakernel.program import Program
from megakernel.scheduler import Options, compile_program, describe, settle
from megakernel.scheduler.verify import verify

LLAMA_1B = load_config("random:llama-3.2-1b")
LLAMA_70B = load_config("random:llama-3.1-70b")
MATMULS = [i for i in INSTRUCTIONS if i.matmul]
H200 = machines.load("h200")


def compiled(
    tokens: int,
    config: LlamaConfig = LLAMA_1B,
    logit_rows: int = 1,
    tp: int = 1,
    max_context: int = 1024,
    **options: str,
) -> Program:
    return compile_program(
        replace(config, layers=2),
        H200,
        dtype=Dtype.BF16,
        tokens=tokens,
        logit_rows=logit_rows,
        max_seqs=4,
        max_context=max_context,
        tp=tp,
        options=Options(**options),
    )


def tensor_stages(m: Matmul, cols: int, inner: int, per_page: int) -> Iterator[list[str]]:
    """The pages of a tile on matrix units, k step by k step, and those of each chunk's output."""
    wide = 256 // m.width
    for first in range(0, cols, wide):
        chunk = min(wide, cols - first)
        for _ in range(0, inner, 64):
            yield ["inputs", *["weights" for _ in range(m.width) for _ in range(0, chunk, 128)]]
        yield from (["output"] for _ in range(0, chunk, per_page or chunk) if per_page)


def dot_laps(m: Matmul, rows: int, cols: int, inner: int) -> Iterator[list[str]]:
    """The pages of a tile of dots, lap by lap of a ring of 13."""
    inputs = ["inputs" for _ in range(0, rows * len(range(0, inner, 1024)), 8)]
    weights = [
        "weights"
        for _ in range(0, cols, 16 // m.width)
        for _ in range(0, inner, 1024)
        for _ in ("even rows or gate", "odd rows or up")
    ]
    room = 13 - len(inputs)
    room -= room % 2
    for first in range(0, len(weights), room):
        yield weights[first : first + room] + inputs


@pytest.mark.parametrize("dots", [0, 1])
@pytest.mark.parametrize("name", [i.name for i in MATMULS])
def test_counts_are_those_of_the_walk(name: str, dots: int) -> None:
    m = BY_NAME[name].matmul
    assert m
    rng = np.random.default_rng(dots)
    for _ in range(30):
        inner, cols = int(rng.integers(1, 9000)), 8 * int(rng.integers(1, 120))
        rows = int(rng.integers(1, (pages.dot_rows(inner) if dots else 128) + 1))
        d = replace(weight_dims(LLAMA_1B, Dtype.BF16), pages=13, dots=dots, hidden=inner, ffn=inner)
        d = replace(d, head_dim=inner, heads=1, kv_heads=1)
        taken = matmul_pages(m, np.array([rows]), np.array([cols]), d)
        if dots:
            laps = list(dot_laps(m, rows, cols, inner))
            held = max(map(len, laps))
        else:
            laps = list(tensor_stages(m, cols, inner, m.output_columns(d)))
            steps = [len(s) for s in laps if s != ["output"]]
            held = max(sum(steps[i : i + 2]) for i in range(len(steps)))
        count = Counter(page for lap in laps for page in lap)
        assert (taken.weights[0], taken.inputs[0], taken.output[0]) == tuple(
            count[kind] for kind in ("weights", "inputs", "output")
        )
        assert taken.held[0] == held <= launch.PAGES


def test_attention_loads_a_head_once_for_each_pass_that_it_is_in() -> None:
    rng = np.random.default_rng(2)
    for _ in range(60):
        group, heads, head_dim = int(rng.integers(1, 9)), int(rng.integers(1, 9)), int(rng.choice([64, 80, 128]))
        d = replace(weight_dims(LLAMA_1B, Dtype.BF16), heads=group * heads, kv_heads=heads, head_dim=head_dim)
        rows, blocks = int(rng.integers(1, 200)), int(rng.integers(0, 9))
        units = [head for head in range(heads) for _ in range(0, rows * group, 16)]
        loads = sum(len(set(units[first : first + 8])) for first in range(0, len(units), 8))
        one = (np.array([n], np.int32) for n in (rows, heads, blocks))
        assert attention_pages(*one, d)[0] == (loads * blocks * (2 if head_dim <= 64 else 4) or 1)


@pytest.mark.parametrize(("shape", "tp", "matmul"), [("wide", 1, "dots"), ("grouped", 2, "tensor")])
def test_counts_are_those_of_the_interpreter(shape: str, tp: int, matmul: str) -> None:
    _, program, table = make(shape, tp, Options(matmul=matmul))
    seen = set()
    for segment in (program.body, program.epilogue):
        for stream, record in [(s, r) for s in range(tp * program.workers) for r in segment.stream(s)]:
            kind, rank = BY_OPCODE[int(opcode(record))], stream // program.workers
            d, t = program.rank_dims(rank), table.rank(rank)
            taken = plan(d, t, record)
            page, first = np.unique(taken["page"], return_index=True)
            found = np.bincount(taken["fill"][first], minlength=3).tolist()
            c = kind.columns(record[None])
            if kind.matmul:
                counts = matmul_pages(kind.matmul, c["rows"], c["cols"], d)
                assert found == [counts.weights[0], counts.inputs[0], counts.output[0]], kind.name
            elif kind.name == "attention":
                items = slice(*t.slot_items[c["slot"][0] : c["slot"][0] + 2])
                counts = attention_pages(t.item_rows[items], t.item_kv_heads[items], t.item_blocks[items], d)
                assert found == [0, counts.sum(), 0]
            else:
                assert not len(page)
            seen.add(kind.name)
    assert {"qkv_rope", "attention", "gate_up_silu", "lm_head"} < seen


@pytest.mark.parametrize(("tokens", "tp"), [(1, 1), (4, 1), (7, 1), (300, 1), (1, 8), (40, 8), (600, 4)])
def test_programs_for_gpus_are_made_of_boxes_and_fit_the_ring(tokens: int, tp: int) -> None:
    program = compiled(tokens, logit_rows=min(tokens, 5), tp=tp)
    d = program.dims
    assert (d.page, d.kv_block, d.pages) == (128, 128, launch.PAGES)
    assert verify(program).violations == []
    assert d.dots or d.row_block % 32 == 0 or d.row_block == tokens
    for i in (i for i in MATMULS if i.layered):
        for rank in range(tp):
            own = slice(*program.body.offsets[[rank * program.workers, (rank + 1) * program.workers]])
            records = program.body.records[own]
            c = i.columns(records[opcode(records) == i.opcode])
            assert i.matmul and (c["col"] % (8 if d.dots else max(32, i.matmul.output_columns(d))) == 0).all()


def test_one_row_is_read_by_dots_once_on_all_sms() -> None:
    program = compiled(1)
    assert describe(program)["matmul"] == "dots"
    for i in MATMULS:
        segment = program.body if i.layered else program.epilogue
        worker = np.repeat(np.arange(program.workers), np.diff(segment.offsets))
        rows = opcode(segment.records) == i.opcode
        work = np.bincount(worker[rows], weights=i.columns(segment.records[rows])["cols"], minlength=program.workers)
        if rows.any():
            assert work.max() <= 1.04 * work.mean(), i.name


def test_an_engine_settles_its_matmuls_by_its_largest_bucket() -> None:
    def settled(tokens: int, config: LlamaConfig = LLAMA_1B, tp: int = 1, target: machines.Machine = H200) -> str:
        return settle(Options(), config, target, tp=tp, tokens=tokens).matmul

    # 8,192 elements are 8 pieces a row, and four pages hold 32; 28,672 are 28, and 3,584 of 8,192 are 8.
    assert [settled(n) for n in (1, 4, 5)] == ["dots", "dots", "tensor"]
    assert [settled(n, LLAMA_70B) for n in (1, 2)] == ["dots", "tensor"]
    assert [settled(n, LLAMA_70B, tp=8) for n in (4, 5)] == ["dots", "tensor"]
    assert settled(1, target=machines.host(2)) == "tensor"
    assert settle(Options(matmul="dots"), LLAMA_1B, H200, tp=1, tokens=900).matmul == "dots"


def test_dots_cut_a_larger_bucket_into_blocks_that_they_hold() -> None:
    program = compiled(19, logit_rows=9, matmul="dots")
    assert program.dims.dots == 1 and program.dims.row_block == 4
    head = BY_NAME["lm_head"]
    rows = opcode(program.epilogue.records) == head.opcode
    assert head.columns(program.epilogue.records[rows])["rows"].max() == 4
    assert verify(program).violations == []


def test_dots_that_do_not_hold_a_row_are_refused() -> None:
    with pytest.raises(MegakernelError, match=r"as dots.*--matmul tensor"):
        compiled(1, replace(LLAMA_1B, ffn=32768 + 32), matmul="dots")
    assert compiled(1, replace(LLAMA_1B, ffn=32768 + 32)).dims.dots == 0


def test_a_cpu_knows_neither_pages_nor_dots() -> None:
    host = compile_program(
        LLAMA_1B, machines.host(2), dtype=Dtype.BF16, tokens=1, logit_rows=1, max_seqs=1, max_context=256,
        options=Options(matmul="dots"),
    )  # fmt: skip
    assert (host.dims.pages, host.dims.dots) == (0, 0) and describe(host)["matmul"] is None


# -- what the verifier says


def violations(program: Program) -> list[str]:
    found = verify(program).violations
    assert found
    return found


def operand(program: Program, name: str, which: str, value: int) -> Program:
    kind = BY_NAME[name]
    row = int(np.flatnonzero(opcode(program.body.records) == kind.opcode)[0])
    return edit(program, "body", row, OPERAND_WORD + kind.operands.index(which), value)


def test_an_instruction_that_holds_more_than_the_ring_is_named() -> None:
    program = compiled(300)
    assert program.dims.dots == 0
    small = replace(program, dims=replace(program.dims, pages=5))
    assert all(v.startswith("gate_up_silu(") and "holds 6 pages at once, of 5" in v for v in violations(small)[:-1])
    smaller = replace(program, dims=replace(program.dims, pages=1))
    assert any(v.startswith("attention") and "holds 2 pages at once, of 1" in v for v in violations(smaller))
    few = compiled(1)
    small = replace(few, dims=replace(few.dims, pages=2))
    assert any(v.startswith("qkv_rope(") and "holds 3 pages at once, of 2" in v for v in violations(small))


def test_rows_that_no_page_or_dot_holds_are_named() -> None:
    tall = operand(compiled(300), "qkv_rope", "rows", 129)
    assert any("qkv_rope(row=0, rows=129" in v and "more than 128 rows" in v for v in violations(tall))
    few = compiled(4)
    deep = replace(few, dims=replace(few.dims, ffn=8192 + 1024, tokens=4))
    assert any("down_proj" in v and "more than 3 rows" in v for v in violations(deep))


@pytest.mark.parametrize(
    ("name", "which", "change"), [("gate_up_silu", "cols", -8), ("down_proj", "rows", -8), ("o_proj", "cols", 16)]
)
def test_a_tile_whose_boxes_reach_into_the_next_is_named(name: str, which: str, change: int) -> None:
    program = compiled(300)
    kind = BY_NAME[name]
    row = int(np.flatnonzero(opcode(program.body.records) == kind.opcode)[0])
    old = int(kind.columns(program.body.records[[row]])[which][0])
    found = violations(operand(program, name, which, old + change))
    assert any(v.startswith(f"{name}(") and "is not made of boxes of 32 rows" in v for v in found)


# -- phases


@pytest.mark.parametrize("queue", ["none", "attention", "body"])
@pytest.mark.parametrize("tp", [1, 2])
def test_phases_hold_each_instruction_once_kind_by_kind(tp: int, queue: str) -> None:
    program = compiled(40, tp=tp, queue=queue)
    for index, segment in enumerate((program.prologue, program.body, program.epilogue)):
        phases = program.phases(index)
        kinds = [np.unique(opcode(phase.records)).tolist() for phase in phases]
        assert all(len(kind) == 1 for kind in kinds) and sorted(kinds) == kinds
        every = np.concatenate([segment.records, program.queues.records if index == 1 else segment.records[:0]])
        control = [i.opcode for i in INSTRUCTIONS if i.family.name == "CONTROL"]
        wanted = every[~np.isin(opcode(every), control)]
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
            attention = next(p for p in phases if BY_OPCODE[int(opcode(p.records)[0])].name == "attention")
            lengths = np.diff(attention.offsets)
            assert lengths.max() - lengths.min() <= 1
