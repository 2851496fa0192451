"""`compile --search` finds a program that is valid and faster, and caches the result."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import fails, run

from megakernel import machine as machines
from megakernel.isa import Dtype
from megakernel.model import load_config
from megakernel.scheduler import Options
from megakernel.scheduler.options import Shape
from megakernel.scheduler.tune import Fastest, search
from megakernel.scheduler.verify import verify


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAKERNEL_CACHE", str(tmp_path))


@pytest.mark.slow
def test_a_search_improves_on_bad_sizes_and_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(load_config("random:llama-3.2-1b"), layers=4)
    begin = Options(queue="body", norm="own", shape=Shape(tile_cols=64))
    limits = {"dtype": Dtype.BF16, "max_seqs": 4, "max_context": 256}
    fastest = Fastest(config, machines.load("h100", 16), tp=2, options=begin, **limits)
    found = search(fastest, 512, 3600.0)  # the search ends long before this limit of an hour
    steps = [found.begin_s, *(gain.step_s for gain in found.gains)]
    assert steps == sorted(steps, reverse=True)
    assert found.step_s == steps[-1] < 0.9 * found.begin_s
    assert found.options.shape.tile_cols > 64
    assert found.options.queue == "body" and found.options.norm == "own"
    assert verify(fastest.compile(found.options, 512, 4)).ok
    assert search(fastest, 512, 3600.0) == replace(found, cached=True)
    # This clock advances 10,000 s per call, so the next search stops early.
    hours = SimpleNamespace(monotonic=count(step=10_000).__next__)
    monkeypatch.setattr(import_module("megakernel.scheduler.tune.search"), "time", hours)
    assert not search(fastest, 512, 3601.0).cached


def test_time_bounds_a_search() -> None:
    config = load_config("random:llama-3.2-1b")
    fastest = Fastest(
        config, machines.load("h100", 16), options=Options(), dtype=Dtype.BF16, max_seqs=1, max_context=64
    )
    found = search(fastest, 1, 1e-9)
    assert found.tried == 1 and found.step_s == found.begin_s and not found.gains


def test_the_verbs_say_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "a.mkp")
    tiny = ["--model", "random:smollm2-135m", "--machine", "h100", "--workers", "4", "--context", "64"]
    status, _, err = run(capsys, "compile", *tiny, "--search", "-1")
    assert status == 2 and "'-1' is not a number of seconds above 0" in err
    assert run(capsys, "compile", *tiny, "-o", file)[0] == 0
    assert "compiled for one type of weights" in fails(
        capsys, "simulate", file, "--machine", "h100", "--weights", "q8_0"
    )
