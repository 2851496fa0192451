"""A pytest plugin that records which lines of the package each test executes, and how long each test takes.

    MEGAKERNEL_LINES_REACHED=FILE python -m pytest -p lines_reached tests/scheduler

The plugin appends one line of JSON per test to FILE: the test's name, the seconds of processor time that the test and
its child processes used, and the line numbers that the test executed in each source file. Lines that run before the
first test are attributed to no test. Lines that run in child processes are not recorded."""

import json
import os
import resource
import time
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("megakernel", "scheduler", "serving")


def _seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class LinesReached:
    def __init__(self, target: Path) -> None:
        self._target = target
        self._coverage = coverage.Coverage(
            data_file=None, include=[f"{ROOT / folder}/*" for folder in FOLDERS], config_file=False
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
                out.write(line.encode())  # one unbuffered write, because pytest-xdist's processes share the file


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LinesReached(Path(os.environ["MEGAKERNEL_LINES_REACHED"])))
