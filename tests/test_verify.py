"""The verifier accepts good programs and no bad one."""

from __future__ import annotations

import importlib
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from handmade import handmade, small_dims
from mutants import mutants
from run_once import run_once

from megakernel.isa import BY_NAME, Dtype, record
from megakernel.machine import Machine, host
from megakernel.model.config import LlamaConfig
from megakernel.program import Program, Segment
from megakernel.scheduler import compile_program
from megakernel.scheduler.verify import verify

TINY = small_dims(tokens=6, layers=2, heads=2, kv_heads=2, hidden=8, ffn=16, vocab=8)


def machine(workers: int) -> Machine:
    """Tiles so small that a tiny model has many."""
    return replace(host(workers), tile_rows=4, tile_cols=16, col_unit=8)


def compiled(
    workers: int, tokens: int, layers: int = 2, heads: int = 4, kv_heads: int = 2, logit_rows: int = 2
) -> Program:
    config = LlamaConfig(
        vocab=50, hidden=24, ffn=40, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=8, max_context=64
    )
    return compile_program(
        config, machine(workers), dtype=Dtype.F32, tokens=tokens, logit_rows=logit_rows, max_seqs=2, max_context=64
    )


def insert(program: Program, name: str, stream: int, position: int, words: np.ndarray) -> Program:
    segment: Segment = getattr(program, name)
    records = np.insert(segment.records, segment.offsets[stream] + position, words, axis=0)
    offsets = segment.offsets + (np.arange(len(segment.offsets)) > stream).astype(np.int32)
    return replace(program, **{name: Segment(records, offsets)})


def join(waits: list[int], signals: list[int]) -> np.ndarray:
    words = np.zeros(record.WORDS, dtype=np.int32)
    words[0] = BY_NAME["join"].opcode
    words[record.WAIT_WORD : record.WAIT_WORD + len(waits)] = [record.counter_word(c) for c in waits]
    words[record.SIGNAL_WORD : record.SIGNAL_WORD + len(signals)] = [record.counter_word(c) for c in signals]
    return words


def with_counters(program: Program, totals: list[int]) -> Program:
    """More counters, with these totals in every block that the body waits on."""
    more, none = np.array([totals], dtype=np.int32), np.zeros((1, len(totals)), dtype=np.int32)
    return replace(
        program,
        counters=program.counters + len(totals),
        totals_first=np.concatenate([program.totals_first, more], axis=1),
        totals_middle=np.concatenate([program.totals_middle, more], axis=1),
        totals_last=np.concatenate([program.totals_last, none], axis=1),
    )


# -- good programs


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_accepts_programs_made_by_hand(workers: int, layers: int) -> None:
    program = handmade(small_dims(layers=layers), workers)
    report = verify(program)
    assert report.violations == []
    assert report.ok and report.checked == program.instructions
    assert [run_once(program, seed) for seed in range(5)] == [None] * 5


@pytest.mark.parametrize("workers", [1, 2, 7, 40])
@pytest.mark.parametrize("tokens", [1, 4, 9, 33])
@pytest.mark.parametrize(("heads", "kv_heads", "layers"), [(4, 4, 1), (9, 3, 2), (8, 1, 4)])
def test_accepts_what_the_scheduler_makes(workers: int, tokens: int, heads: int, kv_heads: int, layers: int) -> None:
    program = compiled(workers, tokens, layers, heads, kv_heads, logit_rows=min(tokens, 5))
    assert verify(program).violations == []


def test_accepts_a_real_shape_on_all_sms() -> None:
    smollm2 = LlamaConfig(49152, 576, 1536, layers=30, heads=9, kv_heads=3, head_dim=64, max_context=2048)
    program = compile_program(
        smollm2, host(132), dtype=Dtype.BF16, tokens=512, logit_rows=16, max_seqs=16, max_context=2048
    )
    report = verify(program)
    assert report.violations == [] and report.checked == program.instructions


# -- bad programs


def reject_or_equivalent(name: str, mutant: Program, runs: int = 6) -> bool:
    """True if rejected. An accepted mutant must execute well in any order."""
    if not verify(mutant).ok:
        return True
    failures = {seed: error for seed in range(runs) if (error := run_once(mutant, seed))}
    assert not failures, f"{name}: accepted, but execution fails: {failures}"
    return False


def test_rejects_every_mutant_of_a_program_made_by_hand() -> None:
    verdicts = [reject_or_equivalent(*mutant) for mutant in mutants(handmade(TINY))]
    assert sum(verdicts) > 0.9 * len(verdicts)


@pytest.mark.parametrize("workers", [2, 3])
def test_rejects_mutants_of_compiled_programs(workers: int) -> None:
    every = list(mutants(compiled(workers, tokens=6)))
    chosen = random.Random(workers).sample(every, 250)
    assert sum(reject_or_equivalent(*mutant) for mutant in chosen) > 200


def test_no_word_makes_it_raise() -> None:
    program, random_ = handmade(TINY), random.Random(0)
    for _ in range(150):
        name = random_.choice(["prologue", "body", "epilogue"])
        segment: Segment = getattr(program, name)
        records = segment.records.copy()
        row, word = random_.randrange(len(records)), random_.randrange(record.WORDS)
        records[row, word] = random_.choice([random_.randrange(-(2**31), 2**31), random_.randrange(-2, 40)])
        edited = replace(program, **{name: Segment(records, segment.offsets)})
        reject_or_equivalent(f"{name}[{row}] word {word} = {records[row, word]}", edited, runs=5)


@pytest.mark.parametrize(
    ("phase", "violation"),
    [
        ("o_proj", "o_proj.* reads what .*attention item.* wrote in ATTN,"),
        ("o_proj", "mlp_norm.* overwrites what .*qkv_rope.* reads in H,"),
        ("o_proj", "qkv_rope.* overwrites what .*attention item.* reads in Q,"),
        ("mlp_norm", "down_proj.* overwrites what .*o_proj.* wrote in X,"),
        ("attn_norm", "attn_norm.* reads what .*down_proj.* wrote in X,"),
        ("final_norm", "final_norm.* reads what .*down_proj.* wrote in X,"),
        ("sample", "sample.* reads what .*lm_head.* wrote in LOGITS,"),
    ],
)
def test_names_what_a_missing_wait_leaves_unordered(
    phase: str, violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a phase's waits: read after write, write after read and write after write each have their message."""
    monkeypatch.setattr(importlib.import_module("megakernel.scheduler.verify"), "_MOST", 10_000)
    program = handmade(workers=5)
    for name in ("body", "epilogue"):
        segment: Segment = getattr(program, name)
        records = segment.records.copy()
        rows = record.opcode(records) == BY_NAME[phase].opcode
        records[rows, record.WAIT_WORD] = 0
        program = replace(program, **{name: Segment(records, segment.offsets)})
    found = verify(program).violations
    assert any(re.search(violation, v) for v in found), found


def test_finds_a_cycle_through_program_order() -> None:
    """[X waits Y; Z] on one worker and [Y waits Z] on another: no two instructions wait for one another directly."""
    program = handmade(TINY)
    y, z = program.counters, program.counters + 1
    program = with_counters(program, [1, 1])
    y_after_z = insert(program, "body", 1, 0, join([z], [y]))
    good = insert(insert(y_after_z, "body", 0, 0, join([y], [])), "body", 0, 0, join([], [z]))
    assert verify(good).violations == []
    bad = insert(insert(y_after_z, "body", 0, 0, join([], [z])), "body", 0, 0, join([y], []))
    [violation] = verify(bad).violations
    assert violation.startswith("deadlock") and violation.count("join") == 3
    assert any(run_once(bad, seed) == "deadlock" for seed in range(3))


def test_an_attention_instruction_before_its_inputs_may_deadlock() -> None:
    """Some step table gives slot 0 the last row block, whose q, k, v the same worker computes afterwards."""
    program = handmade(TINY)
    body = program.body
    attention = int(np.nonzero(record.opcode(body.stream(0)) == BY_NAME["attention"].opcode)[0][0])
    order = np.arange(len(body.records))
    order[: attention + 1] = np.roll(order[: attention + 1], 1)
    early = replace(program, body=Segment(body.records[order], body.offsets))
    assert any(v.startswith("deadlock") for v in verify(early).violations)


def test_three_layers_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("megakernel.scheduler.verify")
    program = handmade(replace(TINY, layers=5))
    chosen = random.Random(1).sample(list(mutants(program)), 200)
    short = [verify(mutant).ok for _, mutant in chosen]
    monkeypatch.setattr(module, "_LAYERS", 99)
    assert short == [verify(mutant).ok for _, mutant in chosen]
    assert len(set(short)) == 2
