"""Declares what each kind of processor requires of a program, with one object for each kind.
Nothing is inferred from sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from . import pages
from .dims import Dims, Units

# The maximum head_dim. One pass of a CPU's matmul computes at most this many columns, and a pass must compute all
# columns of a head if the head is normalised or its K and V are quantised.
MOST_HEAD_DIM = 496
_ANY = 1 << 30  # stands for "any number of rows": more rows than a program can have


@dataclass(frozen=True)
class Target:
    """The kind of processor for which programs are compiled.

    units      the kinds of units that can compute matmuls; the kind that suits few rows comes first
    row_unit   row blocks start at multiples of this number of rows, because so many rows are stored
               together; 1 if any number of rows can be stored
    col_unit   column tiles start at multiples of this number; None if the machine file gives it
    pages      whether operands pass through a ring of pages, whose size the machine file gives
    any_split  whether attention may split the KV range of every tile of query rows; if not, it splits
               only those of tiles with one row or a long context
    """

    name: str
    units: tuple[Units, ...]
    row_unit: Mapping[Units, int]
    col_unit: Mapping[Units, int | None]
    pages: bool
    any_split: bool

    def chosen(self, name: str) -> Units:
        """The matmul units that `--matmul NAME` selects. A target with only one kind of units ignores the name."""
        return self.units[0] if len(self.units) == 1 else Units[name.upper()]

    def tile_rows(self, units: Units, inner: int) -> int:
        """The maximum number of rows in a tile, if a row of its inputs has at most `inner`
        elements.
        """
        return pages.dot_rows(inner) if units is Units.DOTS else _ANY


CPU = Target(
    "cpu",
    units=(Units.CORE,),
    row_unit={Units.CORE: 1},
    col_unit={Units.CORE: None},
    pages=False,
    any_split=False,
)
HOPPER = Target(
    "hopper",
    units=(Units.DOTS, Units.TENSOR),
    row_unit={Units.DOTS: 1, Units.TENSOR: pages.BOX_ROWS},
    col_unit={Units.DOTS: pages.DOT_UNIT, Units.TENSOR: None},
    pages=True,
    any_split=True,
)
TARGETS: dict[str, Target] = {target.name: target for target in (CPU, HOPPER)}


def target_of(dims: Dims) -> Target:
    """The target that a program of these sizes was compiled for."""
    return next(target for target in TARGETS.values() if dims.units in target.units)
