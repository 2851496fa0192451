"""Measures the memory, open files, threads and processor time of a server's processes, by means of /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class Taken:
    """The resources of a process and all its descendants together. Memory that these processes share counts once."""

    processes: int
    memory_mb: float
    descriptors: int
    threads: int


def family(pid: int) -> list[int]:
    """Return the ids of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                # The program's name, in parentheses, may contain any character, so split after the last parenthesis.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # the process has ended
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def taken(pid: int) -> Taken:
    """Measure the resources that a process and all its descendants use now."""
    memory = descriptors = threads = processes = 0
    for one in family(pid):
        try:
            rollup = (_PROC / str(one) / "smaps_rollup").read_text()
            memory += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
            descriptors += len(list((_PROC / str(one) / "fd").iterdir()))
            threads += len(list((_PROC / str(one) / "task").iterdir()))
            processes += 1
        except (OSError, StopIteration):
            continue  # the process has ended
    return Taken(processes, round(memory * 1024 / 1e6, 1), descriptors, threads)


def session_times(session: int) -> Iterator[tuple[str, float]]:
    """Yield the command line of each process of a Unix session, and the seconds of processor time that it has used."""
    for process in _PROC.glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            line = (process / "cmdline").read_bytes().decode(errors="replace")
            if int(fields[3]) == session:
                yield line, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
