"""Tests of the messages for waits that never end. They name the one wait that blocks all the others."""

import ctypes
import re

import numpy as np
import pytest
import small_programs
from gpu_programs import make
from launch_image import LaunchImage
from numpy.typing import NDArray

from megakernel.isa import Operation, StepTable, record
from megakernel.isa.record import phase_number, signals, word_counter
from megakernel.runtime.cuda import stall
from megakernel.runtime.cuda.stall import COUNTER, Wait, explain
from megakernel.scheduler import Options
from megakernel.trace import EPILOGUE


@pytest.mark.parametrize(("waits", "signals"), [("lm_head", ["final_norm"]), ("sample", ["lm_head"])])
def test_a_wait_names_only_the_phases_that_signal_its_counter(waits: str, signals: list[str]) -> None:
    program = small_programs.make(workers=2)
    records, _ = program.numbered(2)
    wanted = records[phase_number(records) == program.forward.by_name[waits].number][0]
    counter = int(word_counter(wanted[record.WAIT_WORD]))
    wait = Wait(0, 0, 0, segment=2, layer=EPILOGUE, number=0, kind=COUNTER, index=counter, value=0, expected=1)
    assert stall._signallers(program, wait) == signals


def _slots_that_signal(table: StepTable) -> NDArray[np.intp]:
    """Return the attention slots (lists of items) with at least one item that reads the whole KV range of its rows."""
    whole = np.flatnonzero(table.item_split[: table.slot_items[-1]] < 0)
    return np.searchsorted(table.slot_items, whole, "right") - 1


@pytest.mark.parametrize("queue", ["none", "attention", "body"])
def test_names_the_signal_that_is_missing(queue: str) -> None:
    """If an instruction of any phase loses its signals, the error names a wait for these signals. It does not name
    waits that are only consequences of that wait."""
    backend, program, table = make("grouped", 2, Options(matmul="tensor", o="sharded", residual="dealt", queue=queue))
    whole, _ = program.numbered(1)
    rng = np.random.default_rng(5)
    loses = signals(whole).any(1)
    # Choose attention instructions that are sure to signal. An instruction without attention items signals nothing.
    # If several instructions share the KV range of some rows, only the one that ends last signals.
    signal = [_slots_that_signal(table.rank(rank)) for rank in range(2)]
    numbers = phase_number(whole)
    attention = np.isin(numbers, program.forward.numbers(Operation.ATTENTION))
    loses[attention] &= np.isin(whole[attention, record.OPERAND_WORD], np.intersect1d(*signal))
    for number in np.unique(numbers[loses]):
        row = int(rng.choice(np.flatnonzero((numbers == number) & loses)))
        image = LaunchImage(backend, program, table)
        streams = len(program.body.records)
        base, at = (image.params.records[1], row) if row < streams else (image.params.records[3], row - streams)
        ctypes.memset(base + 4 * (at * record.WORDS + record.SIGNAL_WORD), 0, 4 * record.SIGNALS)
        assert image.run() == "deadlock"
        why = explain(program, table, image.waits)
        counters = set(word_counter(signals(whole)[row]).tolist()) - {-1}
        grid = bool((signals(whole)[row] & record.INDEXED).any())
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
        wait = Wait(rank=0, worker=1, warp=0, kind=kind, index=3, **lost)
        said = explain(program, StepTable(program.dims), [wait])
        assert f"waits in record {number} of segment {segment} for {what}" in said
        assert said.endswith("the program has no such instruction: a block's memory was overwritten")


CONTROLLER, WEIGHTS, STORER, CONSUMERS = 0, 1, 2, 4  # numbers of warps; the eight consumers begin at CONSUMERS


@pytest.mark.parametrize(
    ("waits", "named"),
    [
        # A page of weights never arrives: all consumers wait for it, and no loader waits before it fills the page.
        ([(CONSUMERS + n, "full", 3, 0) for n in range(8)], "consumer 0 of rank 0 worker 1 .* page 3 to be filled"),
        # A consumer did not release page 3, for which a loader waits before it fills the page again.
        (
            [(WEIGHTS, "empty", 3, 1), *((CONSUMERS + n, "full", 3, 0) for n in range(8))],
            "weight loader of rank 0 worker 1 .* page 3 to be released",
        ),
        # One consumer does not end its arithmetic, so the storer gets no output.
        (
            [(STORER, "ready", 1, 0), *((CONSUMERS + n, "filled", 2, 1) for n in range(7)), (WEIGHTS, "free", 2, 0)],
            "storer of rank 0 worker 1 .* and consumer 7 is still at work",
        ),
        # A consumer did not report the end of an instruction: the others wait for the next one.
        (
            [(CONTROLLER, "retired", 2, 0), *((CONSUMERS + n, "fetched", 3, 0) for n in range(8))],
            "controller of rank 0 worker 1 .* for the instruction in slot 2 to end",
        ),
    ],
    ids=["lost load", "page not released", "endless arithmetic", "never retired"],
)
def test_names_the_warp_that_holds_up_the_others(waits: list[tuple[int, str, int, int]], named: str) -> None:
    """Warps of worker 1 wait as listed. Worker 0 waits for a counter, but only because worker 1 is stuck."""
    program = small_programs.make(workers=2, layers=2)
    later = len(program.body.records) - 1
    found = [Wait(0, 0, 3, segment=1, layer=1, number=later, kind=COUNTER, index=0, value=0, expected=1)]
    for warp, kind, index, parity in waits:
        where = {"segment": -1 if kind in ("fetched", "retired") else 1, "layer": 0, "number": 0}
        found.append(Wait(0, 1, warp, **where, kind=kind, index=index, value=0, expected=parity))
    assert re.match(f"the {named}", explain(program, StepTable(program.dims), found))
