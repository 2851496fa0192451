"""The board: counters in memory that all processes of a server share. Each process writes its own row, and all may read
every row. A row remains when its process ends, so the process that replaces it continues its counters."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from pathlib import Path

_COLUMNS = 512  # numbers per row: many more than the fields, so that two rows share no cache line

# The fields of row 0, which the engine's process writes. `progress_at` is a `monotonic` time, valid in all processes.
_OF_ENGINE = """cpu_s open progress_at running waiting pages pages_used preemptions prefix_queries prefix_hits generated
    turns proposed accepted steps wall_s bound_s flops bytes rows ceiling_flops ceiling_bytes"""
ENGINE_FIELDS = [(name, 1) for name in _OF_ENGINE.split()]


class Row:
    """One row of a board. A field is a name for one number, or for `width` consecutive numbers."""

    def __init__(self, numbers: memoryview[float], fields: Sequence[tuple[str, int]]) -> None:
        self.numbers = numbers
        self.at: dict[str, int] = {}
        end = 0
        for name, width in fields:
            self.at[name] = end
            end += width
        assert end <= _COLUMNS
        self._cpu_s = 0.0  # CPU seconds of this process that the row already counts

    def get(self, name: str) -> float:
        return float(self.numbers[self.at[name]])

    def put(self, **values: float) -> None:
        for name, value in values.items():
            self.numbers[self.at[name]] = value

    def count_cpu(self) -> None:
        """Add to this row the CPU time that the process has used since the previous call of `count_cpu`."""
        before, self._cpu_s = self._cpu_s, time.process_time()
        self.numbers[self.at["cpu_s"]] += self._cpu_s - before


class Board:
    """A table of `rows` rows of numbers in the memory-mapped file `path`, which the engine's process creates."""

    def __init__(self, path: Path, rows: int, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(rows * _COLUMNS * 8))
        with path.open("r+b") as file:
            self._all = memoryview(mmap.mmap(file.fileno(), rows * _COLUMNS * 8)).cast("d")
        self.rows = rows

    def row(self, number: int, fields: Sequence[tuple[str, int]]) -> Row:
        return Row(self._all[number * _COLUMNS : (number + 1) * _COLUMNS], fields)
