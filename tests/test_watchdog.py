"""Waits that never end: each ends its launch, and the error says who waited for what."""

from __future__ import annotations

import re

import pytest
from protocol import LaunchImage
from test_protocol import make

from megakernel.runtime.cuda.loaded import describe
from megakernel.scheduler import Options

COUNTER = (
    r"the input loader of .* waits in body record \d+ \(\w+, layer \d\) for the counter of wait word \d: \d+ of block"
)
PAGE = (
    r"the (weight|input) loader of .* waits in body record \d+ .* for page \d+ to be released: .* phase of parity [01]"
)
SLOT = r"the controller of .* waits between instructions for the instruction in slot \d to end: .* phase of parity [01]"


@pytest.mark.parametrize(
    ("bug", "words", "leaves"),
    [
        ("dropped arrival", f"{COUNTER}|{PAGE}", False),
        ("lost load", f"{COUNTER}|{PAGE}", True),
        ("never retired", f"{COUNTER}|{SLOT}", True),
    ],
)
def test_what_never_comes_ends_the_launch_with_who_waits(bug: str, words: str, leaves: bool) -> None:
    """Of those who wait, who has the least patience says so. `leaves`: an abort does not make up for what lacks."""
    backend, program, table = make("grouped", 2, Options(matmul="tensor", o="sharded", residual="dealt"))
    image = LaunchImage(backend, program, table)
    for seed in range(3):
        image.restore()
        said = image.run(seed, bug)
        assert "deadlock" in said and "did not end it" not in said
        assert ("never came" in said) == leaves
        assert image.diagnosis.set == 1
        assert re.match(words, describe(program, image.diagnosis)), describe(program, image.diagnosis)
