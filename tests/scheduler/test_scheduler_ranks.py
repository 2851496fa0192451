"""The scheduler for many ranks: every lowering, even, uneven and empty shards, any interleaving of all ranks."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from compiled import LLAMA_70B, SMALL, compiled, small_machine
from ground_truth import Failure, check

from megakernel import machine
from megakernel.cli import main
from megakernel.isa import BY_NAME, BY_OPCODE, Family
from megakernel.isa.record import WAIT_WORD, WAITS, opcode
from megakernel.model.config import LlamaConfig
from megakernel.roofline import step_work
from megakernel.scheduler import Options, describe
from megakernel.scheduler.verify import verify

LOWERINGS = [
    Options(o=o, residual=residual)
    for o, residual in itertools.product(("sharded", "replicated"), ("dealt", "replicated"))
]
# 6 query heads that share 3 KV heads, 70 FFN columns and 101 tokens: uneven on 4 ranks, and with empty shards on 8.
UNEVEN = replace(SMALL, ffn=70, vocab=101, layers=2)


def name(options: Options) -> str:
    return f"{options.o}-{options.residual}"


@pytest.mark.parametrize("options", LOWERINGS, ids=name)
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 11])
def test_any_interleaving_of_the_ranks_gives_the_results_of_program_order(
    options: Options, tp: int, tokens: int
) -> None:
    for norm in ("own", "next"):
        program = compiled(
            UNEVEN, small_machine(2, 2), tokens, logit_rows=3, tp=tp, options=replace(options, norm=norm)
        )
        check(program, seed=tp * 100 + tokens, rounds=2)


@pytest.mark.parametrize("options", LOWERINGS, ids=name)
def test_random_shapes(options: Options) -> None:
    rng = np.random.default_rng(6)
    for seed in range(3):
        kv_heads, group, head_dim = (int(rng.integers(1, n)) for n in (5, 4, 3))
        config = LlamaConfig(
            vocab=int(rng.integers(2, 200)),
            hidden=int(rng.integers(1, 30)),
            ffn=int(rng.integers(1, 200)),
            layers=int(rng.integers(1, 4)),
            heads=kv_heads * group,
            kv_heads=kv_heads,
            head_dim=2 * head_dim,
            max_context=64,
        )
        target = small_machine(int(rng.integers(1, 4)), int(rng.integers(1, 6)))
        tp, tokens, rows = int(rng.choice([2, 4, 8])), int(rng.integers(1, 14)), int(rng.integers(1, 7))
        check(compiled(config, target, tokens, rows, tp, options), seed, rounds=2)


@pytest.mark.parametrize("options", LOWERINGS, ids=name)
def test_every_wait_is_needed(options: Options) -> None:
    """Without the waits of any one phase of a rank, some interleaving goes wrong; but norms follow their worker's."""
    program = compiled(UNEVEN, small_machine(2, 2), 5, logit_rows=3, tp=2, options=options)
    numbers = [n for n in np.unique(opcode(program.body.records)) if BY_OPCODE[int(n)].family is not Family.NORM]
    assert len(numbers) >= 6
    for number in numbers:
        records = program.body.records.copy()
        first_rank = np.arange(len(records)) < program.body.offsets[program.workers]
        records[(opcode(records) == number) & first_rank, WAIT_WORD : WAIT_WORD + WAITS] = 0
        with pytest.raises(Failure):
            check(replace(program, body=replace(program.body, records=records)), seed=1, rounds=12)


EVEN = LlamaConfig(vocab=512, hidden=64, ffn=512, layers=2, heads=16, kv_heads=8, head_dim=4, max_context=64)


@pytest.mark.parametrize("options", LOWERINGS, ids=name)
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_link_bytes_of_even_shards_are_the_closed_forms(options: Options, tp: int) -> None:
    """n tokens of width D in 2 bytes on Y ranks: (Y-1)/Y of 2nD for each gather, scatter or reduction."""
    n, width = 32, EVEN.hidden
    moved = 2 * n * width * (tp - 1)
    heads = moved // tp**2 if options.residual == "dealt" else moved // tp
    if options.residual == "dealt":
        expected = 2 * (moved // tp) + (moved // tp if options.o == "sharded" else heads) + moved // tp
    else:
        expected = (moved if options.o == "sharded" else heads) + moved
    link = np.array(describe(compiled(EVEN, small_machine(2, 8), n, 3, tp, options))["link_bytes_per_layer"])
    assert (link.sum(axis=0) == expected).all() and (link.sum(axis=1) == expected).all()
    assert (np.diag(link) == 0).all()


@pytest.mark.parametrize("options", LOWERINGS, ids=name)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_steps_bound_counts_what_programs_of_even_shards_send(options: Options, tp: int) -> None:
    program = compiled(EVEN, small_machine(2, 8), 32, 8, tp, replace(options, norm="own"))
    figures = describe(program)
    layers = program.dims.layers * np.sum(figures["link_bytes_per_layer"])
    assert tp * step_work(program.dims, [32], [32], 0).link_bytes == layers
    tokens = 8 * (8 - program.dims.own_logit_rows)  # sampled ids and their logprobs, which the bound leaves out
    assert tp * step_work(program.dims, [32], [32], 8).link_bytes == figures["link_bytes"] - tokens


@pytest.mark.parametrize("options", LOWERINGS, ids=name)
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 11, 30])
def test_link_bytes_of_uneven_shards_are_their_own_sizes(options: Options, tp: int, tokens: int) -> None:
    program = compiled(UNEVEN, small_machine(2, 2), tokens, 3, tp, options)
    link = np.array(describe(program)["link_bytes_per_layer"])
    d, rows = program.dims, np.zeros(tp, dtype=int)
    for token in range(tokens):
        rows[token // d.row_block % tp] += 1
    if options.residual == "replicated":
        rows[:] = tokens
    for to, start in itertools.product(range(tp), range(tp)):
        peer = program.rank_dims(start)
        partials = (peer.rank_ffn > 0) + (peer.rank_heads > 0 and options.o == "sharded")
        values = rows[to] * (partials * d.hidden + (peer.q_cols if options.o == "replicated" else 0))
        if options.residual == "dealt":
            values += 2 * rows[start] * d.hidden
        assert link[start, to] == (2 * values if start != to else 0)


def test_link_bytes_of_a_launch_are_its_layers_and_its_logits() -> None:
    program = compiled(UNEVEN, small_machine(2, 2), 9, 5, 4, Options(norm="own"))
    figures = describe(program)
    d, rows = program.dims, 5
    sampled = [len(range(r * d.own_logit_rows, min(rows, (r + 1) * d.own_logit_rows))) for r in range(4)]
    logits = sum(4 * n * (d.vocab - program.rank_dims(r).rank_vocab) for r, n in enumerate(sampled))
    gathered = 3 * rows * d.hidden * 2 if figures["lowering"]["residual"] == "dealt" else 0
    tokens = 8 * (rows - sampled[0])
    layers = d.layers * int(np.sum(figures["link_bytes_per_layer"]))
    assert figures["link_bytes"] == layers + logits + gathered + tokens


def test_with_many_rows_a_layer_ends_with_the_next_ones_norm_beside_its_last_matmul() -> None:
    model = replace(EVEN, hidden=1024, ffn=4096, heads=32, kv_heads=8, head_dim=32)
    options = Options(residual="dealt", queue="body")
    few, many = (compiled(model, machine.load("h100"), n, 1, 8, options) for n in (1024, 4096))
    assert (few.dims.norm_ahead, many.dims.norm_ahead) == (0, 1)
    names = [BY_OPCODE[n].name for n in opcode(many.queues.records[: many.queues.offsets[1]]).tolist()]
    assert "attn_norm" not in names
    assert BY_NAME["first_norm"].opcode in opcode(many.prologue.records)
    early = names[: len(names) - names[::-1].index("down_partial")].count("next_norm")
    assert early >= names.count("next_norm") / 2


def test_few_rows_take_one_hop_and_many_rows_have_owners() -> None:
    model = replace(EVEN, hidden=1024, ffn=4096, heads=32, kv_heads=8, head_dim=32)
    found = [describe(compiled(model, machine.load("h100"), n, 1, 8))["lowering"]["residual"] for n in (1, 512)]
    assert found == ["replicated", "dealt"]


def test_o_is_replicated_where_links_are_slow_whatever_the_bucket() -> None:
    for link, expected in ((450e9, "sharded"), (5e9, "replicated")):
        target = replace(machine.load("h100"), link_bytes_per_s=link)
        for n in (1, 40):
            assert describe(compiled(LLAMA_70B, target, n, 1, 8))["lowering"]["o"] == expected


@pytest.mark.parametrize("options", LOWERINGS, ids=name)
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_every_option_gives_a_program_that_is_proved(options: Options, tp: int) -> None:
    changes = [{"queue": "attention"}, {"queue": "body"}, {"interleave": False}, {"overlap_ranks": False}]
    for change, tokens in [({}, 1), *((change, 13) for change in changes)]:
        program = compiled(UNEVEN, small_machine(2, 2), tokens, 3, tp, replace(options, **change))
        assert verify(program).violations == [], (change, tokens)


@pytest.mark.parametrize("queue", ["attention", "body"])
@pytest.mark.parametrize("tp", [1, 4])
def test_any_way_to_claim_a_queue_gives_the_results_of_program_order(queue: str, tp: int) -> None:
    options = Options(residual="dealt", queue=queue)
    program = compiled(UNEVEN, small_machine(3, 2), 5, 3, tp, options)
    drains = opcode(program.body.records) == BY_NAME["drain"].opcode
    assert drains.sum() == 3 * tp and (drains.all() if queue == "body" else not drains.all())
    assert set(opcode(program.queues.records)) >= {BY_NAME["attention"].opcode}
    check(program, seed=tp, rounds=4)


def test_link_bound_and_compute_bound_stages_take_turns() -> None:
    """O partials are sent to their rows' owners; gate and up are not. Both are where they would be without."""

    def runs(interleave: bool) -> int:
        options = Options(o="sharded", residual="dealt", interleave=interleave)
        program = compiled(replace(LLAMA_70B, layers=2), machine.load("h100"), 4096, 1, 8, options)
        kinds = [BY_NAME[name].opcode for name in ("o_partial", "gate_up_silu")]
        counts = []
        for worker in range(program.workers):
            stream = opcode(program.body.stream(worker))
            of_both = stream[np.isin(stream, kinds)]
            counts.append(1 + int(np.count_nonzero(np.diff(of_both))))
        return int(np.median(counts))

    assert runs(False) == 2 < runs(True)


def test_a_norm_gives_way_to_an_earlier_panel_of_the_next_stage() -> None:
    """Three panels of three row blocks: what rank 3 owns lies in the second, midway to which gate and up begin."""
    options = Options(o="replicated", residual="dealt", queue="body")
    program = compiled(replace(LLAMA_70B, layers=1), machine.load("h100"), 1024, 1, 8, options)
    queue = opcode(program.queues.stream(3)).tolist()
    assert queue.index(BY_NAME["gate_up_silu"].opcode) < queue.index(BY_NAME["mlp_norm"].opcode)


def test_without_rank_overlap_what_comes_from_a_rank_is_waited_for_by_phases() -> None:
    target = small_machine(2, 2)
    apart, together = (
        compiled(UNEVEN, target, 16, 3, 2, Options(o="sharded", residual="dealt", overlap_ranks=overlap))
        for overlap in (True, False)
    )
    for program, joined in ((apart, False), (together, True)):
        records = program.body.stream(0)
        rows = records[opcode(records) == BY_NAME["gate_up_silu"].opcode]
        waited = {tuple(sorted(set(words) - {0})) for words in rows[:, WAIT_WORD : WAIT_WORD + WAITS].tolist()}
        assert (len(waited) == 1) == joined
    assert describe(apart)["all_to_all_per_layer"] < describe(together)["all_to_all_per_layer"]


def test_llama_70b_on_eight_ranks() -> None:
    program = compiled(LLAMA_70B, machine.load("h100"), 8192, 64, 8)
    figures = describe(program)
    assert figures["lowering"] == {"o": "sharded", "residual": "dealt"}
    assert 400e3 < figures["instructions"] / 8 < 800e3
    assert figures["all_to_all_per_layer"] == 0
    assert program.counters < 1000 and len(program.to_bytes()) / 8 < 1.5e6


def test_flags_of_compile_reach_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "random:llama-3.2-1b", "--workers", "2", "--tp", "4", "--tokens", "8", "--json"]
    forced = ["--o-lowering", "replicated", "--residual", "dealt", "--queue", "attention"]
    assert main(["compile", *flags, *forced, "--no-interleave", "--no-rank-overlap"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["lowering"] == {"o": "replicated", "residual": "dealt"}
    assert facts["per_layer"]["drain"] == 8 and facts["ranks"] == 4
    assert main(["compile", *flags, "--queue", "some"]) == 1
    assert "queue = 'some'" in capsys.readouterr().err
