"""Tests that an interpreter does not compile if its code lacks a case for an operation or for a kind of result."""

import ast
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from built_once import built_once, sources, version
from launch_image import FLAGS, ROOT

_BUILD = re.search(r"^FLAGS = (\[.*\])$", (ROOT / "setup.py").read_text(), re.MULTILINE)
assert _BUILD
# For each interpreter, a source file that includes all of it, and compiler flags. The CPU's flags are those of
# setup.py.
COMPILED = {
    "cuda": ("tests/cuda/host/host.cpp", ["-std=c++20", *FLAGS]),
    "cpu": ("csrc/cpu/kernels.cpp", [*ast.literal_eval(_BUILD[1]), "-DMK_SIMD=portable", "-DMK_LANES=4"]),
}
PARTS = ("csrc", "tests/cuda")  # folders of the repository with all that the sources include


def complaints(interpreter: str, enums: Sequence[str]) -> dict[str, set[str]]:
    """Add a case to each enumeration and compile. Return, for each enumeration, the files in which the compiler reports
    that the new case is not handled."""
    source, flags = COMPILED[interpreter]

    def make(target: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for part in PARTS:
                shutil.copytree(ROOT / part, Path(folder) / part)
            header = Path(folder) / "csrc" / "common" / "isa.h"
            text = header.read_text()
            for enum in enums:
                start = rf"(enum class {enum} : int32_t {{[^}}]*) }}"
                text, found = re.subn(start, rf"\1, kNovel{enum} = 99 }}", text)
                assert found == 1
            header.write_text(text)
            command = ["g++", *flags, "-fsyntax-only", f"{folder}/{source}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        target.write_text(done.stderr)

    content = " ".join((version(), *PARTS, *enums, source, *flags)).encode() + sources(ROOT)
    errors = built_once("complaints", content, make).read_text()
    found = re.findall(r"(\w+\.\w+):\d+:\d+: error: (.*)", errors)
    assert all("not handled" in error for _, error in found), errors
    return {enum: {file for file, error in found if f"kNovel{enum}" in error} for enum in enums}


CASES: dict[str, dict[str, set[str]]] = {
    # For each enumeration, the files with a switch over it. PagedOperation: operations that use shared-memory pages.
    "cuda": {"Operation": {"bodies.h"}, "PagedOperation": {"plan.h"}, "Result": {"dots.h", "gemm.h", "plan.h"}},
    "cpu": {"Operation": {"kernels.cpp"}, "Result": {"matmul.h"}},
}


@pytest.mark.parametrize("interpreter", CASES)
def test_a_new_operation_or_result_needs_its_cases(interpreter: str) -> None:
    assert complaints(interpreter, list(CASES[interpreter])) == CASES[interpreter]


def test_no_switch_of_the_cuda_interpreter_has_a_default() -> None:
    """No switch has a default, because the compiler would then not report a missing case."""
    files = [path for path in (ROOT / "csrc" / "cuda").rglob("*") if path.suffix in (".h", ".cuh", ".cu")]
    assert len(files) > 20 and [path.name for path in files if "default:" in path.read_text()] == []
