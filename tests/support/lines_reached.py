"""A plugin of pytest that notes which lines of the package each test reaches, and what each test costs.

    MEGAKERNEL_LINES_REACHED=FILE python -m pytest -p lines_reached tests/scheduler

The file gets a line of JSON for each test: its name, the seconds of processor time that it and its children took, and
for each source the lines that ran. Lines that ran before the first test belong to no test. What children of the
process run is not seen.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("megakernel", "scheduler", "serving")


def _seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class LinesReached:
    def __init__(self, target: Path) -> None:
        self._target = target
        self._coverage = coverage.Coverage(
            data_file=None, include=[f"{ROOT / room}/*" for room in ROOMS], config_file=False
        )
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._coverage.switch_context(item.nodeid)
        start = _seconds()
        try:
            return (yield)
        finally:
            seconds = round(_seconds() - start, 3)
            self._coverage.switch_context("")
            data = self._coverage.get_data()
            data.set_query_context(item.nodeid)
            lines = {os.path.relpath(f, ROOT): sorted(data.lines(f) or []) for f in data.measured_files()}
            found = {file: numbers for file, numbers in lines.items() if numbers}
            line = json.dumps({"test": item.nodeid, "seconds": seconds, "lines": found}) + "\n"
            with self._target.open("ab", buffering=0) as out:
                out.write(line.encode())  # at once, because processes of pytest-xdist share the file


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LinesReached(Path(os.environ["MEGAKERNEL_LINES_REACHED"])))
