"""An operation or a result that the interpreter does not implement does not build."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from protocol import FLAGS, ROOT


def complaints(csrc: Path) -> set[str]:
    """Files that lack a case, as the compiler says of the roles and bodies on fibres."""
    command = ["g++", *FLAGS, "-fsyntax-only", str(csrc / "host" / "protocol.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode == 0) == ("error" not in done.stderr), done.stderr
    return set(re.findall(r"(\w+\.h):\d+:\d+: error: enumeration value .kNovel. not handled in switch", done.stderr))


@pytest.mark.parametrize(
    ("last", "lacking"),
    [
        ("kSample = 9", {"bodies.h", "plan.h"}),
        ("kLogits = 5", {"dots.h", "gemm.h", "plan.h"}),
    ],
)
def test_a_new_operation_or_result_needs_its_cases(tmp_path: Path, last: str, lacking: set[str]) -> None:
    csrc = Path(shutil.copytree(ROOT / "csrc", tmp_path / "csrc"))
    assert complaints(csrc) == set()
    header = csrc / "common" / "isa.h"
    text = header.read_text()
    assert text.count(last) == 1
    header.write_text(text.replace(last, f"{last}, kNovel = 99"))
    assert complaints(csrc) == lacking


def test_no_switch_of_the_interpreter_has_a_default() -> None:
    """Which would hide that a case is missing."""
    files = [path for path in (ROOT / "csrc" / "cuda").rglob("*") if path.suffix in (".h", ".cuh", ".cu")]
    assert len(files) > 20 and [path.name for path in files if "default:" in path.read_text()] == []
