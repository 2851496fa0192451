"""Defines what a kind of processor (CPU or Hopper GPU) requires of a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import MegakernelError
from ..isa import Columns, Dims, Loads, Phase, Units, loads
from ..program import SEGMENTS, Program
from ..program.part import Part

_ANY = 1 << 30  # more rows than a program can have, so this means no limit


@dataclass(frozen=True)
class Target:
    """A kind of processor for which programs are compiled. Each backend runs the programs of one target.

    units      the kinds of hardware units that can compute matmuls; the kind that suits few rows comes first
    row_unit   for each kind: how many token rows are stored together; row blocks start at multiples of this number
    col_unit   for each kind: column tiles start at multiples of this number; None if the machine file gives the number
    pages      whether operands pass through a ring buffer of shared-memory pages; the machine file gives the size
    any_split  whether attention may divide the KV range of any query tile; if not, only of tiles with one row or a long
               context
    """

    name: str
    units: tuple[Units, ...]
    row_unit: Mapping[Units, int]
    col_unit: Mapping[Units, int | None]
    pages: bool
    any_split: bool

    def chosen(self, name: str) -> Units:
        """The units that `--matmul NAME` selects. If a target has only one kind of units, the name is ignored."""
        return self.units[0] if len(self.units) == 1 else Units[name.upper()]

    def tile_rows(self, units: Units, inner: int) -> int:
        """Return the maximum number of rows of a matmul tile whose input rows have at most `inner` elements."""
        return _ANY

    def norm_fits(self, rows: int, inner: int, dims: Dims) -> bool:
        """Whether a matmul can itself normalise this many input rows of `inner` elements."""
        return True

    def output_columns(self, phase: Phase, dims: Dims) -> int:
        """A number of which the first columns of the phase's tiles must also be multiples; 0 if there is none."""
        return 0

    def loads(self, phase: Phase, columns: Columns, dims: Dims) -> Loads:
        """Return the bytes that instructions with operands `columns` load on rank `dims.rank` (see `isa.traffic`)."""
        return loads(phase, columns, dims)

    def violations(self, parts: Sequence[Part]) -> Iterator[str]:
        """Describe what this kind of processor cannot execute in a program that has passed all other checks."""
        return iter(())

    def check(self, program: Program) -> None:
        """Raise MegakernelError with the first of `violations`, if there is one."""
        if (found := next(self.violations([Part(program, name) for name in SEGMENTS]), None)) is not None:
            raise MegakernelError(f"the program is wrong: {found}: compile it again")
