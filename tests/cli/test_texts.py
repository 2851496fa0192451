"""Compares the output of commands with the files in texts/, except for blanks at the ends of lines. The first line of a
file is the command. If an output is meant to change, copy the new output into the file."""

import shlex
from pathlib import Path

import pytest
from commands import Cli

TEXTS = sorted(Path(__file__).with_name("texts").glob("*.txt"))


@pytest.mark.parametrize("file", TEXTS, ids=lambda f: f.stem)
def test_a_verb_prints_what_it_printed(file: Path, cli: Cli) -> None:
    command, *text = file.read_text().splitlines()
    status, out, err = cli.run(*shlex.split(command.removeprefix("$ megakernel ")))
    assert (status, err) == (0, "")
    assert [line.rstrip() for line in out.splitlines()] == text
