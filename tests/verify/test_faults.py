"""Tests the verifier with a sample of the broken programs of benchmarks/correctness/verifier.py. The judge, which
explores executions of a program, is tested on cases with known answers."""

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from atomic_steps import expected, make_table
from ground_truth import Verdict, adversarial, explore, unsafe
from handmade import handmade, rank_dims, small_dims
from mutate import KINDS, PARTS, edit, rows_of
from small_programs import large, make, small

from megakernel.isa import JOIN, record
from megakernel.program import Program, Segment
from megakernel.scheduler.verify import verify

SAMPLE = 5
# Every program with one of these mutations is unsafe: with a wrong total, the next launch starts with a wrong counter.
ALWAYS_UNSAFE = ("change a total",)


@cache
def bases() -> list[tuple[str, Program]]:
    return list(small(5))


def judge(base: Program, program: Program) -> Verdict:
    for seed in range(2):
        table = make_table(base.dims, seed)
        verdict = explore(program, table, expected(base, table), 20_000)
        if verdict.safe is not True:
            return verdict
    return verdict


def test_good_programs_are_safe_and_accepted() -> None:
    for name, program in bases():
        assert verify(program).ok, name
        assert judge(program, program).safe, name


def test_larger_programs_survive_adversarial_runs() -> None:
    for name, program in large(8):
        table = make_table(program.dims, 0)
        assert verify(program).ok, name
        assert adversarial(program, table, expected(program, table), 0, 2).safe is None, name


@pytest.mark.parametrize("kind", KINDS)
def test_no_unsafe_mutant_is_accepted(kind: str) -> None:
    rng = np.random.default_rng(list(KINDS).index(kind))
    tried = 0
    for _ in range(SAMPLE):
        name, base = bases()[int(rng.integers(len(bases())))]
        mutant = KINDS[kind](base, rng)
        if mutant is None:
            continue
        verdict, accepted = judge(base, mutant), verify(mutant).ok
        assert not (accepted and verdict.safe is False), f"{kind} of {name}: {verdict.why}"
        assert not (kind in ALWAYS_UNSAFE and verdict.safe), f"{kind} of {name} is no mistake to the judge"
        tried += 1
    assert tried


HANDMADE = {
    "one rank": handmade(small_dims(tokens=6, layers=2, heads=2, kv_heads=2, hidden=8, ffn=16, vocab=8)),
    **{
        f"{tp} ranks, O {o}, one hop {hop}, queue {queue}": handmade(
            rank_dims(tp, tokens=4, replicated_o=o, replicated_residual=hop), queue=queue
        )
        for tp, o, hop, queue in [(2, 0, 0, "none"), (2, 0, 1, "attention"), (2, 1, 0, "body"), (2, 1, 1, "none")]
    },
}


@pytest.mark.parametrize("name", HANDMADE)
def test_no_unsafe_mutant_of_a_program_made_by_hand_is_accepted(name: str) -> None:
    base, rng = HANDMADE[name], np.random.default_rng(len(name))
    mutants = [(kind, mutant) for kind, mutate in KINDS.items() if (mutant := mutate(base, rng))]
    accepted = [(kind, mutant) for kind, mutant in mutants if verify(mutant).ok]
    assert len(accepted) < len(mutants) / 2
    for seed, (kind, mutant) in enumerate(accepted):
        assert not unsafe(base, mutant, seed), kind


@pytest.mark.parametrize("name", list(HANDMADE)[::2])
def test_no_word_makes_the_verifier_raise(name: str) -> None:
    base, rng = HANDMADE[name], np.random.default_rng(3)
    for seed in range(15):
        part = str(rng.choice([part for part in PARTS if len(getattr(base, part).records)]))
        row, word = int(rng.integers(len(getattr(base, part).records))), int(rng.integers(record.WORDS))
        value = int(rng.integers(-(2**31), 2**31) if rng.random() < 0.5 else rng.integers(-2, 40))
        mutant = edit(base, part, row, word, value)
        assert not (verify(mutant).ok and unsafe(base, mutant, seed)), f"{part}[{row}] word {word} = {value}"


def sees(base: Program, bad: Program, why: str) -> None:
    """Check that the judge finds `bad` unsafe for the reason `why`, and that the verifier refuses it too."""
    found = judge(base, bad)
    assert found.safe is False and re.search(why, found.why) and not verify(bad).ok


def test_the_judge_sees_a_race() -> None:
    """The judge finds a race if a tile does not wait for the norm that the other worker computes."""
    base = make(workers=2, tokens=1, layers=2)
    second = base.body.offsets[1]
    [norm] = rows_of(base, "body", "mlp_norm")
    [away] = [tile for tile in rows_of(base, "body", "gate_up_silu") if (tile < second) != (norm < second)]
    sees(base, edit(base, "body", away, record.WAIT_WORD), "race")


def test_the_judge_sees_an_overlap() -> None:
    """The judge finds an overlap if tiles have no waits. Their worker may then begin them before the previous
    instruction of its stream, a norm, has ended."""
    base = make(workers=1)
    bad = edit(base, "body", rows_of(base, "body", "gate_up_silu"), slice(record.WAIT_WORD, record.SIGNAL_WORD))
    sees(base, bad, "overlap")
    assert unsafe(base, bad, 0)


def test_the_judge_sees_a_claim_ahead() -> None:
    """The judge (ground_truth.py, which tries interleavings) finds a deadlock if an instruction waits for a record that
    its own worker has claimed ahead of time. A worker may claim a record of a queue before the preceding instructions
    of its stream have ended."""
    base = make(workers=2, queue="attention")
    body = base.body.records
    drain, o_proj = (rows_of(base, "body", name)[0] for name in ("drain", "o_proj"))
    before = np.zeros((1, record.WORDS), np.int32)
    before[0, 0] = JOIN.number
    before[0, record.WAIT_WORD] = body[o_proj, record.WAIT_WORD]
    offsets = base.body.offsets + (base.body.offsets > drain).astype(np.int32)
    bad = replace(base, body=Segment(np.insert(body, drain, before, axis=0), offsets))
    sees(base, bad, "^deadlock$")


def test_the_judge_sees_a_deadlock() -> None:
    base = make(workers=2)
    bad = edit(base, "body", rows_of(base, "body", "mlp_norm"), slice(record.SIGNAL_WORD, None))
    sees(base, bad, "^deadlock$")


def test_the_judge_sees_a_total_that_drifts() -> None:
    base = make(workers=1)
    assert not base.epilogue.records[-1, record.SIGNAL_WORD]
    word = record.counter_word(int(np.flatnonzero(base.totals_last[0])[0]))
    # The next launch would see the counter's total too early.
    sees(base, edit(base, "epilogue", -1, record.SIGNAL_WORD, word), "totals|final_norm")
