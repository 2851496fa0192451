"""Tests that an interpreter does not compile if its code lacks a case for an operation or for a kind of result. The
compiler refuses a switch that lacks a value of its enumeration, but only with a certain flag and without a default."""

import re

import pytest
from built_once import ROOT, WARNINGS

# For each enumeration, the files with a switch over it. PagedOperation: operations that use shared-memory pages.
SWITCHES = {
    "Operation": {"cuda/bodies.h", "cpu/kernels.cpp"},
    "PagedOperation": {"cuda/plan.h"},
    "Result": {"cuda/dots.h", "cuda/gemm.h", "cpu/ops/matmul.h"},
}


@pytest.mark.parametrize("enum", SWITCHES)
def test_a_new_operation_or_result_needs_its_cases(enum: str) -> None:
    files = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    found = [path for path in files if f"case {enum}::" in path.read_text()]
    assert {str(path.relative_to(ROOT / "csrc")) for path in found} == SWITCHES[enum]
    cuda = [path for path in files if path.parent.name == "cuda"]
    assert [path.name for path in (*found, *cuda) if "default:" in path.read_text()] == []


def test_the_compiler_looks_for_missing_cases() -> None:
    flags = re.search(r"^FLAGS = \[.*\]$", (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert flags and '"-Werror=switch"' in flags[0]  # of the CPU interpreter
    assert {"-Wall", "-Werror"} <= {*WARNINGS}  # with which tests build the CUDA interpreter for the CPU
