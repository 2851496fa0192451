"""Checks the machine code of the CPU's matmul loops: how many instructions they have and how few values they spill."""

import platform
import shutil
from pathlib import Path

import pytest
from hot_loops import HotLoop, hot_loops, made_by_gcc

from megakernel.library import load

pytestmark = pytest.mark.skipif(
    shutil.which("objdump") is None or platform.machine() not in ("x86_64", "AMD64"), reason="reads x86-64 with objdump"
)
PLAIN = ("float", "Bf16", "Bf16Pairs")


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
