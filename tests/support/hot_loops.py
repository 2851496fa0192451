"""Analyses the machine code of the CPU kernels' hot loops in the output of objdump."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FUNCTION = re.compile(r"^[0-9a-f]+ <void mk::(\w+)::micro<(\d+), (\d+), (.+)>\(float const\*.*>:$")
_LINE = re.compile(r"^\s*([0-9a-f]+):\t(.*)$")


@dataclass(frozen=True)
class HotLoop:
    """The hot loop of one instantiation of `micro` (csrc/cpu/simd/gemm.h). The hot loop is the innermost loop that has
    the most multiply-adds. `simd` is the instruction set, "avx2" or "avx512". `rows` and `panels` are the size of the
    register block, and `weights` is the C++ name of the weights' type."""

    simd: str
    rows: int
    panels: int
    weights: str
    instructions: int
    multiply_adds: int
    stack_loads: int
    stack_stores: int


def made_by_gcc(library: Path) -> bool:
    """Return whether the library's .comment section names GCC, and not clang, as its compiler."""
    command = ["objdump", "-s", "-j", ".comment", str(library)]
    dump = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    text = "".join(line[-16:] for line in dump.splitlines())
    return "GCC" in text and "clang" not in text


def hot_loops(library: Path) -> list[HotLoop]:
    """Return the hot loop of each instantiation of `micro` in the library, if the loop has fused multiply-adds."""
    text = subprocess.run(
        ["objdump", "-d", "-C", "--no-show-raw-insn", str(library)], check=True, capture_output=True, text=True
    ).stdout
    out = []
    for match, code in _functions(text):
        loop = max(_innermost(code), key=_multiply_adds, default=[])
        if _multiply_adds(loop):
            simd, rows, panels, weights = match.groups()
            stack = [line for line in loop if re.search(r"\(%r[sb]p", line) and "lea" not in line]
            stores = [line for line in stack if line.endswith(")")]
            counts = len(loop), _multiply_adds(loop), len(stack) - len(stores), len(stores)
            out.append(HotLoop(simd, int(rows), int(panels), weights.replace("mk::", ""), *counts))
    return out


def _functions(text: str) -> Iterator[tuple[re.Match[str], list[tuple[int, str]]]]:
    """Yield, for each instantiation of `micro`, the match of its header line and its (address, instruction) pairs."""
    for part in text.split("\n\n"):
        lines = part.strip().splitlines()
        if lines and (match := _FUNCTION.match(lines[0])):
            found = (_LINE.match(line) for line in lines[1:])
            yield match, [(int(m[1], 16), m[2].strip()) for m in found if m]


def _innermost(code: list[tuple[int, str]]) -> Iterator[list[str]]:
    """Yield the instructions of each loop that contains no other loop."""
    loops = []
    for address, line in code:
        target = re.match(r"j\w+\s+([0-9a-f]+) ", line)
        if target and int(target[1], 16) <= address:
            loops.append((int(target[1], 16), address))
    for begin, end in loops:
        if not any((b, e) != (begin, end) and begin <= b and e <= end for b, e in loops):
            yield [line for address, line in code if begin <= address <= end]


def _multiply_adds(lines: list[str]) -> int:
    return sum(line.startswith("vfmadd") + 2 * line.startswith("vdpbf16ps") for line in lines)
