"""What a CPU requires of a program, such as its tile sizes."""

from __future__ import annotations

from ..isa import Units
from .target import Target

# The maximum size of an attention head. One pass of a matmul computes at most this many columns on a CPU. If a head is
# normalised, or its K and V are quantised, all columns of the head must be computed in the same pass.
MOST_HEAD_DIM = 496
CPU = Target(
    "cpu", units=(Units.CORE,), row_unit={Units.CORE: 1}, col_unit={Units.CORE: None}, pages=False, any_split=False
)
