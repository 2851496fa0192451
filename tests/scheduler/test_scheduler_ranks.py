"""The scheduler for many ranks: every lowering, even, uneven and empty shards, any interleaving of all ranks."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from compiled import LLAMA_70B, SMALL, compiled, random_model, small_machine
from ground_truth import Failure, check
from mutate import edit, rows_of

from megakernel import machine
from megakernel.cli import main
from megakernel.isa import DRAIN, Operation
from megakernel.isa.record import WAIT_WORD, WAITS, phase_number
from megakernel.model.config import ModelConfig
from megakernel.program import Program
from megakernel.roofline import step_work
from megakernel.scheduler import Options, describe
from megakernel.scheduler.verify import verify

LOWERINGS = [
    Options(o=o, residual=residual)
    for o, residual in itertools.product(("sharded", "replicated"), ("dealt", "replicated"))
]
# 6 query heads that share 3 KV heads, 70 FFN columns and 101 tokens: uneven on 4 ranks, and with empty shards on 8.
UNEVEN = replace(SMALL, ffn=70, vocab=101, layers=2)


EACH_LOWERING = pytest.mark.parametrize("options", LOWERINGS, ids=lambda options: f"{options.o}-{options.residual}")


def uneven(tokens: int, tp: int, options: Options, workers: int = 2) -> Program:
    return compiled(UNEVEN, small_machine(workers, 2), tokens, 3, tp, options)


@EACH_LOWERING
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 11])
@pytest.mark.parametrize("norm", ["own", "next"])
def test_any_interleaving_of_the_ranks_gives_the_results_of_program_order(
    options: Options, tp: int, tokens: int, norm: str
) -> None:
    check(uneven(tokens, tp, replace(options, norm=norm)), seed=tp * 100 + tokens, rounds=2)


@EACH_LOWERING
def test_random_shapes(options: Options) -> None:
    rng = np.random.default_rng(6)
    for seed in range(3):
        target = small_machine(int(rng.integers(1, 4)), int(rng.integers(1, 6)))
        tp, tokens, rows = int(rng.choice([2, 4, 8])), int(rng.integers(1, 14)), int(rng.integers(1, 7))
        check(compiled(random_model(rng, 200), target, tokens, rows, tp, options), seed, rounds=2)


@EACH_LOWERING
def test_every_wait_is_needed(options: Options) -> None:
    """Without the waits of any one phase of a rank, some interleaving goes wrong; but norms follow their worker's."""
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


@EACH_LOWERING
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_steps_bound_counts_what_programs_of_even_shards_send(options: Options, tp: int) -> None:
    program = compiled(EVEN, small_machine(2, 8), 32, 8, tp, replace(options, norm="own"))
    figures = describe(program)
    layers = program.dims.layers * np.sum(figures["link_bytes_per_layer"])
    assert tp * step_work(program.forward, program.dims, [32], [32], 0).link_bytes == layers
    tokens = 8 * (8 - program.dims.own_logit_rows)  # sampled ids and their logprobs, which the bound leaves out
    assert tp * step_work(program.forward, program.dims, [32], [32], 8).link_bytes == figures["link_bytes"] - tokens


@EACH_LOWERING
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 11, 30])
def test_link_bytes_of_uneven_shards_are_their_own_sizes(options: Options, tp: int, tokens: int) -> None:
    program = uneven(tokens, tp, options)
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


@EACH_LOWERING
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_every_option_gives_a_program_that_is_proved(options: Options, tp: int) -> None:
    changes = [{"queue": "attention"}, {"queue": "body"}, {"interleave": False}, {"overlap_ranks": False}]
    for change, tokens in [({}, 1), *((change, 13) for change in changes)]:
        assert verify(uneven(tokens, tp, replace(options, **change))).violations == [], (change, tokens)


@pytest.mark.parametrize("queue", ["attention", "body"])
@pytest.mark.parametrize("tp", [1, 4])
def test_any_way_to_claim_a_queue_gives_the_results_of_program_order(queue: str, tp: int) -> None:
    program = uneven(5, tp, Options(residual="dealt", queue=queue), workers=3)
    drains = phase_number(program.body.records) == DRAIN.number
    assert drains.sum() == 3 * tp and (drains.all() if queue == "body" else not drains.all())
    assert program.forward.by_name["attention"].number in phase_number(program.queues.records)
    check(program, seed=tp, rounds=4)


def test_link_bound_and_compute_bound_stages_take_turns() -> None:
    """O partials are sent to their rows' owners; gate and up are not. Both are where they would be without."""

    def runs(interleave: bool) -> int:
        options = Options(o="sharded", residual="dealt", interleave=interleave)
        program = compiled(replace(LLAMA_70B, layers=2), machine.load("h100"), 4096, 1, 8, options)
        both = [program.forward.by_name[name].number for name in ("o_partial", "gate_up_silu")]
        counts = []
        for worker in range(program.workers):
            stream = phase_number(program.body.stream(worker))
            of_both = stream[np.isin(stream, both)]
            counts.append(1 + int(np.count_nonzero(np.diff(of_both))))
        return int(np.median(counts))

    assert runs(False) == 2 < runs(True)


def test_a_norm_gives_way_to_an_earlier_panel_of_the_next_stage() -> None:
    """Three panels of three row blocks: what rank 3 owns lies in the second, midway to which gate and up begin."""
    options = Options(o="replicated", residual="dealt", queue="body")
    program = compiled(replace(LLAMA_70B, layers=1), machine.load("h100"), 1024, 1, 8, options)
    queue = [program.forward.by_number[n].name for n in phase_number(program.queues.stream(3)).tolist()]
    assert queue.index("gate_up_silu") < queue.index("mlp_norm")


def test_without_rank_overlap_what_comes_from_a_rank_is_waited_for_by_phases() -> None:
    options = Options(o="sharded", residual="dealt")
    apart, together = (uneven(16, 2, replace(options, overlap_ranks=overlap)) for overlap in (True, False))
    for program, joined in ((apart, False), (together, True)):
        records = program.body.stream(0)
        rows = records[phase_number(records) == program.forward.by_name["gate_up_silu"].number]
        waited = {tuple(sorted(set(words) - {0})) for words in rows[:, WAIT_WORD : WAIT_WORD + WAITS].tolist()}
        assert (len(waited) == 1) == joined
    assert describe(apart)["all_to_all_per_layer"] < describe(together)["all_to_all_per_layer"]


def test_llama_70b_on_eight_ranks() -> None:
    program = compiled(LLAMA_70B, machine.load("h100"), 8192, 64, 8)
    figures = describe(program)
    assert figures["lowering"] == {"o": "sharded", "residual": "dealt", "norm": "next"}
    assert 400e3 < figures["instructions"] / 8 < 800e3
    assert figures["all_to_all_per_layer"] == 0
    assert program.counters < 1000 and len(program.to_bytes()) / 8 < 1.5e6


def test_flags_of_compile_reach_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "random:llama-3.2-1b", "--workers", "2", "--tp", "4", "--tokens", "8", "--json"]
    forced = ["--o-lowering", "replicated", "--residual", "dealt", "--queue", "attention"]
    assert main(["compile", *flags, *forced, "--no-interleave", "--no-rank-overlap"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["lowering"] == {"o": "replicated", "residual": "dealt", "norm": "own"}
    assert facts["per_layer"]["drain"] == 8 and facts["ranks"] == 4
    assert main(["compile", *flags, "--queue", "some"]) == 1
    assert "queue = 'some'" in capsys.readouterr().err
