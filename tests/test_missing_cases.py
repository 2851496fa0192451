"""Tests that an interpreter does not compile if its code lacks a case for an operation or for a kind of result."""

import ast
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from built_once import built_once, sources, version
from protocol import FLAGS, ROOT

_BUILD = re.search(r"^FLAGS = (\[.*\])$", (ROOT / "setup.py").read_text(), re.MULTILINE)
assert _BUILD
# For each interpreter, a source file that includes all of it, and compiler flags. The CPU's flags are those of
# setup.py.
COMPILED = {
    "cuda": ("tests/cuda/host/protocol.cpp", ["-std=c++20", *FLAGS]),
    "cpu": ("csrc/cpu/kernels.cpp", [*ast.literal_eval(_BUILD[1]), "-DMK_SIMD=portable", "-DMK_LANES=4"]),
}


def complaints(interpreter: str, last: str = "") -> set[str]:
    """Return the names of the files in which the compiler reports an unhandled case, if the enumeration that ends with
    `last` has one case more."""
    source, flags = COMPILED[interpreter]

    def make(target: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for part in ("csrc", "tests/cuda/host"):
                shutil.copytree(ROOT / part, Path(folder) / part)
            header = Path(folder) / "csrc" / "common" / "isa.h"
            text = header.read_text()
            assert not last or text.count(f"{last} }};") == 1
            header.write_text(text.replace(f"{last} }};", f"{last}, kNovel = 99 }};") if last else text)
            command = ["g++", *flags, "-fsyntax-only", f"{folder}/{source}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert (done.returncode == 0) == ("error" not in done.stderr), done.stderr
        target.write_text(done.stderr)

    content = " ".join((version(), last, source, *flags)).encode() + sources(ROOT)
    errors = built_once("complaints", content, make).read_text()
    return set(re.findall(r"(\w+\.\w+):\d+:\d+: error: enumeration value .kNovel. not handled", errors))


@pytest.mark.parametrize(
    ("interpreter", "last", "lacking"),
    [
        ("cuda", "", set()),
        ("cuda", "kCombine = 12", {"bodies.h"}),
        ("cuda", "kMatmul = 6, kAttention = 7", {"plan.h"}),  # the operations with pages
        ("cuda", "kGeluGated = 7", {"dots.h", "gemm.h", "plan.h"}),
        ("cpu", "", set()),
        ("cpu", "kCombine = 12", {"kernels.cpp"}),
        ("cpu", "kGeluGated = 7", {"matmul.h"}),
    ],
)
def test_a_new_operation_or_result_needs_its_cases(interpreter: str, last: str, lacking: set[str]) -> None:
    assert complaints(interpreter, last) == lacking


def test_no_switch_of_the_cuda_interpreter_has_a_default() -> None:
    """No switch has a default, because the compiler would then not report a missing case."""
    files = [path for path in (ROOT / "csrc" / "cuda").rglob("*") if path.suffix in (".h", ".cuh", ".cu")]
    assert len(files) > 20 and [path.name for path in files if "default:" in path.read_text()] == []
