"""Tests that the verifier accepts correct programs and rejects incorrect ones."""

import importlib
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from compiled import compiled
from ground_truth import unsafe
from handmade import handmade, llama, rank_dims, small_dims
from handmade import record as make_record
from mutate import KINDS, edit, edit_operand, rows_of, with_phases

from megakernel.isa import DRAIN, JOIN, Buffer, Dtype, Forward, Operation, Result, Rows, Units, record
from megakernel.machine import host
from megakernel.model.config import ModelConfig
from megakernel.program import Program, Segment
from megakernel.scheduler.verify import verify

LOWERINGS = [{"replicated_o": o, "replicated_residual": hop} for o in (0, 1) for hop in (0, 1)]
QUEUES = ("none", "attention", "body")
TINY = small_dims(tokens=6, layers=2, heads=2, kv_heads=2, hidden=8, ffn=16, vocab=8)


def insert(program: Program, name: str, stream: int, position: int, words: np.ndarray) -> Program:
    segment: Segment = getattr(program, name)
    records = np.insert(segment.records, segment.offsets[stream] + position, words, axis=0)
    offsets = segment.offsets + (np.arange(len(segment.offsets)) > stream).astype(np.int32)
    return replace(program, **{name: Segment(records, offsets)})


def join(waits: list[int], signals: list[int]) -> np.ndarray:
    words = [[record.counter_word(counter) for counter in counters] for counters in (waits, signals)]
    return make_record(JOIN, waits=words[0], signals=words[1])


def with_counters(program: Program, totals: list[int]) -> Program:
    more, none = np.array([totals], dtype=np.int32), np.zeros((1, len(totals)), dtype=np.int32)
    return replace(
        program,
        counters=program.counters + len(totals),
        totals_first=np.concatenate([program.totals_first, more], axis=1),
        totals_middle=np.concatenate([program.totals_middle, more], axis=1),
        totals_last=np.concatenate([program.totals_last, none], axis=1),
    )


def with_totals(program: Program, rank: int | slice, counter: int | slice, factor: float) -> Program:
    """Multiply the totals of these counters by `factor` in all layers."""
    totals = {name: getattr(program, name).copy() for name in ("totals_first", "totals_middle")}
    for array in totals.values():
        array[rank, counter] = array[rank, counter] * factor
    return replace(program, **totals)


# -- good programs


@pytest.mark.parametrize(("workers", "layers"), [(1, 1), (1, 5), (5, 3)])
def test_accepts_programs_made_by_hand(workers: int, layers: int) -> None:
    program = handmade(small_dims(layers=layers), workers)
    report = verify(program)
    assert report.violations == []
    assert report.ok and report.checked == program.instructions
    assert not any(unsafe(program, program, seed) for seed in range(2))


@pytest.mark.parametrize(
    ("tp", "lowering", "queue"),
    [
        *((2, lowering, queue) for lowering in LOWERINGS for queue in QUEUES),
        *((8, lowering, queue) for lowering, queue in zip(LOWERINGS, QUEUES, strict=False)),
    ],
)
def test_accepts_ranks_and_queues_made_by_hand(tp: int, lowering: dict[str, int], queue: str) -> None:
    """The model has only three heads and three groups of FFN columns, so with 4 or 8 ranks, some ranks have none."""
    program = handmade(rank_dims(tp, **lowering), workers=2, queue=queue)
    assert verify(program).violations == []
    assert tp == 8 or not unsafe(program, program, seed=tp, runs=2)


@pytest.mark.parametrize("norm", ["own", "next", "inside"])
@pytest.mark.parametrize("tp", [1, 2])
def test_accepts_norms_wherever_they_are(norm: str, tp: int) -> None:
    dims = rank_dims(tp, tokens=5, replicated_residual=int(tp > 1))
    program = handmade(dims, forward=llama(dims, norm))
    assert verify(program).violations == []
    assert not unsafe(program, program)


def test_a_norm_on_the_way_in_needs_the_rows_at_hand() -> None:
    """A matmul may normalise its inputs only if its rank has all rows of these inputs. On a GPU, a matmul with dot
    products can normalise only a few rows, and a matmul with matrix units none."""
    dims = rank_dims(2, tokens=4)
    rejects(handmade(dims, forward=llama(dims, "inside")), "qkv_rope.* another rank has these rows of the residual")
    few = {"hidden": 1024, "tokens": 8, "row_block": 8, "ring_pages": 64, "dtype": int(Dtype.BF16)}
    for rows, units, ok in ((8, Units.DOTS, True), (9, Units.DOTS, False), (8, Units.TENSOR, False)):
        d = small_dims(**few | {"tokens": rows, "row_block": rows, "units": int(units)})
        found = verify(handmade(d, tile=64, forward=llama(d, "inside"))).violations
        assert any("more rows than a matmul can normalise" in v for v in found) != ok, found


# -- bad phases


@pytest.mark.parametrize(
    ("tp", "name", "change", "violation"),
    [
        (1, "qkv_rope", {"weights": Buffer.W_DOWN}, r"its weights W_DOWN are .*\[16, 24\] of .*, not .*\[32, 24\]"),
        (1, "gate_up_silu", {"weights": Buffer.W_QKV}, r"not weights \[2, 32, 16\]"),
        (1, "gate_up_silu", {"inputs": Buffer.X}, "its inputs X are activations .* of F32, not .* of the compute type"),
        (1, "gate_up_silu", {"norm": Buffer.MLP_NORM}, "its inputs H are .* of the compute type, not .* of F32"),
        (1, "gate_up_silu", {"inputs": Buffer.W_O}, "its inputs W_O are weights"),
        (1, "gate_up_silu", {"output": Buffer.Y}, "its output Y are"),
        (1, "down_proj", {"bias": Buffer.B_QKV}, "its bias B_QKV are"),
        (2, "down_partial", {"bias": Buffer.B_DOWN}, "may name norm; it names bias"),
        (1, "down_proj", {"weights": Buffer.X}, "its weights X are activations"),
        (1, "lm_head", {"inputs": Buffer.H}, "its inputs H are"),
        (1, "mlp_norm", {"weights": Buffer.B_QKV}, "its inputs X are"),
        (1, "mlp_norm", {"weights": Buffer.INV_FREQ}, r"its weights INV_FREQ are weights \[2, 2\]"),
        (1, "mlp_norm", {"inputs": Buffer.H}, "it reads and writes H"),
        (1, "embed", {"inputs": Buffer.X}, "must name output, weights and may name nothing"),
        (1, "sample", {"inputs": None}, "it names nothing"),
        (1, "qkv_rope", {"output": Buffer.ATTN}, "its output is not Q"),
        (1, "attention", {"output": Buffer.H}, "its output is not ATTN"),
        (1, "mlp_norm", {"result": Result.STORED}, "it cannot have the result STORED"),
        (1, "mlp_norm", {"result": Result.RESIDUAL}, "its output H are"),
        (2, "o_reduce", {"result": Result.RESIDUAL}, "it cannot have the result RESIDUAL"),
        (1, "o_proj", {"result": Result.PARTIAL}, "its output X are"),
        (1, "mlp_norm", {"weight_bits": 8.5}, "cannot have weights of 8.5 bits"),
        (1, "o_proj", {"weight_bits": 0.0}, "cannot have weights of 0.0 bits"),
        (1, "mlp_norm", {"rows": Rows.LOGIT}, "it cannot be in the body"),
        (1, "lm_head", {"rows": Rows.OWN}, "it cannot have the rows OWN"),
        (1, "final_norm", {"weights": Buffer.ATTN_NORM}, "ATTN_NORM has a copy for each layer"),
        (1, "attn_norm", {"ahead": -1}, "those of -1 layers ahead"),
        (1, "final_norm", {"ahead": 1}, "those of 1 layers ahead"),
        (1, "embed", {"operation": Operation.JOIN}, "a control operation cannot be a phase"),
        (1, "embed", {"name": "sample"}, "two phases have the same name"),
        (1, "embed", {"number": 9}, "phases are not numbered in order"),
        (2, "o_reduce", {"weights": Buffer.W_DOWN}, "are not partial products of its weights"),
        (2, "o_partial", {"result": Result.RESIDUAL, "output": Buffer.X}, r"inner length is 12, of which .* \[8, 4\]"),
    ],
)
def test_phases_make_sense(tp: int, name: str, change: dict[str, Any], violation: str) -> None:
    """Exactly one of the violations that a change causes matches `violation`. The change may cause others too."""
    program = handmade(rank_dims(tp) if tp > 1 else small_dims())
    segments = program.forward.segments
    forward = Forward(*(tuple(replace(p, **change) if p.name == name else p for p in s) for s in segments))
    found = verify(replace(program, forward=forward)).violations
    assert len([v for v in found if re.search(violation, v)]) == 1, found


@pytest.mark.parametrize(
    ("segments", "violation"),
    [
        (lambda p, b, e: (p, [*b, replace(b[2], name="more")], e), "more than one attention phase"),
        (lambda p, b, e: (p, b, e[:-1]), "not exactly one phase that samples"),
        (lambda p, b, e: (p, [b[0], b[2], b[1], *b[3:]], e), "overwritten after the attention that reads them"),
        (lambda p, b, e: ([*p, b[1]], b[2:], e), "qkv_rope: it cannot be in the prologue"),
        (lambda p, b, e: (p, b, [e[1], e[0], e[2]]), "lm_head.* reads Y .*, which nothing before it wrote"),
        (lambda p, b, e: (p[:1], b, e), "qkv_rope.* reads ROPE"),
    ],
)
def test_phases_make_sense_together(segments: Any, violation: str) -> None:
    program = handmade()
    rejects(with_phases(program, segments(*map(list, program.forward.segments))), violation)


# -- bad programs


def rejects(program: Program, *patterns: str) -> None:
    found = verify(program).violations
    for pattern in patterns:
        assert any(re.search(pattern, v) for v in found), found[:5]


@pytest.fixture(scope="module")
def two_ranks() -> Program:
    return handmade(rank_dims(2, tokens=4), workers=2)


def test_a_reduction_before_the_last_partial(two_ranks: Program) -> None:
    """The rank that adds up partial sums waits only for its own, so the other rank's sums may not be stored yet."""
    two_ranks = edit(two_ranks, "body", rows_of(two_ranks, "body", "o_partial", rank=1), record.SIGNAL_WORD)
    counter = record.word_counter(two_ranks.body.records[rows_of(two_ranks, "body", "o_reduce")[0], record.WAIT_WORD])
    fewer = with_totals(two_ranks, slice(None), slice(counter, counter + two_ranks.dims.bucket.row_blocks), 0.5)
    rejects(fewer, "o_reduce.* reads what .*o_partial.*rank 1.* wrote in REDUCE, rows")


@pytest.mark.parametrize(
    ("segment", "name", "rank", "violation"),
    [
        ("body", "o_partial", 0, "o_reduce.* reads REDUCE rows .* of rank 0, which no o_partial wrote"),
        ("body", "mlp_norm", 0, "gate_up_silu.* reads H rows .* of rank 1, which no mlp_norm wrote"),
        ("prologue", "embed", 0, "attn_norm.* reads X rows .*, which no embed wrote; last written by nothing"),
        ("epilogue", "sample", 1, "the host reads TOKENS_OUT rows 2..3.* which no sample wrote"),
        # Every rank writes some rows of Y, so without the final_norm of one rank, some rows may be missing.
        ("epilogue", "final_norm", 1, "lm_head.* reads Y .*, which no final_norm wrote"),
    ],
)
def test_missing_work_is_missed(two_ranks: Program, segment: str, name: str, rank: int, violation: str) -> None:
    rejects(without_work(two_ranks, segment, rows_of(two_ranks, segment, name, rank)[0]), violation)


def without_work(program: Program, name: str, row: int) -> Program:
    """Replace a record by a join, an instruction without work, with the same waits and signals except indexed waits."""
    words = getattr(program, name).records[row]
    indexed = [w for w in range(record.WAIT_WORD, record.SIGNAL_WORD) if words[w] & record.INDEXED]
    cleared = [*range(record.OPERAND_WORD, record.WAIT_WORD), *indexed]
    return edit(edit(program, name, row, cleared), name, row, 0, JOIN.number)


def test_rows_at_a_rank_that_does_not_own_them(two_ranks: Program) -> None:
    row = rows_of(two_ranks, "body", "down_reduce", rank=0)[0]
    rejects(edit_operand(two_ranks, "body", row, "row", 2), "down_reduce.* another rank has these rows of the residual")
    rejects(edit_operand(two_ranks, "body", row, "rows", 3), "down_reduce.* its rows lie in more than one row block")


def test_a_norm_that_other_ranks_do_not_hear_of(two_ranks: Program) -> None:
    """A norm stores its rows on all ranks but signals only its own, so matmuls of another may read them too early."""
    row = rows_of(two_ranks, "body", "attn_norm", rank=0)[0]
    word = int(two_ranks.body.records[row, record.SIGNAL_WORD])
    own = word & ~(record.RANK_MASK << record.RANK_SHIFT)
    counter = record.word_counter(np.int32(word))
    program = edit(with_totals(two_ranks, 1, counter, 0), "body", row, record.SIGNAL_WORD, own)
    rejects(program, "qkv_rope.*rank 1.* reads what .*attn_norm.*rank 0.* wrote in H, .* of rank 1")


def test_a_worker_that_leaves_early_may_overtake(two_ranks: Program) -> None:
    """A worker's last instruction does not wait for other workers, so the worker's next launch could overtake them."""
    last = len(two_ranks.epilogue.records) - 1
    rejects(
        edit(two_ranks, "epilogue", last, record.WAIT_WORD, 0),
        r"join\(\) \[epilogue, rank 1, worker 1.* may end its worker's launch before .* the next launch could overtake",
    )
    one = handmade(TINY)
    assert record.phase_number(one.epilogue.records[-1]) != JOIN.number
    assert verify(one).ok  # with one rank, the host separates launches


def test_a_worker_that_is_not_waited_for_may_be_overtaken(two_ranks: Program) -> None:
    row = rows_of(two_ranks, "epilogue", "join", rank=0)[-2]  # a join of worker 1; the last join is the exit barrier
    word = two_ranks.epilogue.records[row, record.SIGNAL_WORD]
    totals = two_ranks.totals_last.copy()
    totals[0, record.word_counter(word)] -= 1
    program = replace(edit(two_ranks, "epilogue", row, record.SIGNAL_WORD, 0), totals_last=totals)
    rejects(program, "may end its worker's launch before")


# -- queues


@pytest.fixture(scope="module")
def queued() -> Program:
    return handmade(rank_dims(2, tokens=4), workers=2, queue="body")


def test_a_queue_is_claimed_whole_and_no_further(queued: Program) -> None:
    drains = rows_of(queued, "body", "drain")
    length = int(queued.queues.offsets[1])
    for row in drains:
        rejects(edit_operand(queued, "body", row, "end", length + 99), "drain.* its end lies outside its queue")
        rejects(edit_operand(queued, "body", row, "queue", 1), "drain.* its rank has 1 queues")
    short = edit_operand(queued, "body", drains, "end", 3)
    rejects(short, r"queue 0, position 3\]: no drain of its rank claims it")
    rejects(edit(queued, "queues", 0, 0, DRAIN.number), "a queue cannot hold a drain")


def test_neither_a_stream_nor_a_queue_keeps_data_apart() -> None:
    """Neither the order of a stream nor that of a queue is enough: a worker may begin a matmul before the norm that
    precedes it has stored its results."""
    d = small_dims(tokens=4, kv_heads=1, heads=1)
    for name, queue in (("body", "none"), ("queues", "body")):
        program = handmade(d, workers=1, queue=queue)
        program = edit(program, name, rows_of(program, name, "qkv_rope"), record.WAIT_WORD)
        rejects(program, r"qkv_rope.*position 1\] reads what .*attn_norm.*position 0\] wrote in H, .* and no counter")


@pytest.mark.parametrize(
    ("names", "violation"),
    [
        (("o_proj", "mlp_norm"), "mlp_norm.* overwrites what .*qkv_rope.* reads in H, .* no counter"),
        (("mlp_norm", "gate_up_silu", "down_proj"), "down_proj.* overwrites what .*o_proj.* wrote in X, .* no counter"),
    ],
)
def test_one_worker_overwrites_no_earlier_than_others(names: tuple[str, ...], violation: str) -> None:
    """An instruction that overwrites data must begin after the previous access of the data has ended. It needs no wait
    of its own if an instruction between the two, on the same worker, waits for that access. The reason is that the
    instructions of a worker begin in order."""
    program = handmade(small_dims(tokens=4, layers=1), workers=1)
    for name in names:
        assert all("overwrites" not in v for v in verify(program).violations)
        program = edit(program, "body", rows_of(program, "body", name), record.WAIT_WORD)
    rejects(program, violation)


def test_what_follows_a_drain_does_not_know_its_records() -> None:
    """After a drain, which runs a queue's records, a worker must wait for the results: others may still run records."""
    program = handmade(small_dims(layers=1), workers=2, queue="body")
    row = rows_of(program, "epilogue", "final_norm")[0]
    assert verify(program).ok
    rejects(edit(program, "epilogue", row, record.WAIT_WORD, 0), "final_norm.* reads what .*down_proj.* wrote in X")


def test_a_queue_out_of_order_may_deadlock(queued: Program) -> None:
    """In a queue, a record waits for a later record of the same queue. If only one worker claims from the queue, it
    waits in the first record for ever and never claims the later one."""
    norm, tile = rows_of(queued, "queues", "attn_norm", 0)[0], rows_of(queued, "queues", "qkv_rope", 0)[0]
    records = queued.queues.records.copy()
    records[[norm, tile]] = records[[tile, norm]]
    swapped = replace(queued, queues=Segment(records, queued.queues.offsets))
    rejects(swapped, "deadlock.*claimed|deadlock.*queue 0")


def test_a_queue_that_waits_for_what_follows_its_drains() -> None:
    """A queue's record waits for an instruction that follows a worker's drain (which claims and runs the queue's
    records). If that worker claims the record, the worker waits in it for ever."""
    program = handmade(small_dims(layers=1), workers=2, queue="attention")
    first = with_counters(program, [1])
    counter = first.counters - 1
    late = insert(first, "body", 0, rows_of(first, "body", "drain")[0] + 1, join([], [counter]))
    free = next(w for w in range(record.WAIT_WORD, record.SIGNAL_WORD) if not late.queues.records[0, w])
    bad = edit(late, "queues", 0, free, record.counter_word(counter))
    rejects(bad, "deadlock.*drain")
    assert unsafe(bad, bad)


def test_every_worker_may_hold_a_record_before_it_reaches_its_drain() -> None:
    """A drain, which runs a queue's records, must not wait for one of them: its worker may have claimed that record."""
    program = handmade(small_dims(layers=1), workers=2, queue="attention")
    word = int(program.body.records[rows_of(program, "body", "o_proj")[0], record.WAIT_WORD])
    for drains in (1, 2):
        rows = rows_of(program, "body", "drain")[:drains]
        bad = edit(program, "body", rows, record.WAIT_WORD, word)  # wait for attention, which the queue computes
        rejects(bad, "deadlock")
    assert unsafe(bad, bad)


def test_a_shorter_drain_leaves_the_rest_to_its_stream() -> None:
    """A worker has two drains, which run records of one queue: the first up to a given record, the second the rest. An
    instruction between the two drains may wait for records of the first drain, but not for records of the second
    drain."""
    program = handmade(small_dims(layers=1), workers=1, queue="body")
    first, second = rows_of(program, "body", "drain")
    end = int(program.body.records[first, record.OPERAND_WORD + 1])
    before, after = program.queues.records[0], program.queues.records[end]
    for words, ok in ((before, True), (after, False)):
        waits = with_counters(program, [1])
        counter = waits.counters - 1
        row = int(np.flatnonzero((program.queues.records == words).all(axis=1))[0])
        free = next(w for w in range(record.SIGNAL_WORD, record.WORDS) if not words[w])
        waits = edit(waits, "queues", row, free, record.counter_word(counter))
        assert verify(insert(waits, "body", 0, second, join([counter], []))).ok == ok


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
def test_names_what_missing_waits_leave_unordered(phase: str, violation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a phase's waits, messages name the pairs of accesses that are unordered: read after write, write after
    read, and write after write."""
    monkeypatch.setattr(importlib.import_module("megakernel.scheduler.verify.proof"), "_MOST", 10_000)
    program = handmade(workers=5)
    for name in ("body", "epilogue"):
        program = edit(program, name, rows_of(program, name, phase), record.WAIT_WORD)
    rejects(program, violation)


def test_finds_a_cycle_through_program_order() -> None:
    """One worker runs X, which waits for Y, then Z; another runs Y, which waits for Z. No two instructions wait for
    each other directly."""
    program = handmade(TINY)
    y, z = program.counters, program.counters + 1
    program = with_counters(program, [1, 1])
    y_after_z = insert(program, "body", 1, 0, join([z], [y]))
    good = insert(insert(y_after_z, "body", 0, 0, join([y], [])), "body", 0, 0, join([], [z]))
    assert verify(good).violations == []
    bad = insert(insert(y_after_z, "body", 0, 0, join([], [z])), "body", 0, 0, join([y], []))
    [violation] = verify(bad).violations
    assert violation.startswith("deadlock") and violation.count("join") == 3
    assert unsafe(bad, bad)


def test_an_attention_instruction_before_its_inputs_may_deadlock() -> None:
    """The step table assigns rows to attention instructions. It may give the last row block to an instruction whose
    worker computes q, k and v of this block only afterwards."""
    program = handmade(TINY)
    body = program.body
    attention = rows_of(program, "body", "attention")[0]
    order = np.arange(len(body.records))
    order[: attention + 1] = np.roll(order[: attention + 1], 1)
    early = replace(program, body=Segment(body.records[order], body.offsets))
    assert any(v.startswith("deadlock") for v in verify(early).violations)


@pytest.mark.parametrize("queue", ["none", "body"])
def test_three_layers_stand_for_all(queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("megakernel.scheduler.verify.proof")
    program = handmade(TINY.changed(layers=5), queue=queue)
    rng = np.random.default_rng(1)
    mutants = [mutant for mutate in KINDS.values() for _ in range(4) if (mutant := mutate(program, rng))]
    short = [verify(mutant).ok for mutant in mutants]
    monkeypatch.setattr(module, "_LAYERS", 99)
    assert short == [verify(mutant).ok for mutant in mutants]
    assert len(set(short)) == 2


def test_a_tile_may_not_cut_a_head_that_is_normalised() -> None:
    config = ModelConfig(40, 24, 20, layers=2, heads=6, kv_heads=3, head_dim=8, max_context=64, family="qwen3")
    good = compiled(config, host(2), 3, dtype=Dtype.F32, max_seqs=1, max_context=8)
    assert verify(good).violations == []
    found = verify(edit_operand(good, "body", rows_of(good, "body", "qkv_rope"), "cols", 6)).violations
    assert any("its column tile cuts a head" in violation for violation in found)
    for result, complaint in ((Result.HEADS, "its head_norm ATTN_NORM are"), (Result.GATED, "may name bias, norm; it")):
        phases = [replace(p, head_norm=Buffer.ATTN_NORM) if p.result is result else p for p in good.forward.body]
        broken = replace(good, forward=replace(good.forward, body=tuple(phases)))
        assert complaint in verify(broken).violations[0]
