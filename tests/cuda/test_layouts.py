"""Tests of csrc/cuda/tensor_core.h, whose layouts are those of the hardware (tests/cuda/ptx executes code that uses
them)."""

from built_once import ROOT, library


def test_output_pages_spread_over_the_banks() -> None:
    """When the lanes of a warp store bf16 pairs (4 bytes) of eight rows, each lane uses a different bank."""
    layouts = library(ROOT / "tests" / "support" / "layouts_harness.cpp")
    for block in range(8):
        banks = {
            layouts.tile_offset(layouts.fragment_row(lane, 0), (8 * block + layouts.fragment_col(lane)) * 2) // 4 % 32
            for lane in range(32)
        }
        assert len(banks) == 32
