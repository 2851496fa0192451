"""Counters of a server's processes in memory that all of them map: each writes its own row, anybody reads all.

A row outlives the process that writes it, so a frontend that takes another's place goes on counting where that ended.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from pathlib import Path

_COLUMNS = 512  # numbers of a row: more than its fields, so that rows lie apart

# What the engine's process writes in row 0. The clock of `progress_at` is `monotonic`, which processes share.
ENGINE_FIELDS = [
    (name, 1)
    for name in (
        "cpu_s", "open", "progress_at", "running", "waiting", "pages", "pages_used", "preemptions", "prefix_queries",
        "prefix_hits", "generated", "turns", "proposed", "accepted", "steps", "wall_s", "bound_s", "flops", "bytes",
        "rows", "ceiling_flops", "ceiling_bytes",
    )
]  # fmt: skip


class Row:
    """Named numbers in a row of a board. A name is a field, or several numbers in a row (`width`)."""

    def __init__(self, numbers: memoryview[float], fields: Sequence[tuple[str, int]]) -> None:
        self.numbers = numbers
        self.at: dict[str, int] = {}
        end = 0
        for name, width in fields:
            self.at[name] = end
            end += width
        assert end <= _COLUMNS
        self._cpu_s = 0.0  # of this process, those that are counted

    def get(self, name: str) -> float:
        return float(self.numbers[self.at[name]])

    def put(self, **values: float) -> None:
        for name, value in values.items():
            self.numbers[self.at[name]] = value

    def count_cpu(self) -> None:
        """Add what this process has computed since it last did so."""
        before, self._cpu_s = self._cpu_s, time.process_time()
        self.numbers[self.at["cpu_s"]] += self._cpu_s - before


class Board:
    """`rows` rows in the file `path`, which the first process makes."""

    def __init__(self, path: Path, rows: int, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(rows * _COLUMNS * 8))
        with path.open("r+b") as file:
            self._all = memoryview(mmap.mmap(file.fileno(), rows * _COLUMNS * 8)).cast("d")
        self.rows = rows

    def row(self, number: int, fields: Sequence[tuple[str, int]]) -> Row:
        return Row(self._all[number * _COLUMNS : (number + 1) * _COLUMNS], fields)
