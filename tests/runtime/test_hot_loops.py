"""Checks the machine code of the CPU's matmul loops, in the output of objdump: how many instructions they have and how
few values they spill."""

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megakernel.library import load

pytestmark = pytest.mark.skipif(
    shutil.which("objdump") is None or platform.machine() not in ("x86_64", "AMD64"), reason="reads x86-64 with objdump"
)
PLAIN = ("float", "Bf16", "Bf16Pairs")

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
    stack_stores: int


def made_by_gcc(library: Path) -> bool:
    """Return whether the library's .comment section names GCC, and not clang, as its compiler."""
    command = ["objdump", "-s", "-j", ".comment", str(library)]
    dump = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    text = "".join(line[-16:] for line in dump.splitlines())
    return "GCC" in text and "clang" not in text


def hot_loops(library: Path) -> list[HotLoop]:
    """Return the hot loop of each instantiation of `micro` in the library, if the loop has fused multiply-adds."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(library)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    out = []
    for match, code in _functions(text):
        loop = max(_innermost(code), key=_multiply_adds, default=[])
        if _multiply_adds(loop):
            simd, rows, panels, weights = match.groups()
            stores = [line for line in loop if re.search(r"\(%r[sb]p.*\)$", line) and "lea" not in line]
            counts = len(loop), _multiply_adds(loop), len(stores)
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


@pytest.fixture(scope="module")
def loops() -> list[HotLoop]:
    if not made_by_gcc(Path(load()._name)):
        pytest.skip("the limits are those of GCC's loops")
    return hot_loops(Path(load()._name))


def plain(loop: HotLoop) -> bool:
    return loop.weights.split("::")[-1] in PLAIN


def test_every_block_has_a_loop_that_multiplies(loops: list[HotLoop]) -> None:
    """Every register block has a loop of multiply-adds. A register block computes some token rows and some panels of 16
    weight columns. One step along K takes rows x panels x (vectors per panel) multiply-adds, and more if weights are
    quantised, because these must be converted."""
    widths = {loop.simd for loop in loops}
    assert widths == {"avx2", "avx512"}
    for loop in loops:
        block = loop.rows * loop.panels * (2 if loop.simd == "avx2" else 1)
        assert loop.multiply_adds % block == 0 if plain(loop) else loop.multiply_adds >= 8 * block, loop
    blocks = {(loop.simd, loop.rows) for loop in loops if loop.weights == "float"}
    assert blocks == {("avx2", r) for r in range(1, 6)} | {("avx512", r) for r in range(1, 13)}


def test_no_hot_loop_spills(loops: list[HotLoop]) -> None:
    """A matmul loop stores only a few values to the stack, so the compiler keeps the accumulators in registers."""
    bad = [loop for loop in loops if loop.stack_stores > (8 if plain(loop) else 12)]
    assert not bad, "\n".join(map(str, bad))


def test_instructions_of_a_multiply_add(loops: list[HotLoop]) -> None:
    """A matmul loop has only a few instructions per multiply-add. The limit is highest for quantised weights, because a
    block of one row uses each converted weight only once."""
    for loop in loops:
        most = 3.5 if plain(loop) else 8
        if plain(loop) and loop.rows >= 4:
            most = 2.5
        assert loop.instructions <= most * loop.multiply_adds, loop
