"""Tests of the shared-memory layouts in csrc/cuda/tensor_core.h."""

from built_once import ROOT, library


def test_output_pages_spread_over_the_banks() -> None:
    """When the lanes of a warp store bf16 pairs (4 bytes) in eight rows, each lane uses another shared-memory bank."""
    layouts = library(ROOT / "tests" / "support" / "layouts_harness.cpp")
    for block in range(8):
        banks = {
            layouts.tile_offset(layouts.fragment_row(lane, 0), (8 * block + layouts.fragment_col(lane)) * 2) // 4 % 32
            for lane in range(32)
        }
        assert len(banks) == 32
