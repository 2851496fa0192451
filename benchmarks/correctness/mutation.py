"""Do the tests notice small mistakes? Changes one place of the sources at a time, and runs the tests that reach it.

    python benchmarks/correctness/mutation.py --python 400 --native 100 -o benchmarks/results/mutation.json

Mutants are drawn with a seed from all operators, comparisons, constants and statements (source_mutants.py in
tests/support), in Python lines that a test reaches, and in the C++ of csrc/{cpu,common,simulate,verify}. `--lines FILE`
keeps which test reaches which line (lines_reached.py in tests/support), and `--tests` narrows which tests there are. A
mutant stands in a copy of the package. It costs a fork and its tests, cheapest first, up to SECONDS of processor time.
It is killed when a test fails, or when the tests do not end. Exit status 1: fewer were killed than `--least` percent.
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
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import options, write
from source_mutants import SourceMutant, of_cpp, of_python

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
ROOMS = ("megakernel", "scheduler", "serving")
SECONDS = 60.0  # of the tests of one mutant; a mutant may take three times as long
# Which tests run C++; one width of vectors at -O1 builds fast, and computes what the others compute.
NATIVE_TESTS = {
    "cpu": ("tests/runtime/",),
    "simulate": ("tests/simulate/",),
    "verify": ("tests/verify/",),
    "common": ("tests/runtime/", "tests/simulate/", "tests/verify/"),
}
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-pthread", "-ffp-contract=fast", "-DMK_SIMD=portable", "-DMK_LANES=4"]
FLAGS += [f"-D{width}_kernels=portable_kernels" for width in ("avx2", "avx512", "avx512bf16")]
# What tests import and nobody mutates is imported before the forks.
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


@dataclass(frozen=True)
class Test:
    name: str
    seconds: float
    lines: dict[str, list[int]]


def tests_of(file: Path, which: list[str]) -> list[Test]:
    """Those that pass and what they reach, as noted in `file`, which is written where it does not exist."""
    if not file.exists():
        environment = os.environ | {"MEGAKERNEL_LINES_REACHED": str(file), "PYTHONPATH": str(SUPPORT)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "lines_reached", *which]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    noted = [json.loads(line) for line in file.read_text().splitlines()]
    return [Test(t["test"], t["seconds"], t["lines"]) for t in noted if not which or t["test"].startswith(tuple(which))]


class Copy:
    """A package of its own, in which mutants stand, and children that run tests on it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._package = folder / "megakernel"
        keep = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "megakernel", self._package, ignore=keep)
        for room in ROOMS[1:]:
            shutil.copytree(ROOT / room, self._package / room, ignore=keep)
        (self._package / "csrc").symlink_to(ROOT / "csrc")
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(folder)], check=True)

    def outcome_of_python(self, file: str, source: str, tests: list[Test]) -> str:
        place = self._package / file.removeprefix("megakernel/")
        good = place.read_text()
        cached = Path(importlib.util.cache_from_source(str(place)))
        cached.unlink(missing_ok=True)
        place.write_text(source)
        try:
            return self.outcome(tests)
        finally:
            place.write_text(good)

    def outcome_of_native(self, library: Path, tests: list[Test]) -> str:
        (self._package / "_native.so").unlink(missing_ok=True)
        shutil.copy(library, self._package / "_native.so")
        return self.outcome(tests)

    def failing(self, names: list[str]) -> list[str]:
        """Tests that fail where nothing is mutated, for example because they cannot run in a copy or in a fork."""
        if self._run(["--maxfail=1000", *names]) == "survived":
            return []
        lines = (self._folder / "log").read_text(errors="replace").splitlines()
        return [line.split(" ", 1)[1].split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]

    def outcome(self, tests: list[Test]) -> str:
        """ "survived", "no end", or the first test that fails."""
        return self._run(["-x", *(test.name for test in tests)])

    def _run(self, arguments: list[str]) -> str:
        log = self._folder / "log"
        child = os.fork()
        if child == 0:
            self._child(log, arguments)
        status, turns = 0, 0
        while not (done := os.waitpid(child, os.WNOHANG))[0]:
            time.sleep(0.05)
            turns += 1  # not time, which goes on while the system holds this process up
            if turns > 20 * 5 * SECONDS:
                break
        else:
            status = done[1]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # with servers that a test has left behind
        if not done[0]:
            os.waitpid(child, 0)
            return "no end"
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            return "no end" if name in ("SIGXCPU", "SIGKILL") else name
        if os.WEXITSTATUS(status) == 0:
            return "survived"
        failed = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0] if failed else f"exit status {os.WEXITSTATUS(status)}"

    def _child(self, log: Path, arguments: list[str]) -> None:
        """Never returns."""
        os.setsid()
        seconds = int(3 * SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(ROOT)
        sys.path.insert(0, str(self._folder))
        os.environ |= {"PYTHONPATH": str(self._folder), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        for module in [name for name in sys.modules if name.partition(".")[0] == "megakernel"]:
            del sys.modules[module]  # of the checkout
        status = 70
        try:
            import pytest

            import megakernel

            assert Path(megakernel.__file__).is_relative_to(self._folder), megakernel.__file__

            status = int(pytest.main(["-q", "--tb=line", "-p", "no:cacheprovider", *arguments]))
        finally:
            sys.stdout.flush()
            os._exit(status)


def within(tests: list[Test]) -> list[Test]:
    """The cheapest first, as many as may run for one mutant."""
    ordered = sorted(tests, key=lambda test: test.seconds)
    sums = itertools.accumulate(test.seconds for test in ordered)
    return [test for test, so_far in zip(ordered, sums, strict=True) if so_far <= SECONDS] or ordered[:1]


def python_mutants(
    tests: list[Test], sources: list[str], count: int, rng: random.Random, copy: Copy
) -> list[dict[str, Any]]:
    reached: dict[str, dict[int, list[Test]]] = defaultdict(lambda: defaultdict(list))
    for test in tests:
        for file, numbers in test.lines.items():
            for line in numbers:
                reached[file][line].append(test)
    drawn: list[tuple[str, str, SourceMutant, list[Test]]] = []
    for file in sorted(name for name in reached if name.startswith(tuple(sources))):
        source = (ROOT / file).read_text()
        for mutant in of_python(source):
            found = {test.name: test for line in mutant.lines for test in reached[file].get(line, ())}
            if found:
                drawn.append((file, source, mutant, list(found.values())))
    print(f"{len(drawn)} mutants of Python lines that tests reach", flush=True)
    rows = []
    for file, source, mutant, found in rng.sample(drawn, min(count, len(drawn))):
        some = within(found)
        outcome = copy.outcome_of_python(file, mutant.applied(source), some)
        rows.append(_row(file, mutant, outcome, len(some), len(found)))
    return rows


class Native:
    """The native library in objects, of which a mutant compiles those that include its file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.copytree(ROOT / "csrc", folder / "csrc")
        self._sources = [p for room in ("cpu", "simulate", "verify") for p in (folder / "csrc" / room).glob("*.cpp")]
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
        """The mutant's library, or why there is none."""
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
    tests: list[Test], sources: list[str], count: int, rng: random.Random, copy: Copy, folder: Path
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """The mutants, and why others that were drawn are none."""
    native, rows, none = Native(folder), list[dict[str, Any]](), Counter[str]()
    files = [p for room in NATIVE_TESTS for p in (ROOT / "csrc" / room).rglob("*") if p.suffix in (".h", ".cpp")]
    names = sorted(str(p.relative_to(ROOT)) for p in files if p.name != "isa.h")  # that one is generated
    names = [name for name in names if name.startswith(tuple(sources))]
    drawn = [(name, mutant) for name in names for mutant in of_cpp((ROOT / name).read_text())]
    rng.shuffle(drawn)
    for number, (file, mutant) in enumerate(drawn):
        if len(rows) == count:
            break
        target = folder / f"mutant-{number}"
        target.mkdir()
        built = native.built(file, mutant, target)
        if isinstance(built, str):
            none[built] += 1
        else:
            found = [test for test in tests if test.name.startswith(NATIVE_TESTS[file.split("/")[1]])]
            some = within(found)
            rows.append(_row(file, mutant, copy.outcome_of_native(built, some), len(some), len(found)))
        shutil.rmtree(target)
    return rows, none


def _row(file: str, mutant: SourceMutant, outcome: str, run: int, reaching: int) -> dict[str, Any]:
    place = {"place": f"{file}:{mutant.line}", "kind": mutant.kind, "before": mutant.before, "after": mutant.after}
    row = place | {"outcome": outcome, "tests_run_at_most": run, "tests_that_reach_it": reaching}
    print(json.dumps(row), flush=True)
    return row


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--python", type=int, default=20, help="mutants of Python (default: 20)")
    parser.add_argument("--native", type=int, default=0, help="mutants of C++ (default: 0)")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (default: 1)")
    parser.add_argument("--lines", type=Path, metavar="FILE", help="keep here what each test reaches")
    parser.add_argument("--least", type=float, default=0.0, metavar="PERCENT", help="that must be killed")
    parser.add_argument("--without", nargs="*", default=[], metavar="TEST", help="tests that are left out")
    parser.add_argument("--sources", nargs="*", default=[""], help="files or folders to mutate (default: all)")
    parser.add_argument("--tests", nargs="*", default=[], help="files or folders of tests (default: all)")
    args = parser.parse_args()
    for module in HEAVY:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tests = [t for t in tests_of(args.lines or folder / "lines", args.tests) if t.name not in args.without]
        copy, rng = Copy(folder / "copy"), random.Random(args.seed)
        rows = python_mutants(tests, args.sources, args.python, rng, copy)
        none: Counter[str] = Counter()
        if args.native:
            native, none = native_mutants(tests, args.sources, args.native, rng, copy, folder / "native")
            rows += native
            copy = Copy(folder / "clean")
        killers = {row["outcome"].split(" ", 1)[1] for row in rows if row["outcome"].startswith(("FAILED", "ERROR"))}
        if failing := copy.failing(sorted(killers)):
            print("these tests fail without any mutant, so leave them out with --without:", *failing, sep="\n  ")
            return 1
    killed = sum(row["outcome"] != "survived" for row in rows)
    percent = round(100 * killed / max(1, len(rows)), 1)
    print(f"{killed} of {len(rows)} mutants were killed: {percent} %")
    write(args.output, {"killed": killed, "percent": percent, "no_mutants": dict(none), "mutants": rows})
    return 1 if percent < args.least else 0


if __name__ == "__main__":
    sys.exit(main())
