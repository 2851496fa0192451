"""Checks that the tests notice small mistakes: makes mutants (copies of the package with one small change each), and
runs the tests that reach the change.

    python benchmarks/correctness/mutation.py --python 400 --native 100 -o benchmarks/results/mutation.json

Mutants are drawn with a seed from all operators, comparisons, constants and statements (source_mutants.py in
support), in Python lines that a test reaches, and in the C++ of csrc/{cpu,common,simulate,verify}. `--lines FILE`
stores which test reaches which line (lines_reached.py in support), and `--tests` restricts the tests. For each
mutant, the cheapest tests that reach it are run, as many as fit into SECONDS of processor time. The tests in the folder
of tests/ that is named like the mutant's package run first. A mutant is killed if a test fails or if the tests do not
end.

`--again FILE` continues the earlier run whose output is FILE. Mutants that were killed are not tried again, and new
mutants are drawn until there are as many as requested. Survivors are tried once more, because new tests may kill them.
A survivor is left out if unnoticed.json, beside this script, explains why no caller can notice the change.
Mutants of lines that have changed since the earlier run are replaced. Exit status 1 means that fewer than `--least`
percent of the mutants were killed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from patched import patch
from record import options, write
from source_mutants import SourceMutant, of_cpp, of_python

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "benchmarks" / "support"
FOLDERS = ("megakernel", "scheduler", "serving")
# The tests chosen for a mutant (a copy with one small change) need at most this many seconds of CPU time on the
# unchanged package. On the mutant they may take three times as long.
SECONDS = 10.0
# For each folder of csrc/, the tests that run its C++.
NATIVE_TESTS = {
    "cpu": ("tests/runtime/",),
    "simulate": ("tests/simulate/",),
    "verify": ("tests/verify/",),
    "common": ("tests/runtime/", "tests/simulate/", "tests/verify/"),
}
# Only one SIMD path is compiled, at -O1, because this is quick and all paths compute the same results.
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-pthread", "-ffp-contract=fast", "-DMK_SIMD=portable", "-DMK_LANES=4"]
FLAGS += [f"-D{width}_kernels=portable_kernels" for width in ("avx2", "avx512", "avx512bf16")]
# A child process counts as hanging if it was idle during this many waits of 20 ms by its parent (half a minute).
IDLE_TURNS = 1500
# Usually a changed function is replaced in a running process. This outcome and exit status mean that it cannot be.
ANOTHER_WAY, OTHER_STATUS = "in a new process", 77
PLUGINS = ("-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist")
# Modules that tests import and no mutant changes. The main process imports them once, before it forks any child.
HEAVY = (
    "pytest",
    "numpy",
    "torch",
    "transformers",
    "fastapi",
    "uvicorn",
    "tokenizers",
    "gguf",
    "safetensors",
    "jinja2",
)


REASONS = Path(__file__).with_name("unnoticed.json")
Key = tuple[str, str, int, str]  # identifies a change: file, source line, column, the new text
Drawn = tuple[str, SourceMutant, list["Test"]]  # file, one small change of it, tests that execute the changed line


@dataclass(frozen=True)
class Test:
    name: str
    seconds: float
    lines: dict[str, list[int]]


def tests_of(file: Path, which: list[str]) -> list[Test]:
    """Return the tests that pass, with the lines that each executes, from the record in `file`.

    If `file` does not exist, the tests `which` (default: all) run first and write it.
    """
    if not file.exists():
        environment = os.environ | {"MEGAKERNEL_LINES_REACHED": str(file), "PYTHONPATH": str(SUPPORT)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "lines_reached", *which]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    noted = [json.loads(line) for line in file.read_text().splitlines()]
    return [Test(t["test"], t["seconds"], t["lines"]) for t in noted if not which or t["test"].startswith(tuple(which))]


class Copy:
    """A copy of the package, into which one mutant (small change) at a time is put. Child processes test this copy."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._collected: Collected | None = None
        self._package = folder / "megakernel"
        keep = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "megakernel", self._package, ignore=keep)
        for part in FOLDERS[1:]:
            shutil.copytree(ROOT / part, self._package / part, ignore=keep)
        (self._package / "csrc").symlink_to(ROOT / "csrc")
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(folder)], check=True)

    def outcome_of_python(self, file: str, source: str, rounds: list[list[Test]]) -> str:
        place = self._package / file.removeprefix("megakernel/")
        good = place.read_text()
        Path(importlib.util.cache_from_source(str(place))).unlink(missing_ok=True)
        place.write_text(source)
        try:
            names = [test.name for tests in rounds for test in tests]
            outcome = self._collected.outcome(names, str(place), good, source) if self._collected else ANOTHER_WAY
            return self.outcome(rounds) if outcome == ANOTHER_WAY else outcome
        finally:
            place.write_text(good)

    def collect(self, files: list[str]) -> None:
        """Import the tests once, so that testing a change of a function takes only a fork and the tests' own time."""
        self._collected = Collected(self, files)

    def outcome_of_native(self, library: Path, rounds: list[list[Test]]) -> str:
        (self._package / "_native.so").unlink(missing_ok=True)
        shutil.copy(library, self._package / "_native.so")
        return self.outcome(rounds)

    def failing(self, names: list[str]) -> list[str]:
        """Return the tests among `names` that fail on the unchanged package. Some tests cannot run in a copy of the
        package or in a forked process, for example.
        """
        outcome = self._run(["--maxfail=1000", *names], 3 * SECONDS * len(names))
        if outcome == "survived":
            return []
        if outcome in ("no end", "failed"):
            raise SystemExit(
                "the tests that killed mutants did not all finish when they ran without a mutant "
                f"({outcome}):\n{(self._folder / 'log').read_text(errors='replace')}"
            )
        lines = (self._folder / "log").read_text(errors="replace").splitlines()
        return [line.split(" ", 1)[1].split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]

    def outcome(self, rounds: list[list[Test]]) -> str:
        """Run `rounds`, lists of tests, on the mutant until a test fails, and return the outcome.

        The result is "survived" if no test fails, and "no end" if the tests do not end. Otherwise it is the line of
        pytest's output about the first failed test, or, if there is none, how the process ended.
        """
        outcomes = (self._run(["-x", *(test.name for test in tests)]) for tests in rounds if tests)
        return next((outcome for outcome in outcomes if outcome != "survived"), "survived")

    def _run(self, arguments: list[str], seconds: float = 3 * SECONDS) -> str:
        log = self._folder / "log"

        def child() -> int:
            limit(seconds)
            return self.pytest(log, arguments)

        outcome = ended(child)
        if outcome != "failed":
            return outcome
        failed = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0] if failed else outcome

    def pytest(self, log: Path, arguments: list[str], plugins: tuple[object, ...] = ()) -> int:
        """Run pytest in this process, on the package of this copy, and return its exit status."""
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(ROOT)
        sys.path.insert(0, str(self._folder))
        os.environ |= {"PYTHONPATH": str(self._folder), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        for module in [name for name in sys.modules if name.partition(".")[0] == "megakernel"]:
            del sys.modules[module]  # of the checkout
        import pytest

        import megakernel

        assert Path(megakernel.__file__).is_relative_to(self._folder), megakernel.__file__
        return int(pytest.main(["-q", "--tb=line", *PLUGINS, *arguments], plugins=plugins))

    def log_of(self, name: str) -> Path:
        return self._folder / name


def limit(seconds: float = 3 * SECONDS) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def seconds_of(session: int) -> float:
    """Return the processor time of all processes of a Unix session, in seconds."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def ended(run: Callable[[], int]) -> str:
    """Call `run`, which runs tests, in a forked process whose exit status is the result. Return how the process ended:
    "survived" if no test failed (status 0), "no end" if it hung or exceeded its limits, ANOTHER_WAY for the status
    OTHER_STATUS, the name of the signal that ended it, or "failed" in all other cases.
    """
    child = os.fork()
    if child == 0:
        status = 70
        try:
            os.setsid()
            status = run()
        finally:
            sys.stdout.flush()
            os._exit(status)
    status, turns, spent = 0, 0, 0.0
    while not (done := os.waitpid(child, os.WNOHANG))[0]:
        time.sleep(0.02)
        turns += 1  # count waits instead of time, because time also passes while this process is suspended
        if turns % IDLE_TURNS == 0:
            before, spent = spent, seconds_of(child)
            if spent - before < 0.2:  # the child is idle, so it waits for something that never happens
                break
    else:
        status = done[1]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also ends servers that a test has left running
    if not done[0]:
        os.waitpid(child, 0)
        return "no end"
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return "no end" if name in ("SIGXCPU", "SIGKILL") else name
    return {0: "survived", OTHER_STATUS: ANOTHER_WAY}.get(os.WEXITSTATUS(status), "failed")


class Collected:
    """A child process in which pytest has imported the tests. It forks once per mutant to run tests on this mutant."""

    def __init__(self, copy: Copy, files: list[str]) -> None:
        self._log = copy.log_of("collected")
        to, self._requests = os.pipe()
        self._answers, back = os.pipe()
        if os.fork() == 0:
            os.close(self._requests)
            os.close(self._answers)
            try:
                copy.pytest(self._log, files, (self._plugin(to, back),))
            finally:
                os._exit(0)
        os.close(to)
        os.close(back)
        self._to = os.fdopen(self._requests, "w", buffering=1)
        self._from = os.fdopen(self._answers)

    def outcome(self, names: list[str], file: str, good: str, source: str) -> str:
        """Run the tests `names` on a mutant: in `file`, the text `source` replaces the original text `good`.

        Returns an outcome as `Copy.outcome` does, or ANOTHER_WAY if this change can be tested only in a new process.
        """
        self._to.write(json.dumps([names, file, good, source]) + "\n")
        if not (line := self._from.readline()):
            raise SystemExit(f"the tests could not be collected:\n{self._log.read_text(errors='replace')}")
        answer: str = json.loads(line)
        return answer

    @staticmethod
    def _plugin(to: int, back: int) -> object:
        import pytest

        class Plugin:
            failed = ""

            @pytest.hookimpl(tryfirst=True)
            def pytest_runtestloop(self, session: pytest.Session) -> bool:
                items = {item.nodeid: item for item in session.items}
                with os.fdopen(to) as requests, os.fdopen(back, "w", buffering=1) as answers:
                    for request in requests:
                        names, *change = json.loads(request)
                        chosen = [items[name] for name in names if name in items]
                        answers.write(json.dumps(self._outcome(chosen, change)) + "\n")
                return True

            def _outcome(self, items: list[pytest.Item], change: list[str]) -> str:
                first, last = os.pipe()

                def run() -> int:
                    limit()
                    if not patch(*change):
                        return OTHER_STATUS
                    for item, following in zip(items, [*items[1:], None], strict=True):
                        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                        if self.failed:
                            os.write(last, self.failed.encode())
                            return 1
                    return 0

                outcome = ended(run)
                os.close(last)
                # Do not wait for the pipe to close: a process that a test left running may still have it open.
                os.set_blocking(first, False)
                with os.fdopen(first, "rb") as said:
                    return (said.read() or b"").decode() or outcome

            def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
                if report.failed:
                    self.failed = f"{'FAILED' if report.when == 'call' else 'ERROR'} {report.nodeid}"

        return Plugin()


def rounds_of(file: str, tests: list[Test]) -> list[list[Test]]:
    """Choose the tests to run for a mutant of `file`: the cheapest of `tests`, which together take at most SECONDS.

    At least one test is chosen, even if it takes longer. The first round has the tests in the folder of tests/ that is
    named like the file's package, and the second round has the others.
    """
    ordered = sorted(tests, key=lambda test: test.seconds)
    sums = itertools.accumulate(test.seconds for test in ordered)
    some = [test for test, so_far in zip(ordered, sums, strict=True) if so_far <= SECONDS] or ordered[:1]
    folders = {f"tests/{part}/" for part in Path(file).parts[:-1]}
    own = [test for test in some if test.name.startswith(tuple(folders))]
    # Sort the tests by file, because pytest makes a file's shared fixtures again if another file's test ran in between.
    files = {test.name.split("::")[0]: None for test in some}
    return [
        [test for name in files for test in part if test.name.startswith(f"{name}::")]
        for part in (own, [test for test in some if test not in own])
    ]


def python_mutants(
    tests: list[Test], args: Namespace, rng: random.Random, copy: Copy, rows: Rows
) -> Iterator[dict[str, Any]]:
    reached: dict[str, dict[int, list[Test]]] = defaultdict(lambda: defaultdict(list))
    for test in tests:
        for file, numbers in test.lines.items():
            for line in numbers:
                reached[file][line].append(test)
    drawn: list[Drawn] = []
    for file in sorted(name for name in reached if name.startswith(tuple(args.sources))):
        for mutant in of_python((ROOT / file).read_text()):
            found = {test.name: test for line in mutant.lines for test in reached[file].get(line, ())}
            if found:
                drawn.append((file, mutant, list(found.values())))
    print(f"{len(drawn)} mutants of Python lines that tests reach", flush=True)
    for file, mutant, found in rows.chosen(drawn, args.python, rng):
        rounds = rounds_of(file, found)
        outcome = copy.outcome_of_python(file, mutant.applied((ROOT / file).read_text()), rounds)
        yield _row(file, mutant, outcome, rounds, len(found))


class Native:
    """The native library as object files, to build the library of a mutant (one small change of a C++ file). Only the
    sources that include the changed file are compiled again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.copytree(ROOT / "csrc", folder / "csrc")
        self._sources = [p for part in ("cpu", "simulate", "verify") for p in (folder / "csrc" / part).glob("*.cpp")]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda source: self._compile(source, folder, check=True), self._sources))
        self._needs = {source: self._included(source) for source in self._sources}

    def _compile(self, source: Path, target: Path, *, check: bool = False) -> bool:
        command = ["g++", *FLAGS, "-c", str(source), "-o", str(target / f"{source.stem}.o")]
        return subprocess.run(command, check=check, stderr=None if check else subprocess.DEVNULL).returncode == 0

    def _included(self, source: Path) -> set[Path]:
        command = ["g++", *FLAGS, "-MM", str(source)]
        words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.replace("\\\n", " ").split()
        return {Path(word).resolve() for word in words[1:]}

    def built(self, file: str, mutant: SourceMutant, target: Path) -> Path | str:
        """Return the path of the library built with a changed source, or the reason why the change cannot be tested."""
        place = (self._folder / file).resolve()
        good = place.read_text()
        place.write_text(mutant.applied(good))
        try:
            touched = [source for source in self._sources if place in self._needs[source]]
            if not all(self._compile(source, target) for source in touched):
                return "does not compile"
        finally:
            place.write_text(good)
        names = [f"{source.stem}.o" for source in touched]
        if all((target / name).read_bytes() == (self._folder / name).read_bytes() for name in names):
            return "same machine code"
        others = [str(self._folder / f"{s.stem}.o") for s in self._sources if s not in touched]
        library = target / "library.so"
        command = ["g++", "-shared", "-pthread", *others, *(str(target / name) for name in names), "-o", str(library)]
        return library if subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0 else "does not link"


def native_mutants(
    tests: list[Test], args: Namespace, rng: random.Random, copy: Copy, folder: Path, rows: Rows
) -> Iterator[dict[str, Any]]:
    native = Native(folder)
    files = [p for part in NATIVE_TESTS for p in (ROOT / "csrc" / part).rglob("*") if p.suffix in (".h", ".cpp")]
    names = sorted(str(p.relative_to(ROOT)) for p in files if p.name != "isa.h")  # isa.h is generated
    names = [name for name in names if name.startswith(tuple(args.sources))]
    drawn = []
    for name in names:
        found = [test for test in tests if test.name.startswith(NATIVE_TESTS[name.split("/")[1]])]
        drawn += [(name, mutant, found) for mutant in of_cpp((ROOT / name).read_text())]
    for number, (file, mutant, found) in enumerate(rows.chosen(drawn, args.native, rng)):
        target = folder / f"mutant-{number}"
        target.mkdir()
        built = native.built(file, mutant, target)
        if isinstance(built, str):
            rows.none[built] += 1
        else:
            rounds = rounds_of(file, found)
            yield _row(file, mutant, copy.outcome_of_native(built, rounds), rounds, len(found))
        shutil.rmtree(target)


def _row(file: str, mutant: SourceMutant, outcome: str, rounds: list[list[Test]], reaching: int) -> dict[str, Any]:
    _, line, column, _ = _key(file, mutant)
    row = {"place": f"{file}:{mutant.line}", "source": line, "column": column, "kind": mutant.kind}
    row |= {"before": mutant.before, "after": mutant.after, "outcome": outcome}
    row |= {"tests_run_at_most": sum(map(len, rounds)), "tests_that_reach_it": reaching}
    print(json.dumps(row), flush=True)
    return row


@cache
def _text(file: str) -> str:
    return (ROOT / file).read_text()


def _key(file: str, mutant: SourceMutant) -> Key:
    """Return a key that identifies a mutant in all runs.

    It has the text of the mutant's line instead of the line's number, so the line may move between runs.
    """
    before, after = _text(file)[: mutant.offset], _text(file)[mutant.offset :]
    head, tail = before.rpartition("\n")[2], after.partition("\n")[0]
    return file, (head + tail).strip(), len(head.lstrip()), mutant.after


def _key_of(row: dict[str, Any]) -> Key:
    return row["place"].split(":")[0], row["source"], row["column"], row["after"]


class Rows:
    """The outcomes of the mutants that this run and an earlier run have tried.

    The outcomes of the earlier run count only for mutants that can still be made from the present source.
    """

    def __init__(self, earlier: list[dict[str, Any]]) -> None:
        self._earlier = {_key_of(row): row for row in earlier}
        self._found: dict[Key, dict[str, Any]] = {}
        self.none = Counter[str]()  # reason (e.g. "does not compile") -> number of changes that could not be tested
        reasons = json.loads(REASONS.read_text()) if REASONS.exists() else []
        self._reasons = {_key_of(row): row["why"] for row in reasons}

    def chosen(self, drawn: list[Drawn], count: int, rng: random.Random) -> Iterator[Drawn]:
        """Yield new mutants until there are `count`, including those of the earlier run. Then yield the mutants that no
        test noticed in the earlier run, except those that unnoticed.json explains."""
        known = {key: each for each in drawn if (key := _key(*each[:2])) in self._earlier}
        self._found |= {key: self._earlier[key] for key in known}
        rng.shuffle(drawn)
        have = len(known)
        for each in drawn:
            if have >= count:
                break
            if (key := _key(*each[:2])) not in self._found:
                yield each
                have += key in self._found
        yield from (each for key, each in known.items() if self._is_open(self._earlier[key]))

    def add(self, row: dict[str, Any]) -> None:
        self._found[_key_of(row)] = row

    def all(self) -> list[dict[str, Any]]:
        return list(self._found.values())

    def figures(self) -> dict[str, Any]:
        rows = [row | ({"why": why} if (why := self._why(row)) else {}) for row in self.all()]
        rows.sort(key=lambda row: str(row["place"]))
        states = ("killed" if row["outcome"] != "survived" else "explained" if "why" in row else "open" for row in rows)
        return {"percent_killed": self.percent(), **Counter(states), "no_mutants": dict(self.none), "mutants": rows}

    def _is_open(self, row: dict[str, Any]) -> bool:
        return row["outcome"] == "survived" and self._why(row) is None

    def _why(self, row: dict[str, Any]) -> str | None:
        return self._reasons.get(_key_of(row)) if row["outcome"] == "survived" else None

    def percent(self) -> float:
        rows = self.all()
        return round(100 * sum(row["outcome"] != "survived" for row in rows) / max(1, len(rows)), 1)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--python", type=int, default=20, help="number of Python mutants (default: 20)")
    parser.add_argument("--native", type=int, default=0, help="number of C++ mutants (default: 0)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random draw (default: 1)")
    parser.add_argument(
        "--lines",
        type=Path,
        metavar="FILE",
        help="file that says which lines each test reaches; made if it does not exist",
    )
    parser.add_argument(
        "--least", type=float, default=0.0, metavar="PERCENT", help="minimum percentage of mutants killed"
    )
    parser.add_argument("--without", nargs="*", default=[], metavar="TEST", help="tests to leave out")
    parser.add_argument("--sources", nargs="*", default=[""], help="files or folders to mutate (default: all)")
    parser.add_argument("--tests", nargs="*", default=[], help="files or folders of tests (default: all)")
    parser.add_argument("--again", type=Path, metavar="FILE", help="continue the run whose output is FILE")
    args = parser.parse_args()
    rows = Rows(json.loads(args.again.read_text())["mutants"] if args.again else [])
    for module in HEAVY:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tests = [t for t in tests_of(args.lines or folder / "lines", args.tests) if t.name not in args.without]
        copy, rng = Copy(folder / "copy"), random.Random(args.seed)
        copy.collect(sorted({test.name.split("::")[0] for test in tests}))
        found = python_mutants(tests, args, rng, copy, rows)
        if args.native:
            found = itertools.chain(found, native_mutants(tests, args, rng, copy, folder / "native", rows))
        for row in found:
            rows.add(row)
            write(args.output, rows.figures())
        # A test that fails even on the unchanged package says nothing about a mutant (a small change).
        killers = {row["outcome"].split(" ", 1)[1] for row in rows.all() if " " in row["outcome"]}
        for test in Copy(folder / "clean").failing(sorted(killers - {"end"})):
            print(f"{test} fails without any mutant, so leave it out with --without")
            for row in rows.all():
                row["outcome"] = "survived" if row["outcome"].endswith(f" {test}") else row["outcome"]
        write(args.output, rows.figures())
    print(f"{rows.percent()} % of {len(rows.all())} mutants were killed")
    return 1 if rows.percent() < args.least else 0


if __name__ == "__main__":
    sys.exit(main())
