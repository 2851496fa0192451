"""Runs commands of the `megakernel` command line, in the test process or as a separate process."""

import json
import sys
from typing import Any

import pytest

from megakernel.cli import main


def command(*arguments: str) -> list[str]:
    """Return the command that runs `megakernel` with these arguments as a separate process. That process accepts
    ceilings that were measured while other programs used the machine, as the test process does."""
    code = "import sys; from megakernel.cli import main; from megakernel.roofline import ceilings; ceilings.QUIET = 1.0"
    return [sys.executable, "-P", "-c", f"{code}; sys.exit(main())", *arguments]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run a command in this process and return its exit status, standard output and standard error."""
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
    """Run a command, check that it fails with status 1 and a single line of error, and return that line."""
    status, out, err = run(capsys, *arguments)
    assert (status, out, err.count("\n")) == (1, "", 1), (status, out, err)
    assert err.startswith("megakernel: error: ")
    return err
