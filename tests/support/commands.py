"""Runs commands of the `megakernel` command line, in the test process or as a separate process."""

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megakernel.cli import main


def command(*arguments: str) -> list[str]:
    """Return the command that runs `megakernel` with these arguments as a separate process. That process accepts peak
    rates that were measured while other programs used the machine, as the test process does."""
    code = "import sys; from megakernel.cli import main; from megakernel.roofline import ceilings; ceilings.QUIET = 1.0"
    return [sys.executable, "-P", "-c", f"{code}; sys.exit(main())", *arguments]


class Cli:
    """Runs commands in this process. `capsys` is pytest's fixture, which captures what they print."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run a command and return its exit status, standard output and standard error."""
        self.capsys.readouterr()
        try:
            status = main(arguments)
        except SystemExit as e:  # argparse
            status = int(e.code or 0)
        captured = self.capsys.readouterr()
        return status, captured.out, captured.err

    def json(self, *arguments: str) -> dict[str, Any]:
        """Run a command with --json, check that it succeeds, and return the object that it prints."""
        status, out, err = self.run(*arguments, "--json")
        assert status == 0, err
        assert out.count("\n") == 1
        result: dict[str, Any] = json.loads(out)
        return result

    def fails(self, *arguments: str) -> str:
        """Run a command, check that it fails with status 1 and a single line of error, and return that line."""
        status, out, err = self.run(*arguments)
        assert (status, out, err.count("\n")) == (1, "", 1), (status, out, err)
        assert err.startswith("megakernel: error: ")
        return err


def run_python(*words: str) -> None:
    """Run `python SCRIPT ...` or `python -m MODULE ...` in this process. Raises SystemExit if its status is not 0. The
    handler of Ctrl-C, which `megakernel` sets for the rest of its process, is set back."""
    handler = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ):
        try:
            if words[0] == "-m":
                patch.setattr(sys, "argv", list(words[1:]))
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                patch.setattr(sys, "argv", list(words))
                patch.setattr(sys, "path", [str(Path(words[0]).parent), *sys.path])
                runpy.run_path(words[0], run_name="__main__")
        except SystemExit as e:
            if e.code:
                raise
        finally:
            signal.signal(signal.SIGINT, handler)
