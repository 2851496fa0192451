"""What a CPU requires of a program."""

from __future__ import annotations

from ...isa import Units
from ..target import Target

# The maximum head_dim. One pass of a matmul computes at most this many columns, and a pass must compute all columns of
# a head if the head is normalised or its K and V are quantised.
MOST_HEAD_DIM = 496
CPU = Target(
    "cpu", units=(Units.CORE,), row_unit={Units.CORE: 1}, col_unit={Units.CORE: None}, pages=False, any_split=False
)
