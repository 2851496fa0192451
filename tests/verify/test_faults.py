"""Broken programs: a sample of the long run (benchmarks/correctness/verifier.py), and the judge on cases with known
answers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from atomic_steps import expected, make_table
from ground_truth import Verdict, adversarial, explore
from handmade import handmade, rank_dims, small_dims
from mutate import KINDS, PARTS, edit
from small_programs import large, make, small

from megakernel.isa import BY_NAME, record
from megakernel.program import Program, Segment
from megakernel.scheduler.verify import verify

SAMPLE = 12
ALWAYS_UNSAFE = ("change a total",)  # the next launch starts from a counter that is off


@cache
def bases() -> list[tuple[str, Program]]:
    return list(small())[::5]


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
    for name, program in list(large())[::4]:
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
            rank_dims(tp, tokens=4, replicated_o=o, one_hop=hop), queue=queue
        )
        for tp, o, hop, queue in [(2, 0, 0, "none"), (2, 0, 1, "attention"), (2, 1, 0, "body"), (2, 1, 1, "none")]
    },
}


def unsafe(base: Program, program: Program, seed: int) -> bool:
    """Whether an adversarial run shows a mistake."""
    table = make_table(base.dims, seed)
    return adversarial(program, table, expected(base, table), seed, 4).safe is False


@pytest.mark.parametrize("name", HANDMADE)
def test_no_unsafe_mutant_of_a_program_made_by_hand_is_accepted(name: str) -> None:
    """Of programs that owe nothing to the scheduler."""
    base, rng = HANDMADE[name], np.random.default_rng(len(name))
    mutants = [(kind, mutant) for kind, mutate in KINDS.items() for _ in range(3) if (mutant := mutate(base, rng))]
    accepted = [(kind, mutant) for kind, mutant in mutants if verify(mutant).ok]
    assert len(accepted) < len(mutants) / 2
    for seed, (kind, mutant) in enumerate(accepted):
        assert not unsafe(base, mutant, seed), kind


@pytest.mark.parametrize("name", list(HANDMADE)[::2])
def test_no_word_makes_the_verifier_raise(name: str) -> None:
    base, rng = HANDMADE[name], np.random.default_rng(3)
    for seed in range(40):
        part = str(rng.choice([part for part in PARTS if len(getattr(base, part).records)]))
        row, word = int(rng.integers(len(getattr(base, part).records))), int(rng.integers(record.WORDS))
        value = int(rng.integers(-(2**31), 2**31) if rng.random() < 0.5 else rng.integers(-2, 40))
        mutant = edit(base, part, row, word, value)
        assert not (verify(mutant).ok and unsafe(base, mutant, seed)), f"{part}[{row}] word {word} = {value}"


def without(program: Program, name: str, opcode: str, first: int, count: int) -> Program:
    """The program with the wait or signal words of one kind of instruction gone."""
    segment: Segment = getattr(program, name)
    records = segment.records.copy()
    records[record.opcode(records) == BY_NAME[opcode].opcode, first : first + count] = 0
    return replace(program, **{name: Segment(records, segment.offsets)})


def test_the_judge_sees_a_race() -> None:
    """One worker's tile does not wait for the norm, which the other has."""
    base = make(workers=2, tokens=1, layers=2)
    kinds, second = record.opcode(base.body.records), base.body.offsets[1]
    [norm] = np.flatnonzero(kinds == BY_NAME["mlp_norm"].opcode)
    tiles = np.flatnonzero(kinds == BY_NAME["gate_up_silu"].opcode)
    [away] = tiles[(tiles < second) != (norm < second)]
    found = judge(base, edit(base, "body", int(away), record.WAIT_WORD, 0))
    assert found.safe is False and "race" in found.why


def test_the_judge_sees_an_overlap() -> None:
    """One worker may begin the tiles before the norm has ended that is in front of them."""
    base = make(workers=1)
    bad = without(base, "body", "gate_up_silu", record.WAIT_WORD, record.WAITS)
    found = judge(base, bad)
    assert found.safe is False and "overlap" in found.why
    assert not verify(bad).ok
    table = make_table(base.dims, 0)
    assert adversarial(bad, table, expected(base, table), 0, 4).safe is False


def test_the_judge_sees_a_claim_ahead() -> None:
    """A worker that holds a record may be stuck before its drain: with what only that record brings."""
    base = make(workers=2, queue="attention")
    body = base.body.records
    drain = np.flatnonzero(record.opcode(body) == BY_NAME["drain"].opcode)[0]
    o_proj = np.flatnonzero(record.opcode(body) == BY_NAME["o_proj"].opcode)[0]
    before = np.zeros((1, record.WORDS), np.int32)
    before[0, 0] = BY_NAME["join"].opcode
    before[0, record.WAIT_WORD] = body[o_proj, record.WAIT_WORD]
    offsets = base.body.offsets + (base.body.offsets > drain).astype(np.int32)
    bad = replace(base, body=Segment(np.insert(body, drain, before, axis=0), offsets))
    found = judge(base, bad)
    assert found.safe is False and found.why == "deadlock"
    assert not verify(bad).ok


def test_the_judge_sees_a_deadlock() -> None:
    base = make(workers=2)
    found = judge(base, without(base, "body", "mlp_norm", record.SIGNAL_WORD, record.SIGNALS))
    assert found.safe is False and found.why == "deadlock"


def test_the_judge_sees_a_total_that_drifts() -> None:
    base = make(workers=1)
    records = base.epilogue.records.copy()
    assert not records[-1, record.SIGNAL_WORD]
    records[-1, record.SIGNAL_WORD] = record.counter_word(int(np.flatnonzero(base.totals_last[0])[0]))
    found = judge(base, replace(base, epilogue=Segment(records, base.epilogue.offsets)))
    assert found.safe is False and ("totals" in found.why or "final_norm" in found.why)  # early in the next launch
