"""Tests of the Hopper interpreter's warp roles (controller, loaders, consumers, storer) on the host. Whole programs run
on fibres, under many interleavings, and give the same bits. If a warp waits for something that never happens, the
launch ends, and the error names the wait that blocks all the others."""

import ctypes
import re
from dataclasses import replace

import numpy as np
import pytest
import small_programs
from gpu_programs import make, results, same
from mutate import edit
from numpy.typing import NDArray
from protocol import LaunchImage

from megakernel.isa import Buffer, Operation, StepTable
from megakernel.isa.record import (
    INDEXED,
    OPERAND_WORD,
    SIGNAL_WORD,
    SIGNALS,
    WAIT_WORD,
    WORDS,
    phase_number,
    signals,
    word_counter,
)
from megakernel.runtime.cuda import stall
from megakernel.runtime.cuda.params import Ablation
from megakernel.runtime.cuda.stall import COUNTER, Wait, explain
from megakernel.scheduler import Options
from megakernel.trace import EPILOGUE

CASES = [
    ("grouped", 1, Options(matmul="tensor")),
    ("grouped", 1, Options(matmul="dots", queue="body", norm="inside")),
    ("grouped", 1, Options(matmul="dots", norm="next")),
    ("grouped", 2, Options(matmul="tensor", queue="attention", o="sharded", residual="dealt")),
    ("grouped", 2, Options(matmul="tensor", queue="body", o="replicated", residual="dealt", norm="next")),
    ("wide", 1, Options(matmul="tensor", queue="body")),
    ("wide", 2, Options(matmul="dots", o="replicated", residual="dealt")),
    ("wide", 4, Options(matmul="tensor", o="replicated", residual="replicated")),
    ("fewer heads than ranks", 4, Options(matmul="tensor", o="sharded", residual="replicated")),
    ("fewer heads than ranks", 8, Options(matmul="dots", o="sharded", residual="dealt")),
    ("wide", 2, Options(matmul="dots", o="sharded", residual="replicated", norm="inside")),
    ("norms of heads", 1, Options(matmul="tensor", queue="body")),
    ("norms of heads", 1, Options(matmul="dots", norm="inside")),
    ("norms of wide heads", 1, Options(matmul="dots", queue="body")),
    ("norms of wide heads", 1, Options(matmul="tensor", norm="next")),
    ("norms of heads", 2, Options(matmul="tensor", o="replicated", residual="dealt")),
    ("norms of wide heads", 2, Options(matmul="dots", o="sharded", residual="replicated", norm="inside")),
    ("whole pages", 1, Options(matmul="tensor")),
    ("whole pages", 1, Options(matmul="dots", norm="next")),
]


@pytest.mark.parametrize(
    ("shape", "tp", "options"), CASES, ids=lambda v: str(v) if not isinstance(v, Options) else v.matmul
)
def test_any_interleaving_gives_the_bits_of_the_sequence(shape: str, tp: int, options: Options) -> None:
    backend, program, table = make(shape, tp, options)
    image = LaunchImage(backend, program, table)
    image.run_in_sequence()
    expected = results(image)
    for seed in range(4):
        image.restore()
        image.params.pipelined = seed != 3
        assert image.run(seed) == ""
        assert same(results(image), expected) == [], f"seed {seed}"
        totals = program.totals()
        assert all((image.counters(rank) == totals[:, rank]).all() for rank in range(tp))
    reference = backend.launch(program, table)
    live = int((table.logit_rows >= 0).sum())
    d = program.dims
    logits = np.stack([image.buffer(Buffer.LOGITS, rank=i // d.own_logit_rows)[i] for i in range(live)])
    assert np.abs(logits - reference.logits[:live]).max() < 0.03 * reference.logits[:live].std()
    assert (image.buffer(Buffer.TOKENS_OUT)[:live] == reference.tokens[:live]).all()


@pytest.mark.parametrize(("tp", "queue"), [(1, "none"), (1, "body"), (2, "none")])
def test_norms_inside_matmuls_have_the_bits_of_norms_of_their_own(tp: int, queue: str) -> None:
    options = Options(matmul="dots", queue=queue, norm="own", residual="replicated")
    images = []
    for norm in ("own", "inside"):
        backend, program, table = make("grouped", tp, replace(options, norm=norm))
        assert any(phase.norm for phase in program.forward) == (norm == "inside")
        images.append(LaunchImage(backend, program, table))
    assert images[0].run(0) == ""
    expected = results(images[0])
    for seed in range(1, 5):
        images[1].restore()
        assert images[1].run(seed) == ""
        assert same(results(images[1]), expected) == [], f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("ablation", Ablation)
@pytest.mark.parametrize("matmul", ["tensor", "dots"])
def test_launches_that_leave_something_out_come_to_their_end(matmul: str, ablation: Ablation) -> None:
    """Launches without waits and signals obey the rules of shared-memory pages, and each of several launches ends. The
    same holds for launches that also omit copies or computation, as `ablation` says."""
    backend, program, table = make("grouped", 2, Options(matmul=matmul, queue="body", residual="dealt"))
    image = LaunchImage(backend, program, table)
    image.params.synchronise = 0
    for seed in range(4):
        before = image.buffer(Buffer.TOKENS_OUT).copy()
        assert image.run(seed, ablation=ablation) == ""
        changed = image.buffer(Buffer.TOKENS_OUT).tobytes() != before.tobytes()
        assert changed == (seed == 0 and ablation is not Ablation.COMPUTE)
        assert not image.counters(0).any()


@pytest.mark.parametrize("pairs", ["off", "on"])
def test_launches_follow_each_other(pairs: str) -> None:
    """Repeated launches give the same bits, although counters and queue claims continue from their last values. The
    residual X is summed anew in each launch."""
    options = Options(matmul="tensor", queue="body", pairs=pairs)
    backend, program, table = make("grouped", 2, options, workers=4)
    image = LaunchImage(backend, program, table)
    assert image.run(seed=5) == ""
    expected = results(image)
    for launch in (2, 3):
        assert image.run(seed=launch) == ""
        assert same(results(image), expected) == []
        assert (image.counters(1) == launch * program.dims.worker.sms * program.totals()[:, 1]).all()


def test_a_whole_gpu_of_eight_ranks() -> None:
    backend, program, table = make("wide", 8, Options(matmul="tensor", o="sharded"), workers=132)
    image = LaunchImage(backend, program, table)
    assert image.run(seed=3) == ""


def test_a_seed_repeats_a_run() -> None:
    backend, program, table = make("grouped", 1, Options(matmul="tensor"))
    image = LaunchImage(backend, program, table)
    said = []
    for _ in range(2):
        image.restore()
        said.append(image.run(11, "dropped arrival"))
    assert said[0] == said[1] != ""


def test_a_counter_that_never_comes_ends_the_launch_with_who_waits() -> None:
    backend, program, table = make("grouped", 1, Options(matmul="tensor"))
    said = LaunchImage(backend, edit(program, "body", 0, SIGNAL_WORD), table).run(seed=1)
    assert said.startswith("seed 1: deadlock:\n") and "abort" not in said
    assert "input loader waits in segment 1 layer 0 record" in said and "for counter" in said


# -- waits that never end

BODY = r"in body record \d+ \(\w+, layer \d\)"
PARITY = r"the barrier's phase of parity [01] does not complete"
SAID = {
    "dropped arrival": rf"the (weight|input) loader of {{}} waits {BODY} for page \d+ to be released: {PARITY}",
    "lost load": rf"the consumer \d of {{}} waits {BODY} for page \d+ to be filled: {PARITY}",
    "lost input": rf"the consumer \d of {{}} waits {BODY} for page \d+ to be filled: {PARITY}",
    "hanging": rf"the storer of {{}} waits {BODY} for .*: {PARITY}, and consumer [0-7, ]*7 is still at work",
    "never retired": r"the controller of {} waits before .* for the instruction in slot \d to end: " + PARITY,
}


# The end of the error message for each bug. After a dropped arrival, an abort ends all waits. After a lost load or
# input, or if a consumer does not report the end of an instruction, some warps wait until the test ends their waits. A
# hanging warp never ends.
ENDS = {
    "dropped arrival": "",
    "lost load": "some warps waited for an operation that never completed",
    "lost input": "some warps waited for an operation that never completed",
    "never retired": "some warps waited for an operation that never completed",
    "hanging": "some warps waited for an operation that never completed\nand an abort did not end it",
}


@pytest.mark.slow
@pytest.mark.parametrize("queue", ["none", "body"])
@pytest.mark.parametrize("bug", SAID)
def test_names_the_block_that_keeps_the_others_waiting(bug: str, queue: str) -> None:
    options = Options(matmul="tensor", o="sharded", residual="dealt", queue=queue)
    backend, program, table = make("grouped", 2, options)
    image = LaunchImage(backend, program, table)
    found = 0
    for seed, block in enumerate((0, 3, 1, 2)):
        image.restore()
        said = image.run(seed, bug, block)
        if not said:  # the block ran too few instructions to reach the bug
            continue
        found += 1
        assert "deadlock" in said and said.endswith(ENDS[bug]) and ("never completed" in said) == ("never" in ENDS[bug])
        rank, worker = divmod(block, program.workers)
        why = explain(program, table, image.waits)
        assert re.fullmatch(SAID[bug].format(f"rank {rank} worker {worker}"), why), (seed, why)
    assert found >= 2


@pytest.mark.parametrize(("waits", "signals"), [("lm_head", ["final_norm"]), ("sample", ["lm_head"])])
def test_a_wait_names_only_the_phases_that_signal_its_counter(waits: str, signals: list[str]) -> None:
    program = small_programs.make(workers=2)
    records, _ = program.numbered(2)
    wanted = records[phase_number(records) == program.forward.by_name[waits].number][0]
    counter = int(word_counter(wanted[WAIT_WORD]))
    wait = Wait(0, 0, 0, 0, segment=2, layer=EPILOGUE, number=0, kind=COUNTER, index=counter, value=0, expected=1)
    assert stall._signallers(program, wait) == signals


def _slots_that_signal(table: StepTable) -> NDArray[np.intp]:
    """Return the attention slots with at least one item that reads the whole KV range of its rows."""
    whole = np.flatnonzero(table.item_split[: table.slot_items[-1]] < 0)
    return np.searchsorted(table.slot_items, whole, "right") - 1


@pytest.mark.parametrize("queue", ["none", "attention", "body"])
def test_names_the_signal_that_is_missing(queue: str) -> None:
    """If an instruction of any phase loses its signals, the error names a wait for these signals. It does not name
    waits that are only consequences of that wait."""
    backend, program, table = make("grouped", 2, Options(matmul="tensor", o="sharded", residual="dealt", queue=queue))
    whole, _ = program.numbered(1)
    rng, image = np.random.default_rng(5), LaunchImage(backend, program, table)
    loses = signals(whole).any(1)
    # Choose attention instructions that are sure to signal. An instruction without attention items signals nothing.
    # If several instructions share the KV range of some rows, only the one that ends last signals.
    signal = [_slots_that_signal(table.rank(rank)) for rank in range(2)]
    numbers = phase_number(whole)
    attention = np.isin(numbers, program.forward.numbers(Operation.ATTENTION))
    loses[attention] &= np.isin(whole[attention, OPERAND_WORD], np.intersect1d(*signal))
    for number in np.unique(numbers[loses]):
        row = int(rng.choice(np.flatnonzero((numbers == number) & loses)))
        image.restore()
        streams = len(program.body.records)
        base, at = (image.params.records[1], row) if row < streams else (image.params.records[3], row - streams)
        ctypes.memset(base + 4 * (at * WORDS + SIGNAL_WORD), 0, 4 * SIGNALS)
        assert image.run(int(number))
        why = explain(program, table, image.waits)
        counters = set(word_counter(signals(whole)[row]).tolist()) - {-1}
        grid = bool((signals(whole)[row] & INDEXED).any())
        got = re.fullmatch(
            r"the input loader of rank \d worker \d waits in \w+ record \d+ \(.*\) for counter (\d+): in block [0-2] "
            r"it has value \d+, expected \d+: a signal of ([a-z_ ]+) is missing",
            why,
        )
        name = program.forward.by_number[int(number)].name
        assert got and (grid or int(got[1]) in counters) and name in got[2].split(" or "), (name, counters, why)


@pytest.mark.parametrize(("segment", "number"), [(1, 1 << 20), (1, -7), (9, 0)])
def test_says_that_a_task_was_overwritten(segment: int, number: int) -> None:
    program = small_programs.make(workers=2)
    lost = {"segment": segment, "layer": 0, "number": number, "value": 0, "expected": 1}
    for kind, what in ((COUNTER, "counter 3: it has value 0, expected 1"), ("full", "page 3 to be filled")):
        wait = Wait(rank=0, worker=1, sm=0, warp=0, kind=kind, index=3, **lost)
        said = explain(program, StepTable(program.dims), [wait])
        assert f"waits in record {number} of segment {segment} for {what}" in said
        assert said.endswith("the program has no such instruction: a block's memory was overwritten")
