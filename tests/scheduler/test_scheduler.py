"""Counters alone keep the scheduler's programs correct, in any interleaving of the instructions and for any valid step.
The tests cover one rank and several, every way to divide the work, and shards of equal, unequal and zero size."""

from dataclasses import replace

import numpy as np
import pytest
from commands import Cli
from compiled import LLAMA_70B, SMALL, SMOLLM2, TINY, compiled, of, random_model, small_machine
from ground_truth import Failure, check
from msgspec import structs
from mutate import edit, rows_of

from megakernel import machine
from megakernel.errors import MegakernelError
from megakernel.isa import DRAIN, OPERATIONS, Buffer, Dims, Dtype, Forward, Operation, Phase, Result, Rows
from megakernel.isa.access import Access, Columns, Kind
from megakernel.isa.record import WAIT_WORD, WAITS, phase_number
from megakernel.model.config import ModelConfig
from megakernel.program import Program
from megakernel.roofline import step_work
from megakernel.scheduler import Options, Spec, compile_program, describe, disassemble
from megakernel.scheduler.candidates import lowered
from megakernel.scheduler.compile import build_program
from megakernel.scheduler.derive import derive
from megakernel.scheduler.place import _first_free
from megakernel.scheduler.tasks import PhaseTasks
from megakernel.scheduler.verify import verify


@pytest.mark.parametrize(("layers", "workers", "tokens"), [(1, 2, 7), (3, 2, 1), (1, 40, 1), (3, 40, 7)])
def test_any_interleaving_gives_the_results_of_program_order(layers: int, workers: int, tokens: int) -> None:
    program = compiled(replace(SMALL, layers=layers), small_machine(workers), tokens, logit_rows=3)
    check(program, seed=layers * 100 + workers * 10 + tokens)
    assert verify(program).violations == []


@pytest.mark.parametrize("workers", [1, 4])
def test_wide_tiles_over_many_kv_heads_share_counters(workers: int) -> None:
    """One attention instruction processes several KV heads if a QKV tile would otherwise signal too many counters. A
    record has space for 8 signals, and here a tile contains columns of up to 30 KV heads."""
    config = replace(SMALL, heads=30, kv_heads=30, head_dim=2)
    program = compiled(config, small_machine(workers).with_tiles(cols=256), 4)
    attention = of(program, "attention")
    assert int(program.forward.by_name["attention"].columns(attention)["group_heads"][0]) > 1
    check(program, seed=workers, rounds=10)


@pytest.mark.parametrize("family", ["olmo3", "gemma3_text"])
def test_tasks_with_all_of_eight_kv_heads_have_a_signal_left(family: str) -> None:
    """If the RoPE of layers differs, tasks that compute k also signal the phase that overwrites the RoPE table."""
    config = replace(SMALL, family=family, heads=8, kv_heads=8, head_dim=2, post_norms=True, local_theta=1e4)
    config = replace(config, window=3, full_layers=(1,), whole_norms=family == "olmo3")
    program = compiled(config, small_machine(1).with_tiles(cols=256), 4)
    assert verify(program).violations == []
    check(program, seed=1)


ALL_WAITS = slice(WAIT_WORD, WAIT_WORD + WAITS)
PHASES = ["attn_norm", "qkv_rope", "attention", "o_proj", "mlp_norm", "gate_up_silu", "down_proj"]
PHASES += ["final_norm", "lm_head", "sample"]


@pytest.mark.parametrize("name", PHASES)
def test_every_wait_is_needed(name: str) -> None:
    program = compiled(SMALL, small_machine(3), 7, logit_rows=3, options=Options(norm="own"))
    segment = "body" if program.forward.by_name[name] in program.forward.body else "epilogue"
    with pytest.raises(Failure):
        check(edit(program, segment, rows_of(program, segment, name), ALL_WAITS), seed=1, rounds=20)


@pytest.mark.parametrize(
    ("config", "target", "tokens"),
    [
        (LLAMA_70B, machine.load("h100"), 1),
        (LLAMA_70B, machine.load("h100"), 300),
        (SMOLLM2, machine.host(1), 1),
        (SMOLLM2, machine.host(2), 257),
        (TINY, machine.host(2), 3),
        (replace(SMALL, kv_heads=1), machine.host(7), 200),
        (SMALL, replace(small_machine(2), memory_bytes_per_s=1e-12), 9),  # all rows form one panel
    ],
)
def test_programs_of_machines_are_proved(config: ModelConfig, target: machine.Machine, tokens: int) -> None:
    assert verify(compiled(config, target, tokens, logit_rows=min(tokens, 9))).violations == []


def columns_of(program: Program, name: str) -> list[Columns]:
    """Return, for each worker, the operands of the instructions that it runs in a phase."""
    phase = program.forward.by_name[name]
    segment = program.body if phase in program.forward.body else program.epilogue
    streams = map(segment.stream, range(program.workers))
    return [phase.columns(stream[phase_number(stream) == phase.number]) for stream in streams]


def test_work_is_spread_evenly() -> None:
    program = compiled(SMOLLM2, machine.host(2), 1)
    for name in ("qkv_rope", "o_proj", "gate_up_silu", "down_proj", "lm_head"):
        first, second = (int(columns["cols"].sum()) for columns in columns_of(program, name))
        assert first == second > 0, name
    slots = [columns["slot"].tolist() for columns in columns_of(program, "attention")]
    assert slots == [[worker] for worker in range(program.workers)]
    program = compiled(LLAMA_70B, machine.load("h100"), 2048)
    outputs = [int((columns["rows"] * columns["cols"]).sum()) for columns in columns_of(program, "gate_up_silu")]
    assert len(outputs) == 132 and max(outputs) < 1.15 * np.mean(outputs)


def test_same_arguments_give_the_same_bytes_and_text() -> None:
    one, two = (compiled(SMALL, small_machine(3), 7) for _ in range(2))
    assert one.to_bytes() == two.to_bytes()
    assert list(disassemble(one)) == list(disassemble(two))


def test_disassembly_names_operands_counters_and_totals() -> None:
    text = list(disassemble(compiled(SMOLLM2, machine.host(3), 1, options=Options(norm="own"))))
    down, norm = (next(line for line in text if name in line) for name in ("down_proj", "attn_norm"))
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
        ({"tokens": 10**9}, "the limit is"),
    ],
)
def test_bad_arguments_are_one_sentence(change: dict[str, int], text: str) -> None:
    arguments = {"tokens": 1, "logit_rows": 1, "max_seqs": 1, "max_context": 8, "tp": 1} | change
    with pytest.raises(MegakernelError, match=text):
        compile_program(Spec(TINY, machine.host(1), dtype=Dtype.F32, **arguments))


# -- artificial phases, whose dependencies no Llama program has yet

WRITE, READ = Phase("write", Operation.MATMUL), Phase("read", Operation.REDUCE)


@pytest.fixture
def columns_of_act(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the operations of WRITE and READ access the columns of ACT that their operands name, and nothing else."""
    for phase, kind in ((WRITE, Kind.WRITE), (READ, Kind.READ)):

        def touched(p: Phase, c: Columns, d: Dims, kind: Kind = kind) -> list[Access]:
            return [Access(Buffer.ACT, kind, c["row"], c["row"] + c["rows"], c["col"], c["col"] + c["cols"])]

        changed = replace(OPERATIONS[phase.operation], accesses=touched)
        monkeypatch.setitem(OPERATIONS, phase.operation, changed)


def _column_tasks(phase: Phase, col: list[int], cols: list[int], block: list[int]) -> PhaseTasks:
    """Return tasks of `phase`. Task i accesses cols[i] columns of row 0 from column col[i], and belongs to block[i]."""
    zero = np.zeros(len(col), dtype=np.int32)
    columns = {"row": zero, "rows": zero + 1, "col": np.array(col, np.int32), "cols": np.array(cols, np.int32)}
    return PhaseTasks(phase, columns, np.array(block, np.int32))


def _run_artificial(readers: list[tuple[int, int]], blocks: int) -> Program:
    """Compile and check a program in which 12 tasks, divided among `blocks` blocks, write one column each. Each reader
    is (first column, number of columns) and is a block of its own."""
    target = small_machine(4)
    sizes = {"tokens": 1, "logit_rows": 1, "max_seqs": 1, "max_context": 8}
    llama = lowered(Spec(replace(SMALL, layers=2), target, dtype=Dtype.F32, **sizes))
    forward = Forward.of(llama.forward.prologue, [WRITE, READ], llama.forward.epilogue[2:])
    write, read = forward.body
    writers = _column_tasks(write, list(range(12)), [1] * 12, [c * blocks // 12 for c in range(12)])
    reads = _column_tasks(read, [c for c, _ in readers], [n for _, n in readers], list(range(len(readers))))
    sample = replace(llama.segments[2][2], phase=forward.epilogue[0])
    program = build_program(replace(llama, forward=forward, segments=(llama.segments[0], [writers, reads], [sample])))
    check(program, seed=3)
    return program


@pytest.mark.usefixtures("columns_of_act")
def test_a_block_waits_only_for_blocks_that_it_touches() -> None:
    program = _run_artificial([(c, 3) for c in range(0, 12, 3)], 4)
    waits = of(program, "read")[:, ALL_WAITS]
    assert (np.count_nonzero(waits, axis=1) == 1).all()
    assert len(np.unique(waits[:, 0])) == 4


@pytest.mark.usefixtures("columns_of_act")
def test_joins_stand_in_for_more_waits_than_a_record_holds() -> None:
    program = _run_artificial([(0, 12), *((c, 1) for c in range(12))], 12)
    assert len(of(program, "join")) == 1
    assert (np.count_nonzero(program.body.records[:, ALL_WAITS], axis=1) == WAITS).any()
    exact = _run_artificial([(0, WAITS), *((c, 1) for c in range(12))], 12)
    assert not len(of(exact, "join"))


def test_edges_are_implied_by_kept_ones_or_kept() -> None:
    """With one row block, only the dependency edges from each phase to the next are kept. They imply all others."""
    sizes = {"tokens": 3, "logit_rows": 1, "max_seqs": 1, "max_context": 8}
    found = derive(lowered(Spec(SMALL, small_machine(3), dtype=Dtype.F32, options=Options(norm="own"), **sizes)))
    names = {(found.groups[a].tasks, found.groups[b].tasks) for a, b in found.within if found.groups[a].segment == 1}
    assert names == {(i, i + 1) for i in range(6)}


# -- ranks

LOWERINGS = [Options(o=o, residual=r) for o in ("sharded", "replicated") for r in ("dealt", "replicated")]
# With 6 query heads, 3 KV heads, 70 FFN columns and a vocabulary of 101 tokens, the shards of 4 ranks have unequal
# sizes, and some shards of 8 ranks are empty.
UNEVEN = replace(SMALL, ffn=70, vocab=101, layers=2)

EACH_LOWERING = pytest.mark.parametrize("options", LOWERINGS, ids=lambda options: f"{options.o}-{options.residual}")


def uneven(tokens: int, tp: int, options: Options, workers: int = 2) -> Program:
    return compiled(UNEVEN, small_machine(workers, 2), tokens, 3, tp, options)


@EACH_LOWERING
@pytest.mark.parametrize(("tp", "tokens", "norm"), [(4, 11, "next"), (8, 1, "own")])
def test_any_interleaving_of_ranks_gives_equal_results(options: Options, tp: int, tokens: int, norm: str) -> None:
    check(uneven(tokens, tp, replace(options, norm=norm)), seed=tp * 100 + tokens, rounds=2)


@EACH_LOWERING
def test_random_shapes(options: Options) -> None:
    rng = np.random.default_rng(LOWERINGS.index(options))
    for seed in range(2):
        target = small_machine(int(rng.integers(1, 7)), int(rng.integers(1, 6)))
        tp, tokens, rows = int(rng.choice([1, 2, 4, 8])), int(rng.integers(1, 14)), int(rng.integers(1, 7))
        program = compiled(random_model(rng, 40 if tp == 1 else 200), target, tokens, rows, tp, options)
        check(program, seed, rounds=2)
        assert verify(program).violations == []


@EACH_LOWERING
def test_every_wait_of_a_rank_is_needed(options: Options) -> None:
    """If the instructions of any one phase did not wait on rank 0, some interleaving would give wrong results. The test
    leaves out norms."""
    program = uneven(5, 2, replace(options, norm="own"))
    phases = [phase for phase in program.forward.body if phase.operation is not Operation.NORM]
    assert len(phases) >= 6
    for phase in phases:
        rows = rows_of(program, "body", phase.name, rank=0)
        with pytest.raises(Failure):
            check(edit(program, "body", rows, slice(WAIT_WORD, WAIT_WORD + WAITS)), seed=1, rounds=12)


EVEN = ModelConfig(vocab=512, hidden=64, ffn=512, layers=2, heads=16, kv_heads=8, head_dim=4, max_context=64)
WIDE = replace(EVEN, hidden=1024, ffn=4096, heads=32, kv_heads=8, head_dim=32)


@EACH_LOWERING
@pytest.mark.parametrize("tp", [1, 4])
def test_a_steps_bound_counts_what_programs_of_even_shards_send(options: Options, tp: int) -> None:
    program = compiled(EVEN, small_machine(2, 8), 32, 8, tp, replace(options, norm="own"))
    figures = describe(program)
    tokens = 8 * (8 - program.dims.own_logit_rows)  # bytes of sampled ids and logprobs, not part of the bound
    work = step_work(program.forward, program.dims.split, [32], [32], 8)
    assert tp * work.link_bytes == figures["link_bytes"] - tokens


def test_with_many_rows_a_layer_ends_with_the_next_ones_norm_beside_its_last_matmul() -> None:
    options = Options(residual="dealt", queue="body")
    few, many = (compiled(WIDE, machine.load("h100"), n, 1, 8, options) for n in (1024, 4096))
    assert "next_norm" not in few.forward.by_name and "first_norm" in many.forward.by_name
    names = [many.forward.by_number[n].name for n in phase_number(many.queues.stream(0)).tolist()]
    assert "attn_norm" not in names
    early = names[: len(names) - names[::-1].index("down_partial")].count("next_norm")
    assert early >= names.count("next_norm") / 2


def test_few_rows_are_kept_by_every_rank_and_many_rows_have_owners() -> None:
    found = [describe(compiled(WIDE, machine.load("h100"), n, 1, 8))["lowering"]["residual"] for n in (1, 512)]
    assert found == ["replicated", "dealt"]


def test_o_is_replicated_where_links_are_slow_whatever_the_bucket() -> None:
    for link, expected in ((450e9, "sharded"), (5e9, "replicated")):
        target = replace(machine.load("h100"), link_bytes_per_s=link)
        for n in (1, 40):
            assert describe(compiled(LLAMA_70B, target, n, 1, 8))["lowering"]["o"] == expected


def test_every_rank_counts_the_weights_of_its_own_first_rows() -> None:
    """Both ranks choose O projection tiles of the same width, although only rank 0 owns row 0. The cost model must
    count the weights for tiles at each rank's own first row. The machine's memory is so slow and its dispatch so
    expensive that tiles would be wider if the weights were not counted."""
    target = machine.host(4)
    target = replace(target, costs=structs.replace(target.costs, dispatch_s=1.6e-4), memory_bytes_per_s=3.45e8)
    program = compiled(SMOLLM2, target, 1024, 1, 2, options=Options(o="replicated", residual="dealt"))
    phase = program.forward.by_name["o_proj"]
    widths = []
    for rank in range(2):
        records = np.concatenate([program.body.stream(rank * 4 + worker) for worker in range(4)])
        widths.append(np.unique(phase.columns(records[phase_number(records) == phase.number])["cols"]))
    np.testing.assert_array_equal(widths[0], widths[1])


@EACH_LOWERING
@pytest.mark.parametrize("tp", [2, 8])
def test_every_option_gives_a_program_that_is_proved(options: Options, tp: int) -> None:
    changes = [{"queue": "body"}]
    changes += [{"queue": "attention"}, {"interleave": False}] if tp == 2 else []
    for change, tokens in [({}, 1), ({}, 40), *((change, 13) for change in changes)]:
        assert verify(uneven(tokens, tp, replace(options, **change), 3)).violations == [], (change, tokens)


@pytest.mark.parametrize("queue", ["attention", "body"])
@pytest.mark.parametrize("tp", [1, 4])
def test_any_way_to_claim_a_queue_gives_the_results_of_program_order(queue: str, tp: int) -> None:
    program = uneven(5, tp, Options(residual="dealt", queue=queue), workers=3)
    drains = phase_number(program.body.records) == DRAIN.number
    assert drains.sum() == 3 * tp and (drains.all() if queue == "body" else not drains.all())
    assert program.forward.by_name["attention"].number in phase_number(program.queues.records)
    check(program, seed=tp, rounds=4)


def test_link_bound_and_compute_bound_stages_take_turns() -> None:
    """With interleaving, a worker alternates between O partials (link-bound) and gate/up (compute-bound). Without
    interleaving, each worker runs all its O partials first and then all of gate/up: two runs."""

    def runs(interleave: bool) -> int:
        options = Options(o="sharded", residual="dealt", interleave=interleave)
        program = compiled(replace(LLAMA_70B, layers=2), machine.load("h100"), 4096, 1, 8, options)
        both = [program.forward.by_name[name].number for name in ("o_partial", "gate_up_silu")]
        streams = (phase_number(program.body.stream(worker)) for worker in range(program.workers))
        return int(np.median([1 + np.count_nonzero(np.diff(stream[np.isin(stream, both)])) for stream in streams]))

    assert runs(False) == 2 < runs(True)


def test_a_norm_gives_way_to_an_earlier_panel_of_the_next_stage() -> None:
    """In rank 3's queue, gate/up instructions of the first panel precede the MLP norm of the second. A panel is a group
    of row blocks that share one pass over the weights: here 3, 3 and 2 of the 8 row blocks. Rank 3 owns row block 3, in
    the second panel."""
    options = Options(o="replicated", residual="dealt", queue="body")
    program = compiled(replace(LLAMA_70B, layers=1), machine.load("h100"), 1024, 1, 8, options)
    queue = [program.forward.by_number[n].name for n in phase_number(program.queues.stream(3)).tolist()]
    assert queue.index("gate_up_silu") < queue.index("mlp_norm")


def test_inputs_of_a_panel_fill_half_of_the_l2_cache() -> None:
    options = Options(queue="body", panel=8)
    program = compiled(replace(LLAMA_70B, layers=1), machine.load("h100"), 8192, options=options)
    for name, blocks in (("gate_up_silu", 11), ("down_proj", 8)):  # inputs of down_proj are too long for more than 8
        queue, phase = program.queues.stream(0), program.forward.by_name[name]
        cols = phase.columns(queue[phase_number(queue) == phase.number])["col"]
        assert int(np.argmax(cols != cols[0])) == blocks  # the panel's row blocks of the first column of tiles
    assert verify(program).ok


def test_llama_70b_on_eight_ranks() -> None:
    program = compiled(LLAMA_70B, machine.load("h100"), 8192, 64, 8)
    figures = describe(program)
    assert figures["lowering"] == {"o": "sharded", "residual": "dealt", "norm": "next"}
    assert 400e3 < figures["instructions"] / 8 < 800e3
    assert program.counters < 1000 and len(program.to_bytes()) / 8 < 1.5e6


def test_flags_of_compile_reach_the_program(cli: Cli) -> None:
    flags = ["--model", "random:llama-3.2-1b", "--workers", "2", "--tp", "4", "--tokens", "8"]
    forced = ["--o-lowering", "replicated", "--residual", "dealt", "--queue", "attention"]
    facts = cli.json("compile", *flags, *forced)
    assert facts["lowering"] == {"o": "replicated", "residual": "dealt", "norm": "own"}
    assert facts["per_layer"]["drain"] == 8 and facts["ranks"] == 4
    assert "queue = 'some'" in cli.fails("compile", *flags, "--queue", "some")


@pytest.mark.parametrize(
    ("load", "tasks", "expected"),
    [([0, 0, 0], 7, [0, 1, 2, 0, 1, 2, 0]), ([2, 0, 1], 6, [1, 2, 1, 0, 2, 1]), ([5, 0], 7, [1, 1, 1, 1, 1, 0, 1])],
)
def test_of_free_workers_that_with_fewest_tasks_is_first(load: list[float], tasks: int, expected: list[int]) -> None:
    """The order of workers with equal loads is fixed, so that compilation gives the same program on every machine."""
    assert _first_free(tasks, 1.0, np.array(load, float)).tolist() == expected


@pytest.mark.parametrize(("norm", "tp"), [("own", 1), ("inside", 2), ("next", 2), ("next", 8), ("inside", 8)])
def test_norms_over_all_heads(norm: str, tp: int) -> None:
    """Every rank computes q, k and v of all heads, and a residual that no norm follows is rounded by an instruction of
    its own. Programs are proved, also for ranks without heads."""
    config = replace(SMALL, family="olmo2", post_norms=True, whole_norms=True)
    residual = "replicated" if norm == "inside" else "dealt"
    program = compiled(config, small_machine(3), tokens=9, tp=tp, options=Options(norm=norm, residual=residual))
    assert verify(program).ok
    named = program.forward.by_name
    raw, heads = named["qkv"], named["qk_norm_rope"]
    assert (raw.rows, raw.result, heads.result) == (Rows.EVERY, Result.STORED, Result.HEADS)
    rounding = [p for p in program.forward.body if p.operation is Operation.NORM and p.result is Result.NONE]
    assert {p.weights for p in rounding} == {None}
    width = (config.heads + 2 * config.kv_heads) * config.head_dim
    splits = [d.split for d in program.dims.ranks]
    assert [raw.width(split) for split in splits] == [width if split.rank_heads else 0 for split in splits]
