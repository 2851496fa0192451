"""Tests of pairs of SMs, on fibres. The two blocks of a pair load weights for each other. Programs for pairs give the
same bits as programs for single SMs."""

import re
from dataclasses import replace

import numpy as np
import pytest
from gpu_programs import make, results, same
from protocol import LaunchImage

from megakernel.runtime.cuda.pages import attention_pages
from megakernel.runtime.cuda.params import Ablation
from megakernel.runtime.cuda.stall import explain
from megakernel.scheduler import Options

PAIRS = Options(matmul="tensor", pairs="on")
CHUNKS = ((200, 3), (0, 30))  # (start, tokens)
DEEP = ((7, 1), (300, 1), (20, 1), (400, 1))
CASES = [
    ("grouped", 1, PAIRS),
    ("grouped", 2, replace(PAIRS, queue="attention", o="sharded", residual="dealt")),
    ("grouped", 2, replace(PAIRS, queue="body", o="replicated", residual="dealt", norm="next")),
    ("wide", 1, replace(PAIRS, queue="body")),
    ("wide", 4, replace(PAIRS, o="replicated", residual="replicated")),
    ("fewer heads than ranks", 4, replace(PAIRS, o="sharded", residual="replicated")),
    ("norms of heads", 1, replace(PAIRS, queue="body")),
    ("norms of wide heads", 1, replace(PAIRS, norm="next")),
    ("whole pages", 1, PAIRS),
]


@pytest.mark.parametrize(
    ("shape", "tp", "options", "chunks"), [(*case, CHUNKS) for case in CASES] + [("wide", 1, PAIRS, DEEP)]
)
def test_any_interleaving_of_pairs_gives_the_bits_of_single_sms(
    shape: str, tp: int, options: Options, chunks: tuple[tuple[int, int], ...]
) -> None:
    alone = LaunchImage(*make(shape, tp, replace(options, pairs="off"), workers=4, chunks=chunks))
    alone.run_in_sequence()
    expected = results(alone)
    backend, program, table = make(shape, tp, options, workers=4, chunks=chunks)
    assert (program.dims.worker.sms, program.workers, program.processors) == (2, 2, 4)
    image = LaunchImage(backend, program, table)
    for seed in range(4):
        image.restore()
        image.params.pipelined = seed != 3
        assert image.run(seed) == ""
        assert same(results(image), expected) == [], f"seed {seed}"
        totals = program.totals()
        assert all((image.counters(rank) == 2 * totals[:, rank]).all() for rank in range(tp))


def test_the_pages_of_attention_differ_between_the_sms_of_some_pair() -> None:
    """Some attention instructions of the cases above take more pages on the first SM of a pair, others on the second.
    Empty pages make the page rings of both SMs advance equally. The cases therefore test empty pages on either SM."""
    more = set()
    for chunks in (CHUNKS, DEEP):
        _, program, table = make("wide", 1, PAIRS, workers=4, chunks=chunks)
        view = table.rank(0)
        items = slice(int(view.slot_items[-1]))
        taken = attention_pages(view.item_rows[items], view.item_kv_heads[items], view.item_blocks[items], program.dims)
        for begin, end in zip(view.slot_items[:-1], view.slot_items[1:], strict=True):
            more.add(int(np.sign(taken[begin:end:2].sum() - taken[begin + 1 : end : 2].sum())))
    assert {1, -1} <= more


@pytest.mark.slow
@pytest.mark.parametrize("ablation", Ablation)
def test_launches_of_pairs_that_leave_something_out_come_to_their_end(ablation: Ablation) -> None:
    image = LaunchImage(*make("grouped", 2, replace(PAIRS, queue="body", residual="dealt"), workers=4))
    image.params.synchronise = 0
    for seed in range(4):
        assert image.run(seed, ablation=ablation) == ""
        assert not image.counters(0).any()


@pytest.mark.parametrize(
    ("bug", "what"),
    [
        ("lost load", r"consumer \d .* for page \d+ to be filled"),
        ("never retired", r"controller .* for the instruction in slot \d to end"),
    ],
)
@pytest.mark.parametrize("queue", ["none", "body"])
def test_names_the_pair_that_keeps_the_others_waiting(bug: str, what: str, queue: str) -> None:
    options = replace(PAIRS, o="sharded", residual="dealt", queue=queue)
    backend, program, table = make("grouped", 2, options, workers=4)
    image = LaunchImage(backend, program, table)
    found = 0
    for seed, block in enumerate((0, 3, 5, 6)):
        image.restore()
        said = image.run(seed, bug, block)
        if not said:  # the block ran too few instructions to reach the bug
            continue
        found += 1
        assert "deadlock" in said and "never completed" in said and "did not end" not in said, said
        why = explain(program, table, image.waits)
        rank, worker = divmod(block // 2, program.workers)
        assert re.match(rf"the {what.replace('.*', f'of rank {rank} worker {worker} SM [01] .*')}", why), why
    assert found >= 2
