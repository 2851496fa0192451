"""What each kind of processor requires of a program: tile sizes, pages of shared memory, launch limits, issue times.

The compiler, the simulator, the verifier and the backends import this package. It loads no GPU package."""

from __future__ import annotations

from ..isa import Units
from ..machine import CPU
from .pages import BOX_ROWS, DOT_UNIT

HOPPER = "hopper"  # like CPU, a value of `target` in machine files
# The kinds of hardware units that can compute matmuls on a target; the kind that suits few rows comes first.
UNITS = {CPU: (Units.CORE,), HOPPER: (Units.DOTS, Units.TENSOR)}
# Row blocks start at multiples of this number of token rows, because that many rows are stored together.
ROW_UNIT = {Units.CORE: 1, Units.DOTS: 1, Units.TENSOR: BOX_ROWS}
# Column tiles start at multiples of this number of columns; for other kinds of units, the machine file has the number.
COL_UNIT = {Units.DOTS: DOT_UNIT}
# The maximum size of an attention head. One pass of a matmul computes at most this many columns on a CPU. If a head is
# normalised, or its K and V are quantised, all columns of the head must be computed in the same pass.
MOST_HEAD_DIM = 496
