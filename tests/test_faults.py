"""Broken programs: a sample of the long run (benchmarks/verifier.py), and the judge on cases with known answers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from ground_truth import Verdict, adversarial, expected, explore, make_table
from mutants import edit
from mutate import KINDS
from small_programs import large, make, small

from megakernel.isa import BY_NAME, record
from megakernel.program import Program, Segment
from megakernel.scheduler import verify

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
