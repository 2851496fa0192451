"""The roles of the Hopper interpreter on the host: whole programs on fibres, under many interleavings and with every
rule of the pages checked; and planted bugs, each found by a check.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from protocol import LaunchImage
from tiny_llama import make_llama

from megakernel import machine as machines
from megakernel.isa import Buffer, Dtype
from megakernel.isa.record import SIGNAL_WORD
from megakernel.program import Program
from megakernel.runtime import Chunk, SampleRow, build_step, check_step
from megakernel.runtime.reference import ReferenceBackend
from megakernel.scheduler import Options, compile_program

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {"heads": 6, "kv_heads": 2, "head_dim": 16, "hidden": 48, "ffn": 72},
    "wide": {"heads": 4, "kv_heads": 1, "head_dim": 80, "hidden": 64, "ffn": 136, "attention_bias": True},
    "fewer heads than ranks": {"heads": 3, "kv_heads": 3, "head_dim": 24, "hidden": 48, "ffn": 40, "mlp_bias": True},
}
LIMITS = {"max_seqs": 4, "max_context": 512}
PAGES = 16


def h100(workers: int, **fields: Any) -> machines.Machine:
    return replace(machines.MACHINES["h100"], workers=workers, tile_rows=32, tile_cols=64, **fields)


def make(
    shape: str,
    tp: int,
    options: Options,
    *,
    workers: int = 2,
    chunks: tuple[tuple[int, int], ...] = ((200, 3), (0, 30)),
) -> tuple[ReferenceBackend, Program, Any]:
    """A backend with a random KV cache, a program, and a step that runs `chunks` (start, tokens), one row left over."""
    _, checkpoint = make_llama(1, layers=2, **SHAPES[shape])
    rows = sum(count for _, count in chunks)
    program = compile_program(
        checkpoint.config,
        h100(workers),
        dtype=Dtype.BF16,
        tokens=rows + 1,
        logit_rows=len(chunks) + 1,
        tp=tp,
        options=options,
        **LIMITS,
    )
    backend = ReferenceBackend(checkpoint, program.dims, PAGES, dtype=Dtype.BF16)
    rng = np.random.default_rng(7)
    for rank in range(tp):
        for layer in range(program.dims.layers):
            for buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
                cache = backend.buffer(buffer, layer, rank)
                cache[:] = (rng.standard_normal(cache.shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    order = rng.permutation(PAGES).tolist()
    step = [
        Chunk(
            slot,
            start,
            rng.integers(0, 100, count).tolist(),
            order[4 * slot : 4 * slot + 4],
            [SampleRow(index=count - 1)],
        )
        for slot, (start, count) in enumerate(chunks)
    ]
    table = build_step(program.dims, step)
    check_step(table)
    return backend, program, table


def results(image: LaunchImage) -> dict[str, Any]:
    """All that a launch leaves to the host or to the next one, by rank."""
    d = image.dims
    out: dict[str, Any] = {}
    for rank in range(d.tp):
        for buffer in (Buffer.HISTORY, Buffer.LOGITS, Buffer.TOKENS_OUT, Buffer.LOGPROBS_OUT, Buffer.X):
            out[f"{buffer.name} {rank}"] = image.buffer(buffer, 0, rank).copy()
        for layer in range(d.layers):
            for buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
                out[f"{buffer.name} {rank} {layer}"] = image.buffer(buffer, layer, rank).copy()
    return out


def same(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of what differs in any bit."""
    return [name for name in a if a[name].tobytes() != b[name].tobytes()]


CASES = [
    ("grouped", 1, Options(matmul="tensor")),
    ("grouped", 1, Options(matmul="dots", queue="body")),
    ("grouped", 1, Options(matmul="dots", norm="next")),
    ("grouped", 2, Options(matmul="tensor", queue="attention", o="sharded", residual="dealt")),
    ("grouped", 2, Options(matmul="tensor", queue="body", o="replicated", residual="dealt", norm="next")),
    ("wide", 1, Options(matmul="tensor", queue="body")),
    ("wide", 2, Options(matmul="dots", o="replicated", residual="dealt")),
    ("wide", 4, Options(matmul="tensor", o="replicated", residual="replicated")),
    ("fewer heads than ranks", 4, Options(matmul="tensor", o="sharded", residual="replicated")),
    ("fewer heads than ranks", 8, Options(matmul="dots", o="sharded", residual="dealt")),
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
