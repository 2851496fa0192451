"""The arguments of a CUDA launch: the ctypes structures and the generated C++ header say the same."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from megakernel.isa.launch import STRUCTS, STRUCTURES

ROOT = Path(__file__).parents[2]


def test_offsets_are_those_of_the_compiler(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    fields = [(name, field.name) for name, (_, fields) in STRUCTS.items() for field in fields]
    prints = "\n".join(f'printf("%zu %zu\\n", offsetof(mk::{s}, {f}), sizeof(mk::{s}::{f}));' for s, f in fields)
    source = tmp_path / "offsets.cpp"
    source.write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "params.h"\nint main() {{\n{prints}\nreturn 0;\n}}\n'
    )
    program = tmp_path / "offsets"
    subprocess.run([compiler, "-std=c++20", f"-I{ROOT / 'csrc' / 'cuda'}", str(source), "-o", str(program)], check=True)
    lines = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    found = [tuple(map(int, line.split())) for line in lines]
    descriptors = [getattr(STRUCTURES[s], f) for s, f in fields]
    assert found == [(d.offset, d.size) for d in descriptors]
    assert ctypes.sizeof(STRUCTURES["Params"]) <= 4096  # what a kernel may take
