"""The roles of the Hopper interpreter on threads, under a race detector."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
from gpu_programs import make, results, same
from protocol import LaunchImage

from megakernel.isa import Operation, Result
from megakernel.isa.record import OPERAND_WORD, phase_number
from megakernel.scheduler import Options

CHUNKS = ((130, 2), (0, 3))


@pytest.fixture(autouse=True, scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where ThreadSanitizer cannot be built or cannot run."""
    folder = tmp_path_factory.mktemp("detector")
    source, command = folder / "empty.cpp", folder / "empty"
    source.write_text("int main() { return 0; }\n")
    for step in (["g++", "-fsanitize=thread", str(source), "-o", str(command)], [str(command)]):
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"ThreadSanitizer does not work here: {done.stderr.strip()[:200]}")


@pytest.mark.parametrize(
    ("shape", "tp", "options"),
    [
        ("grouped", 2, Options(matmul="tensor", o="sharded", residual="dealt", norm="next", queue="body")),
        ("grouped", 2, Options(matmul="dots", o="replicated", residual="replicated")),
        ("norms of heads", 1, Options(matmul="dots", queue="body", norm="inside")),
    ],
    ids=["tensor", "dots", "norms of heads"],
)
def test_threads_race_nowhere_and_give_the_bits_of_fibres(shape: str, tp: int, options: Options) -> None:
    backend, program, table = make(shape, tp, options, chunks=CHUNKS)
    image = LaunchImage(backend, program, table)
    assert image.run(seed=0) == ""
    expected = results(image)
    image.restore()
    done = image.run_threads()
    assert done.stderr == "" and done.returncode == 0
    assert same(results(image), expected) == []


def test_tiles_of_normalised_heads_follow_each_other_without_a_race() -> None:
    """On one worker, of one head and few rows: no page that its warps share keeps one from running ahead."""
    backend, program, table = make("norms of heads", 1, Options(matmul="dots", norm="own"), chunks=((130, 2), (0, 37)))
    heads = program.forward.numbers(Operation.MATMUL, Result.HEADS)
    tiles = [r[OPERAND_WORD : OPERAND_WORD + 4].tolist() for r in program.body.stream(1) if phase_number(r) in heads]
    few = [i for i, (_, rows, _, cols) in enumerate(tiles) if (rows, cols) == (8, 64)]
    assert len(few) > 2 and np.diff(few).max() == 1
    done = LaunchImage(backend, program, table).run_threads()
    assert done.stderr == "" and done.returncode == 0


def test_finds_a_signal_that_releases_nothing() -> None:
    backend, program, table = make("grouped", 2, Options(matmul="tensor", o="sharded"), chunks=CHUNKS)
    done = LaunchImage(backend, program, table).run_threads("relaxed signal")
    assert "data race" in done.stderr
