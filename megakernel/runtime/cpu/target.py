"""What a CPU requires of a program, such as its tile sizes."""

from __future__ import annotations

from ...isa import Units
from ..target import Target

# The maximum size of an attention head. A CPU computes at most this many columns in one pass of a matmul, and all
# columns of a head must be in one pass if the head is normalised, or if its K and V are quantised.
MOST_HEAD_DIM = 496
CPU = Target(
    "cpu", units=(Units.CORE,), row_unit={Units.CORE: 1}, col_unit={Units.CORE: None}, pages=False, any_split=False
)
