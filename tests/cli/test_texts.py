"""What verbs print on a terminal, character by character; blanks at the ends of lines do not count.

A file of texts/ begins with the command. Where a text is meant to change, what the command prints now goes there.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from commands import run

TEXTS = sorted(Path(__file__).with_name("texts").glob("*.txt"))


@pytest.mark.parametrize("file", TEXTS, ids=lambda f: f.stem)
def test_a_verb_prints_what_it_printed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, *text = file.read_text().splitlines()
    status, out, err = run(capsys, *shlex.split(command.removeprefix("$ megakernel ")))
    assert (status, err) == (0, "")
    assert [line.rstrip() for line in out.splitlines()] == text
