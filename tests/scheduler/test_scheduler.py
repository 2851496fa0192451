"""The scheduler: programs that the counters alone keep correct, on any interleaving, for any valid step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compiled import LLAMA_70B, SMALL, SMOLLM2, TINY, compiled, small_machine
from ground_truth import Failure, check

from megakernel import machine
from megakernel.errors import MegakernelError
from megakernel.isa import BY_NAME, BY_OPCODE, Access, Buffer, Dtype, Kind
from megakernel.isa.record import SIGNAL_WORD, WAIT_WORD, WAITS, opcode
from megakernel.model.config import LlamaConfig
from megakernel.program import Program
from megakernel.scheduler import compile_program, describe, disassemble
from megakernel.scheduler.compile import build_program
from megakernel.scheduler.derive import derive
from megakernel.scheduler.lower import Phase, Tasks, lower, program_dims


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("tokens", [1, 7])
def test_any_interleaving_gives_the_results_of_program_order(layers: int, workers: int, tokens: int) -> None:
    program = compiled(replace(SMALL, layers=layers), small_machine(workers), tokens, logit_rows=3)
    check(program, seed=layers * 100 + workers * 10 + tokens)


@pytest.mark.parametrize("workers", [1, 4])
def test_wide_tiles_over_many_kv_heads_share_counters(workers: int) -> None:
    """A record holds 8 signals; a tile here has a part of up to 30 KV heads."""
    config = replace(SMALL, heads=30, kv_heads=30, head_dim=2)
    program = compiled(config, replace(small_machine(workers), tile_cols=256), 4)
    attention = program.body.records[opcode(program.body.records) == BY_NAME["attention"].opcode]
    assert int(BY_NAME["attention"].columns(attention)["group_heads"][0]) > 1
    check(program, seed=workers, rounds=10)


def test_random_shapes() -> None:
    rng = np.random.default_rng(5)
    for seed in range(14):
        kv_heads, group, head_dim = (int(rng.integers(1, n)) for n in (5, 4, 3))
        config = LlamaConfig(
            vocab=int(rng.integers(2, 40)),
            hidden=int(rng.integers(1, 30)),
            ffn=int(rng.integers(1, 30)),
            layers=int(rng.integers(1, 4)),
            heads=kv_heads * group,
            kv_heads=kv_heads,
            head_dim=2 * head_dim,
            max_context=64,
        )
        target = small_machine(int(rng.integers(1, 7)), int(rng.integers(1, 6)))
        check(compiled(config, target, int(rng.integers(1, 14)), int(rng.integers(1, 7))), seed, rounds=2)


PHASES = (
    "attn_norm",
    "qkv_rope",
    "attention",
    "o_proj",
    "mlp_norm",
    "gate_up_silu",
    "down_proj",
    "final_norm",
    "lm_head",
    "sample",
)


@pytest.mark.parametrize("name", PHASES)
def test_every_wait_is_needed(name: str) -> None:
    """Without the waits of any one phase, some interleaving goes wrong."""
    program = compiled(SMALL, small_machine(3), 7, logit_rows=3)
    kind = BY_NAME[name]
    segment = "body" if kind.layered else "epilogue"
    records = getattr(program, segment).records.copy()
    records[opcode(records) == kind.opcode, WAIT_WORD : WAIT_WORD + WAITS] = 0
    broken = replace(program, **{segment: replace(getattr(program, segment), records=records)})
    with pytest.raises(Failure):
        check(broken, seed=1, rounds=20)


def test_a_lost_signal_is_a_deadlock() -> None:
    program = compiled(SMALL, small_machine(3), 7)
    records = program.body.records.copy()
    first = np.flatnonzero(opcode(records) == BY_NAME["gate_up_silu"].opcode)[0]
    records[first, SIGNAL_WORD] = 0
    with pytest.raises(Failure, match="deadlock"):
        check(replace(program, body=replace(program.body, records=records)), seed=1)


@pytest.mark.parametrize(
    ("config", "target", "tokens"),
    [
        (LLAMA_70B, machine.load("h100"), 1),
        (LLAMA_70B, machine.load("h100"), 300),
        (SMOLLM2, machine.host(1), 1),
        (SMOLLM2, machine.host(2), 257),
        (TINY, machine.host(2), 3),
        (replace(SMALL, kv_heads=1), machine.host(7), 200),
    ],
)
def test_every_output_is_written_once(config: LlamaConfig, target: machine.Machine, tokens: int) -> None:
    program = compiled(config, target, tokens, logit_rows=min(tokens, 9))
    d = program.dims
    for segment in (program.prologue, program.body, program.epilogue):
        for number in np.unique(opcode(segment.records)):
            kind = BY_OPCODE[int(number)]
            records = segment.records[opcode(segment.records) == number]
            accesses = kind.accesses(kind.columns(records), d)
            for access in (a for a in accesses if a.kind is not Kind.READ and kind.name != "attention"):
                rows, cols = int(access.row_end.max()), int(access.col_end.max())
                full = {
                    Buffer.X: d.hidden,
                    Buffer.H: d.hidden,
                    Buffer.ROPE: d.head_dim,
                    Buffer.Q: d.q_cols,
                    Buffer.K_CACHE: d.kv_cols,
                    Buffer.V_CACHE: d.kv_cols,
                    Buffer.ACT: d.ffn,
                    Buffer.Y: d.hidden,
                    Buffer.LOGITS: d.vocab,
                    Buffer.TOKENS_OUT: 1,
                    Buffer.LOGPROBS_OUT: 1,
                }[access.buffer]
                assert (rows, cols) == (d.tokens if segment is not program.epilogue else d.logit_rows, full)
                times = np.zeros((rows + 1, cols + 1), dtype=np.int32)  # differences of a 2-D count
                for r, c, sign in ((0, 0, 1), (0, 1, -1), (1, 0, -1), (1, 1, 1)):
                    at = ((access.row, access.row_end)[r], (access.col, access.col_end)[c])
                    np.add.at(times, at, sign)
                assert (times.cumsum(axis=0).cumsum(axis=1)[:-1, :-1] == 1).all(), (kind.name, access.buffer)


def test_attention_comes_after_all_qkv_of_its_stream_and_each_worker_has_its_slot() -> None:
    program = compiled(SMALL, small_machine(5), 13)
    qkv, attention = BY_NAME["qkv_rope"].opcode, BY_NAME["attention"].opcode
    for worker in range(5):
        stream = program.body.stream(worker)
        (at,) = np.flatnonzero(opcode(stream) == attention)
        assert stream[at, 1] == worker
        assert (np.flatnonzero(opcode(stream) == qkv) < at).all()


def test_work_is_spread_evenly() -> None:
    program = compiled(SMOLLM2, machine.host(2), 1)
    for name in ("qkv_rope", "o_proj", "gate_up_silu", "down_proj", "lm_head"):
        kind = BY_NAME[name]
        segment = program.body if kind.layered else program.epilogue
        cols = [
            int(kind.columns(s[opcode(s) == kind.opcode])["cols"].sum()) for s in (segment.stream(0), segment.stream(1))
        ]
        assert cols[0] == cols[1] > 0, name
    program = compiled(LLAMA_70B, machine.load("h100"), 2048)
    outputs = []
    for worker in range(132):
        s = program.body.stream(worker)
        s = s[opcode(s) == BY_NAME["gate_up_silu"].opcode]
        outputs.append(int((s[:, 2] * s[:, 4]).sum()))
    assert max(outputs) < 1.15 * np.mean(outputs)


def test_llama_70b_for_132_workers_is_about_a_megabyte() -> None:
    program = compiled(LLAMA_70B, machine.load("h100"), 2048, logit_rows=64)
    assert len(program.to_bytes()) < 1.5e6
    figures = describe(program)
    assert figures["instructions"] == program.instructions == sum(figures["by_opcode"].values())
    assert figures["all_to_all_per_layer"] == 0
    assert max(figures["waits_per_instruction"]) == 1


def test_one_row_block_joins_all_to_all_between_phases() -> None:
    figures = describe(compiled(SMOLLM2, machine.host(2), 1))
    # The norms are one instruction each, so what is left: three head groups of q, k, v before attention, attention
    # before the O projection, gate and up before the down projection.
    assert figures["all_to_all_per_layer"] == 5
    assert describe(compiled(SMOLLM2, machine.host(1), 1))["all_to_all_per_layer"] == 0


def test_same_arguments_give_the_same_bytes_and_text() -> None:
    one, two = (compiled(SMALL, small_machine(3), 7) for _ in range(2))
    assert one.to_bytes() == two.to_bytes()
    assert list(disassemble(one)) == list(disassemble(two))


def test_disassembly_names_operands_counters_and_totals() -> None:
    text = list(disassemble(compiled(SMOLLM2, machine.host(3), 1)))
    down = next(line for line in text if "down_proj" in line)
    norm = next(line for line in text if "attn_norm" in line)
    assert "row=0 rows=1 col=0 cols=192" in down
    counter = down.rsplit("#", 1)[1].removesuffix("+")
    assert f"wait #{counter}=3 (2 in layer 0)" in norm
    assert sum("qkv_rope" in line for line in text) == 3
    assert any("attention" in line and "[table]" in line for line in text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tp": 3}, "tensor parallel"),
        ({"tokens": 0}, "tokens"),
        ({"logit_rows": -1}, "logit_rows"),
        ({"tokens": 10**9}, "at most"),
    ],
)
def test_bad_arguments_are_one_sentence(change: dict[str, int], text: str) -> None:
    arguments = {"tokens": 1, "logit_rows": 1, "max_seqs": 1, "max_context": 8, "tp": 1} | change
    with pytest.raises(MegakernelError, match=text):
        compile_program(TINY, machine.host(1), dtype=Dtype.F32, **arguments)


# -- artificial instructions: what no Llama program needs yet


def _column_phase(name: str, buffer: Buffer, kind: Kind, col: list[int], cols: list[int], block: list[int]):
    """Tasks that touch columns of a buffer, with the blocks that they are said to lie in."""

    def accesses(c, dims):
        box = Access(buffer, kind, c["row"], c["row"] + c["rows"], c["col"], c["col"] + c["cols"])
        return [box]

    instruction = replace(BY_NAME[name], accesses=accesses)
    zero = np.zeros(len(col), dtype=np.int32)
    columns = {"row": zero, "rows": zero + 1, "col": np.array(col, np.int32), "cols": np.array(cols, np.int32)}
    return Phase(instruction, columns, np.array(block, np.int32))


def _artificial(readers: list[tuple[int, int]], blocks: int) -> tuple[Tasks, machine.Machine]:
    """Twelve tasks in some blocks write a column each; the readers, each a block, read (first column, columns)."""
    target = small_machine(4)
    config = replace(SMALL, layers=2)
    dims = program_dims(config, target, dtype=Dtype.F32, tokens=1, logit_rows=1, max_seqs=1, max_context=8)
    writers = _column_phase(
        "qkv_rope", Buffer.ACT, Kind.WRITE, list(range(12)), [1] * 12, [c * blocks // 12 for c in range(12)]
    )
    read = _column_phase(
        "o_proj", Buffer.ACT, Kind.READ, [c for c, _ in readers], [n for _, n in readers], list(range(len(readers)))
    )
    llama = lower(dims, target)
    return Tasks(dims, llama.prologue, [writers, read], llama.epilogue[2:]), target


def _run_artificial(tasks: Tasks, target: machine.Machine) -> Program:
    program = build_program(tasks, target)
    table = BY_OPCODE | {p.instruction.opcode: p.instruction for p in tasks.body}
    check(program, seed=3, instructions=table)
    return program


def test_a_block_waits_only_for_blocks_that_it_touches() -> None:
    program = _run_artificial(*_artificial([(c, 3) for c in range(0, 12, 3)], 4))
    readers = program.body.records[opcode(program.body.records) == BY_NAME["o_proj"].opcode]
    waits = readers[:, WAIT_WORD : WAIT_WORD + WAITS]
    assert (np.count_nonzero(waits, axis=1) == 1).all()
    assert len(np.unique(waits[:, 0])) == 4
    assert describe(program)["all_to_all_per_layer"] == 0


def test_joins_stand_in_for_more_waits_than_a_record_holds() -> None:
    tasks, target = _artificial([(0, 12), *((c, 1) for c in range(12))], 12)
    program = _run_artificial(tasks, target)
    names = opcode(program.body.records)
    assert (names == BY_NAME["join"].opcode).sum() == 1
    assert describe(program)["waits_per_instruction"][8] >= 1


def test_edges_are_implied_by_kept_ones_or_kept() -> None:
    """Every conflict between neighbouring phases is an edge or follows from edges: one row block of a real layer."""
    target = small_machine(3)
    dims = program_dims(SMALL, target, dtype=Dtype.F32, tokens=3, logit_rows=1, max_seqs=1, max_context=8)
    found = derive(lower(dims, target))
    names = {(found.groups[a].phase, found.groups[b].phase) for a, b in found.within if found.groups[a].segment == 1}
    assert names == {(i, i + 1) for i in range(6)}
