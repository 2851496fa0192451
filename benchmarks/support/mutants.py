"""Makes mutants, which are changed files or objects, and reads them in child processes with limits on time and memory.
A mutant's kind and number determine it completely. A child process reads one mutant after another until one of them
ends the process. Then a new child process continues with the next mutant."""

import contextlib
import json
import os
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megakernel.errors import MegakernelError

Rng = np.random.Generator
Stage = tuple[str, Callable[[], Any]]
LIMIT_S = 10  # seconds of processor time; a stage of reading a file that needs more is reported as a hang
LIMIT_WALL_S = 120  # seconds of wall time, for a stage that only waits; high because a busy machine may delay it
MEMORY = 6 << 30  # limit of a child's address space, in bytes
FINE = {"ok", "refused"}
# Values that code that reads files may handle wrongly: extreme integers, and values of the other JSON types.
EDGES = (0, -1, 1, 2, 255, 65536, 1 << 24, (1 << 31) - 1, 1 << 31, -(1 << 31), 1 << 63, 10**400)
_ODD = (None, True, "", "x", "\x1b[31m", "\ud800", [], {}, [[[]]], 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"))


@dataclass(frozen=True)
class Mutant:
    """A mutant: a changed file, or a changed object in memory. `good` is the file before the change and `data` the file
    after it. `seal` returns a file with its checksum corrected. `context` has what else the readers of this kind of
    file need."""

    name: str
    good: bytes = b""
    data: bytes = b""
    seal: Callable[[bytes], bytes] = bytes
    context: Any = None


@dataclass(frozen=True)
class Kind:
    """A kind of mutants: `make` makes one from a random generator and a number, and `read` reads it in stages. Each
    stage has its own time limit and outcome. `share` scales the number of mutants that are tried: it is 1 if reading
    takes about a millisecond, and less for slower kinds."""

    make: Callable[[Rng, int], Mutant]
    read: Callable[[Path, Mutant], Iterator[Stage]]
    share: float = 1.0


# -- changes


def scramble(data: bytes, rng: Rng) -> bytes:
    """Return a copy of `data` with one to three changes: bytes are changed, removed, repeated or cut off at the end."""
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        if not out:
            break
        at = int(rng.integers(len(out) if rng.random() < 0.5 else min(len(out), 2048)))
        size = int(rng.integers(1, 9))
        match int(rng.integers(5)):
            case 0:
                out[at] ^= 1 << int(rng.integers(8))
            case 1:
                out[at : at + size] = rng.bytes(size)
            case 2:
                del out[at : at + size]
            case 3:
                out[at:at] = out[at : at + size]
            case _:
                del out[at:]
    return bytes(out)


def odd_value(rng: Rng, old: object) -> Any:
    """Return a value to replace `old`: a nearby integer, a value of another type, or one at or beyond a limit."""
    if isinstance(old, int) and not isinstance(old, bool) and rng.random() < 0.4:
        return old + int(rng.choice([-2, -1, 1, 2, 7, 64]))
    values = (*EDGES, *_ODD) if rng.random() < 0.7 else EDGES
    return values[int(rng.integers(len(values)))]


def change_json(value: Any, rng: Rng) -> Any:
    """Return a copy in which one value, at any depth, is replaced, removed or (in a list) repeated."""
    places = [*_places(value)]
    if not places:
        return odd_value(rng, value)
    value = json.loads(json.dumps(value))
    path, key = places[int(rng.integers(len(places)))]
    inside = value
    for step in path:
        inside = inside[step]
    chance = rng.random()
    if chance < 0.1:
        del inside[key]
    elif chance < 0.2 and isinstance(inside, list):
        inside.insert(key, inside[key])
    else:
        inside[key] = odd_value(rng, inside[key])
    return value


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield path, key
        yield from _places(inner, (*path, key))


def shrink(mutant: Mutant, fails: Callable[[bytes], bool]) -> list[tuple[int, str, str]]:
    """Return a few changed bytes that suffice for the failure, each as (offset, byte before, byte now). The bytes are
    in hex. Runs of changed bytes are restored, long runs first. A run stays restored if the file still `fails` without
    this change. The first 64 remaining changes are returned. If the change altered the file's length, nothing is
    restored, and the only entry is the range in which the files differ, cut off after 64 bytes."""
    good, data = mutant.good, bytearray(mutant.data)
    if len(good) != len(data):
        first = next((i for i, (a, b) in enumerate(zip(good, data, strict=False)) if a != b), min(len(good), len(data)))
        tail = 0
        while tail < min(len(good), len(data)) - first and good[-1 - tail] == data[-1 - tail]:
            tail += 1
        return [(first, good[first : len(good) - tail][:64].hex(), data[first : len(data) - tail][:64].hex())]
    size = len(data)
    while size:
        changed = [i for i in range(len(data)) if data[i] != good[i]]
        for begin in range(0, len(changed), size):
            part = changed[begin : begin + size]
            tried = bytearray(data)
            for i in part:
                tried[i] = good[i]
            if tried != good and fails(mutant.seal(bytes(tried))):
                data = tried
        size = min(size // 2, len(changed))
    return [(i, good[i : i + 1].hex(), data[i : i + 1].hex()) for i in range(len(data)) if data[i] != good[i]][:64]


# -- in children


def rng_of(kind: str, seed: int) -> Rng:
    return np.random.default_rng([seed, *kind.encode()])


def try_mutants(kind: str, how: Kind, seeds: range, folder: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the number of each mutant (changed file), and each reading stage's outcome: "ok", "refused" or what went
    wrong."""
    while seeds:
        for seed, stages in _in_a_child(how, ((s, how.make(rng_of(kind, s), s)) for s in seeds), folder):
            yield seed, stages
        seeds = range(seed + 1, seeds.stop)


def try_data(how: Kind, mutant: Mutant, folder: Path) -> dict[str, str]:
    """Read one mutant (changed file) in a child process, and return the outcome of each stage."""
    [(_, stages)] = _in_a_child(how, iter([(0, mutant)]), folder)
    return stages


def _in_a_child(how: Kind, mutants: Iterator[tuple[int, Mutant]], folder: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Read mutants (changed files) in one child process until one of them ends the process, but at least one. Yield
    each one's number and outcomes."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with os.fdopen(write, "w", buffering=1, errors="backslashreplace") as out:
            _child(how, mutants, folder, out)
    os.close(write)
    seed, stages, last = -1, dict[str, str](), "start"
    with os.fdopen(read) as lines:
        for line in lines:
            what, outcome = json.loads(line)
            if what is None:
                if seed >= 0:
                    yield seed, stages
                seed, stages = outcome, {}
            else:
                stages[what], last = outcome, what
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        stages[last] = "hang" if number in (signal.SIGALRM, signal.SIGPROF) else f"signal {signal.Signals(number).name}"
    elif os.WEXITSTATUS(status):
        stages[last] = f"exit {os.WEXITSTATUS(status)}: {stages.get(last)}"
    yield seed, stages


def _child(how: Kind, mutants: Iterator[tuple[int, Mutant]], folder: Path, out: Any) -> None:
    """Read the mutants, write their outcomes to `out`, and exit this child process: the function never returns."""
    status = 0
    try:
        if "LD_PRELOAD" not in os.environ:  # a sanitizer reserves more address space than MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        for seed, mutant in mutants:
            out.write(json.dumps([None, seed]) + "\n")
            path = folder / mutant.name
            path.write_bytes(mutant.data)
            for stage, run in how.read(path, mutant):
                signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
                signal.setitimer(signal.ITIMER_REAL, LIMIT_WALL_S)
                out.write(json.dumps([stage, "no answer"]) + "\n")
                out.write(json.dumps([stage, _outcome(run)]) + "\n")
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException:  # an error in this module, because `_outcome` catches those of the code under test
        out.write(json.dumps(["script", traceback.format_exc()[-900:]]) + "\n")
        status = 1
    finally:
        with contextlib.suppress(Exception):
            out.flush()
        os._exit(status)


def _outcome(run: Callable[[], Any]) -> str:
    try:
        run()
        return "ok"
    except MegakernelError as e:
        text = str(e)
        return "refused" if text.isprintable() and len(text) < 1000 else f"unclear: {text[:300]!r}"
    except MemoryError:
        return "memory"
    except BaseException as e:
        frame = traceback.extract_tb(e.__traceback__)[-1]
        return f"traceback {type(e).__name__} at {Path(frame.filename).name}:{frame.lineno}: {str(e)[:80]}"
