"""What never comes ends the launch, and the error names who kept all the others waiting."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest
from gpu_programs import make
from numpy.typing import NDArray
from protocol import LaunchImage

from megakernel.isa import Operation, StepTable
from megakernel.isa.record import (
    INDEXED,
    OPERAND_WORD,
    SIGNAL_WORD,
    SIGNALS,
    WORDS,
    phase_number,
    signals,
    word_counter,
)
from megakernel.runtime.cuda.stall import explain
from megakernel.scheduler import Options

BODY = r"in body record \d+ \(\w+, layer \d\)"
PARITY = r"the barrier's phase of parity [01] does not complete"
SAID = {
    "dropped arrival": rf"the (weight|input) loader of {{}} waits {BODY} for page \d+ to be released: {PARITY}",
    "lost load": rf"the consumer \d of {{}} waits {BODY} for page \d+ to be filled: {PARITY}",
    "lost input": rf"the consumer \d of {{}} waits {BODY} for page \d+ to be filled: {PARITY}",
    "hanging": rf"the storer of {{}} waits {BODY} for .*: {PARITY}, and consumer [0-7, ]*7 is still at work",
    "never retired": r"the controller of {} waits before .* for the instruction in slot \d to end: " + PARITY,
}


# What lacks is made up for by an abort; or the others leave without it; or one of them never does.
ENDS = {
    "dropped arrival": "",
    "lost load": "some waited for what never came",
    "lost input": "some waited for what never came",
    "never retired": "some waited for what never came",
    "hanging": "some waited for what never came\nand an abort did not end it",
}


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
        if not said:  # what the block claimed was too little for the bug
            continue
        found += 1
        assert "deadlock" in said and said.endswith(ENDS[bug]) and ("never came" in said) == ("never" in ENDS[bug])
        rank, worker = divmod(block, program.workers)
        why = explain(program, table, image.waits)
        assert re.fullmatch(SAID[bug].format(f"rank {rank} worker {worker}"), why), (seed, why)
    assert found >= 2


def _slots_that_signal(table: StepTable) -> NDArray[np.intp]:
    """Slots of attention with an item that is no part of a split."""
    whole = np.flatnonzero(table.item_split[: table.slot_items[-1]] < 0)
    return np.searchsorted(table.slot_items, whole, "right") - 1


@pytest.mark.parametrize("queue", ["none", "attention", "body"])
def test_names_the_signal_that_is_missing(queue: str) -> None:
    """Of each phase one instruction loses its signals: whoever waits for them is named, and no one behind it."""
    backend, program, table = make("grouped", 2, Options(matmul="tensor", o="sharded", residual="dealt", queue=queue))
    whole, _ = program.numbered(1)
    rng, image = np.random.default_rng(5), LaunchImage(backend, program, table)
    loses = signals(whole).any(1)
    # A slot of attention without items signals nothing, and of a split's slots the last to end signals.
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
