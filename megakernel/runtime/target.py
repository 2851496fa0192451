"""What a kind of processor requires of a program. Nothing is inferred from sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import MegakernelError
from ..isa import Columns, Dims, Loads, Phase, Units, loads
from ..program import SEGMENTS, Program
from ..program.part import Part

_ANY = 1 << 30  # stands for "any number of rows": more rows than a program can have


@dataclass(frozen=True)
class Target:
    """The kind of processor for which programs are compiled. A backend defines the target of its programs.

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
        """The maximum number of rows in a tile, if a row of its inputs has at most `inner` elements."""
        return _ANY

    def norm_fits(self, rows: int, inner: int, dims: Dims) -> bool:
        """Whether a matmul can normalise this many rows of its inputs itself."""
        return True

    def output_columns(self, phase: Phase, dims: Dims) -> int:
        """Column tiles of the phase start at multiples of this number too; 0 if they need not."""
        return 0

    def loads(self, phase: Phase, columns: Columns, dims: Dims) -> Loads:
        """The bytes that instructions load on rank `dims.rank`, as `isa.loads` defines them."""
        return loads(phase, columns, dims)

    def violations(self, parts: Sequence[Part]) -> Iterator[str]:
        """Yield what this kind of processor cannot execute in the segments of a program whose records are right."""
        return iter(())

    def check(self, program: Program) -> None:
        """Raise MegakernelError with the first of the `violations`, if there is one."""
        if (found := next(self.violations([Part(program, name) for name in SEGMENTS]), None)) is not None:
            raise MegakernelError(f"the program is wrong: {found}: compile it again")
