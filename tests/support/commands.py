"""Verbs of the command line, run in this process or as one of their own."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from megakernel.cli import main


def command(*arguments: str) -> list[str]:
    """The command line of a process. Like the tests themselves, it accepts ceilings that a busy machine measured."""
    code = "import sys; from megakernel.cli import main; from megakernel.roofline import ceilings; ceilings.QUIET = 1.0"
    return [sys.executable, "-P", "-c", f"{code}; sys.exit(main())", *arguments]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    capsys.readouterr()
    try:
        status = main(arguments)
    except SystemExit as e:  # argparse
        status = int(e.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status, out, err = run(capsys, *arguments, "--json")
    assert status == 0, err
    assert out.count("\n") == 1
    result: dict[str, Any] = json.loads(out)
    return result


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a failure."""
    status, out, err = run(capsys, *arguments)
    assert (status, out, err.count("\n")) == (1, "", 1), (status, out, err)
    assert err.startswith("megakernel: error: ")
    return err
