"""Tests that the drawings, outputs and simulated times in docs/how-a-megakernel-works.md are up to date."""

import re
import shlex
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from commands import Cli
from gpu_programs import plan

from megakernel.isa.record import phase_number
from megakernel.runtime import even_step

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-a-megakernel-works.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def drawings(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "pictures")
    import how_it_works

    return how_it_works


def test_the_drawings_are_what_the_script_draws(drawings: ModuleType) -> None:
    text = PAGE.read_text()
    for name, draw in drawings.PICTURES.items():
        path = ROOT / "docs" / f"how-{name}.svg"
        assert path.read_text(encoding="utf-8") == str(draw()), f"{path.name}: run benchmarks/pictures/how_it_works.py"
        assert f"({path.name})" in text


def test_the_drawing_of_the_ring_has_the_pages_that_are_planned(drawings: ModuleType) -> None:
    program = drawings.decode(3)
    table = even_step(program.dims, 1, 128)
    records = program.body.stream(drawings.WORKER)
    matmuls = [r for r in records if program.forward.by_number[int(phase_number(r))].is_matmul]
    assert len(matmuls) == 4
    for record in matmuls:
        planned = plan(program.forward, program.dims, table, record)
        assert drawings.weight_pages(program, record) == sum(fill == 0 for fill, *_ in planned)


def test_the_page_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """The `text` block on the page is part of what the commands before it print, apart from white space."""
    monkeypatch.chdir(tmp_path)
    blocks = FENCE.findall(PAGE.read_text())
    [(commands, shown)] = [(block, output) for (_, block), (what, output) in pairwise(blocks) if what == "text"]
    printed = "".join(cli.run(*shlex.split(line)[1:])[1] for line in commands.splitlines())
    assert " ".join(shown.split()) in " ".join(printed.split())


def test_the_simulated_times_are_those_of_the_simulator(cli: Cli) -> None:
    flags = ("simulate", "--model", "random:llama-3.2-1b", "--machine", "h100")
    ahead, alone = (cli.json(*flags, *more)["step_s"] for more in ((), ("--no-pipelining",)))
    text = " ".join(PAGE.read_text().split())
    assert f"{1e3 * alone:.2f} ms instead of {1e3 * ahead:.2f} ms (simulated)" in text
    assert f"{1e6 * ahead:,.0f} µs for this step" in text
