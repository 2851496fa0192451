"""The roles of the Hopper interpreter on the host: whole programs on fibres, under many interleavings and with every
rule of the pages checked; and planted bugs, each found by a check.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gpu_programs import make, results, same
from protocol import LaunchImage

from megakernel.isa import Buffer
from megakernel.isa.record import SIGNAL_WORD
from megakernel.scheduler import Options

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


def test_launches_follow_each_other() -> None:
    """Counters and claims go on counting; a replay gives the same bits, X is added to from zero each time."""
    backend, program, table = make("grouped", 2, Options(matmul="tensor", queue="body"))
    image = LaunchImage(backend, program, table)
    assert image.run(seed=5) == ""
    expected = results(image)
    for launch in (2, 3):
        assert image.run(seed=launch) == ""
        assert same(results(image), expected) == []
        assert (image.counters(1) == launch * program.totals()[:, 1]).all()


def test_a_whole_gpu_of_eight_ranks() -> None:
    """132 blocks of 12 warps on each of 8 ranks."""
    backend, program, table = make("wide", 8, Options(matmul="tensor", o="sharded"), workers=132)
    image = LaunchImage(backend, program, table)
    assert image.run(seed=3) == ""


def test_a_seed_repeats_a_run() -> None:
    backend, program, table = make("grouped", 1, Options(matmul="tensor"))
    image = LaunchImage(backend, program, table)
    said = []
    for _ in range(2):
        image.restore()
        said.append(image.run(11, "early release"))
    assert said[0] == said[1] != ""


def test_a_counter_that_never_comes_ends_the_launch_with_who_waits() -> None:
    backend, program, table = make("grouped", 1, Options(matmul="tensor"))
    records = program.body.records.copy()
    records[0, SIGNAL_WORD] = 0
    broken = replace(program, body=replace(program.body, records=records))
    said = LaunchImage(backend, broken, table).run(seed=1)
    assert said.startswith("seed 1: deadlock:\n") and "abort" not in said
    assert "input loader waits in segment 1 layer 0 record" in said and "for counter" in said


@pytest.mark.parametrize(
    ("bug", "complaint"),
    [
        ("dropped arrival", "deadlock"),
        ("early release", "released while a store reads it"),
        ("no input fence", "waited for without a proxy fence"),
        ("no output fence", "has not fenced what it stored"),
        ("wrong phase", "reads page slot"),
        ("early signal", "signals before what it stored is there"),
        ("old map", "a tensor map that it has not acquired"),
    ],
)
def test_finds_a_planted_bug(bug: str, complaint: str) -> None:
    backend, program, table = make("grouped", 2, Options(matmul="tensor", o="sharded", residual="dealt"))
    image = LaunchImage(backend, program, table)
    found = []
    for seed in range(6):
        image.restore()
        found.append(image.run(seed, bug))
    assert sum(complaint in said for said in found) >= 3, found
