"""Damaged and hostile files: programs, traces and machine files, changed at random but reproducibly.

A mutant is made of a good file by a generator that its number seeds. Its readers then do what a person would have them
do, in a child process of their own with limits on time and memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from small_programs import CONFIG

from megakernel import machine as machines
from megakernel import program as programs
from megakernel.cli.simulate import decode_step
from megakernel.errors import MegakernelError
from megakernel.isa import Dtype
from megakernel.isa.record import WORDS
from megakernel.model.random_checkpoint import RandomCheckpoint
from megakernel.program import SEGMENTS, Program, Segment
from megakernel.runtime.cpu import CpuBackend
from megakernel.scheduler import Options, compile_program, disassemble
from megakernel.scheduler.simulate import simulate
from megakernel.scheduler.verify import verify
from megakernel.timeline import summarise, write_html, write_perfetto
from megakernel.trace import Trace

Rng = np.random.Generator
PAGES = 16
DEADLOCK_S = 0.2
LIMIT_S = 10  # a reader that takes longer hangs
MEMORY = 6 << 30  # bytes of address space of a child
_KNOWN = Path(machines.__file__).with_name("known")
# Values on the far side of some limit, of every type that JSON and TOML have.
_EDGES = (0, -1, 1, 2, 255, 65536, 1 << 24, (1 << 31) - 1, 1 << 31, -(1 << 31), 1 << 63, 10**400)
_ODD = (None, True, "", "x", "\x1b[31m", "\ud800", [], {}, [[[]]], 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"))


@dataclass(frozen=True)
class Good:
    """A program that is right, and the trace of a step of it."""

    name: str
    program: Program
    trace: Trace


@cache
def good_programs() -> list[Good]:
    """Programs of one and two ranks, with and without queues, for a CPU and for a GPU."""
    gpu = replace(machines.MACHINES["h100"], workers=2, tile_rows=32, tile_cols=64)
    shapes: dict[str, tuple[machines.Machine, dict[str, Any]]] = {
        "cpu": (machines.host(2), {"options": Options()}),
        "cpu, queue": (machines.host(2), {"options": Options(queue="body")}),
        "cpu, two ranks": (machines.host(2), {"tp": 2, "options": Options(o="sharded", residual="dealt")}),
        "gpu": (gpu, {"dtype": Dtype.BF16, "options": Options(queue="attention")}),
    }
    made = []
    for name, (machine, changes) in shapes.items():
        bucket = {"dtype": Dtype.F32, "tokens": 4, "logit_rows": 2, "max_seqs": 4, "max_context": 32} | changes
        program = compile_program(replace(CONFIG, layers=3), machine, **bucket)
        done = simulate(program, machine, decode_step(program.dims, 4, 16), trace=True)
        assert done.trace is not None
        made.append(Good(name, program, done.trace))
    return made


def machine_texts() -> list[str]:
    """Machine files that are right."""
    return [path.read_text() for path in sorted(_KNOWN.glob("*.toml"))]


# -- changes


def scramble(data: bytes, rng: Rng) -> bytes:
    """Some bytes other than they were, gone, doubled or cut off."""
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
    """A value that is near the old one, or of another type, or past a limit."""
    if isinstance(old, int) and not isinstance(old, bool) and rng.random() < 0.4:
        return old + int(rng.choice([-2, -1, 1, 2, 7, 64]))
    values = (*_EDGES, *_ODD) if rng.random() < 0.7 else _EDGES
    return values[int(rng.integers(len(values)))]


def change_json(value: Any, rng: Rng) -> Any:
    """A copy in which one place, anywhere inside, is another value, gone or doubled."""
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


def odd_word(rng: Rng, old: int) -> int:
    """A word near the old one, with a bit flipped, or anything."""
    near = [
        old - 1,
        old + 1,
        old ^ 1 << int(rng.integers(32)),
        int(rng.choice(_EDGES[:-2])),
        int(rng.integers(1 << 32)),
    ]
    return near[int(rng.integers(len(near)))] & 0xFFFFFFFF


def _change_words(words: np.ndarray, rng: Rng) -> np.ndarray:
    """A copy with one or two words changed; of those that are not 0, mostly."""
    out = words.copy().reshape(-1)
    for _ in range(int(rng.integers(1, 3))):
        used = np.flatnonzero(out) if rng.random() < 0.8 else np.arange(len(out))
        if len(used):
            at = int(rng.choice(used))
            out[at] = np.array(odd_word(rng, int(out[at])), np.uint32).astype(np.int32)
    return out.reshape(words.shape)


def _split(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = 48 + int.from_bytes(data[40:48], "little")
    return json.loads(data[48:end]), data[end:]


def _sealed(header: object, arrays: bytes) -> bytes:
    """A program file with the right checksum."""
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-(48 + len(text)) % 64)
    payload = len(text).to_bytes(8, "little") + text + arrays
    return b"MKPROG\0" + bytes([programs.VERSION]) + hashlib.sha256(payload).digest() + payload


def program_file(good: Good, rng: Rng) -> bytes:
    """The program's file: its bytes, its header or its arrays changed; but for some bytes the checksum is right."""
    data = good.program.to_bytes()
    kind = rng.random()
    if kind < 0.1:
        return scramble(data, rng)
    if kind < 0.25:
        payload = scramble(data[40:], rng)
        return data[:8] + hashlib.sha256(payload).digest() + payload
    header, arrays = _split(data)
    if kind < 0.6:
        return _sealed(change_json(header, rng), arrays)
    spans, start = [], 0
    for name, length in header["arrays"]:
        words = length * (WORDS if name.endswith(".records") else 1)
        spans += [(start, start + words)] * (words > 0)
        start += words
    words = np.frombuffer(arrays, np.int32).copy()
    # Offsets and totals are few beside records, and as worth a change.
    begin, end = spans[int(rng.integers(len(spans)))]
    words[begin:end] = _change_words(words[begin:end], rng)
    return _sealed(header, words.tobytes())


def program_object(good: Good, rng: Rng) -> Program:
    """A program that somebody built wrongly in memory: an array has other words, or another shape."""
    name = str(rng.choice([*SEGMENTS, "queues", "totals", "sizes"]))
    if name == "sizes":
        field = str(rng.choice(["workers", "counters", "ranks"]))
        return replace(good.program, **{field: getattr(good.program, field) + int(rng.choice([-1, 1]))})
    if name == "totals":
        which = str(rng.choice(["totals_first", "totals_middle", "totals_last"]))
        return replace(good.program, **{which: _reshaped(getattr(good.program, which), rng)})
    segment: Segment = getattr(good.program, name)
    if rng.random() < 0.6:
        return replace(good.program, **{name: Segment(_reshaped(segment.records, rng), segment.offsets)})
    return replace(good.program, **{name: Segment(segment.records, _reshaped(segment.offsets, rng))})


def _reshaped(array: np.ndarray, rng: Rng) -> np.ndarray:
    chance = rng.random()
    if chance < 0.1:
        return array[: len(array) // 2]
    return np.concatenate([array, array[:1]]) if chance < 0.2 else _change_words(array, rng)


def trace_file(good: Good, rng: Rng, folder: Path) -> bytes:
    """The trace's file: its bytes, its header or its intervals changed."""
    path = folder / "good.trace"
    good.trace.save(path)
    data = path.read_bytes()
    end = 16 + int.from_bytes(data[8:16], "little")
    kind = rng.random()
    if kind < 0.3:
        return scramble(data, rng)
    if kind < 0.65:
        header = json.dumps(change_json(json.loads(data[16:end]), rng)).encode()
        return data[:8] + len(header).to_bytes(8, "little") + header + data[end:]
    body = data[end:]
    words = np.frombuffer(body[: len(body) // 4 * 4], np.int32)
    return data[:end] + _change_words(words, rng).tobytes()


def machine_file(text: str, rng: Rng) -> bytes:
    """A machine file: its bytes, or the value of one of its keys, changed."""
    if rng.random() < 0.4:
        return scramble(text.encode(), rng)
    lines = text.splitlines()
    places = [i for i, line in enumerate(lines) if re.match(r"\w+ *=", line)]
    at = places[int(rng.integers(len(places)))]
    key, _, old = lines[at].partition("=")
    long = ["9" * 400, "9" * 5000, "0x" + "f" * 400, "[" * 2000, str(1 << 31), str(1 << 63)]
    odd = ["1e400", "nan", "1e-320", "1e308", '"\\u001b[2J"', "[]", "{}", "true", "1979-05-27", "[1, 2]"]
    values = [*long, *odd, "-1", "0", "1", "0.5", "65537"]
    value = values[int(rng.integers(len(values)))] if rng.random() < 0.9 else old + old
    lines[at] = f"{key}= {value}" if rng.random() < 0.9 else ""
    return "\n".join(lines).encode("utf-8", "surrogatepass")


# -- readers


Stage = tuple[str, Callable[[], Any]]


def _uses(program: Program, good: Good) -> list[Stage]:
    """What may be done with a program: each by itself."""

    def virtual() -> None:
        machine = replace(machines.host(program.workers), workers=program.workers)
        done = simulate(program, machine, decode_step(program.dims, 1, 16), trace=True)
        if done.trace is not None:
            _look(program, done.trace)

    def launch(null: bool) -> None:
        dims = good.program.dims
        checkpoint = RandomCheckpoint("random", replace(CONFIG, layers=dims.layers))
        backend = CpuBackend(
            checkpoint, dims, PAGES, dtype=Dtype(dims.dtype), threads=2, null=null, deadlock_s=DEADLOCK_S
        )
        for _ in range(2):
            backend.launch(program, decode_step(program.dims, 1, 16))
        backend.close()

    return [
        ("verify", lambda: verify(program)),
        ("disasm", lambda: list(disassemble(program))),
        ("simulate", virtual),
        ("null", partial(launch, True)),
        ("cpu", partial(launch, False)),
    ]


def _look(program: Program, trace: Trace) -> None:
    summarise(program, trace)
    write_html(program, trace, Path(os.devnull))
    write_perfetto(program, trace, Path(os.devnull))


def _program_stages(seed: int, folder: Path) -> Iterator[Stage]:
    rng = np.random.default_rng([0, seed])
    good = good_programs()[seed % len(good_programs())]
    path = folder / "mutant.program"
    path.write_bytes(program_file(good, rng))
    loaded: list[Program] = []
    yield "load", lambda: loaded.append(Program.load(path))
    if loaded:
        yield from _uses(loaded[0], good)


def _object_stages(seed: int, folder: Path) -> Iterator[Stage]:
    rng = np.random.default_rng([1, seed])
    good = good_programs()[seed % len(good_programs())]
    yield from _uses(program_object(good, rng), good)


def _trace_stages(seed: int, folder: Path) -> Iterator[Stage]:
    rng = np.random.default_rng([2, seed])
    good = good_programs()[seed % len(good_programs())]
    path = folder / "mutant.trace"
    path.write_bytes(trace_file(good, rng, folder))
    loaded: list[Trace] = []
    yield "load", lambda: loaded.append(Trace.load(path))
    if loaded:
        yield "timeline", lambda: _look(good.program, loaded[0])


def _machine_stages(seed: int, folder: Path) -> Iterator[Stage]:
    rng = np.random.default_rng([3, seed])
    texts = machine_texts()
    path = folder / "mutant.toml"
    path.write_bytes(machine_file(texts[seed % len(texts)], rng))
    good = good_programs()[-1]
    machine: list[machines.Machine] = []
    yield "hardware", lambda: machines.hardware(str(path))
    yield "load", lambda: machine.append(machines.load(str(path)))
    if machine:
        bucket = {"dtype": Dtype.BF16, "tokens": 4, "logit_rows": 2, "max_seqs": 4, "max_context": 32}
        yield "compile", lambda: compile_program(CONFIG, replace(machine[0], workers=2), **bucket)
        table = decode_step(good.program.dims, 4, 16)
        yield "simulate", lambda: simulate(good.program, replace(machine[0], workers=2), table)


KINDS: dict[str, Callable[[int, Path], Iterator[Stage]]] = {
    "program files": _program_stages,
    "programs in memory": _object_stages,
    "traces": _trace_stages,
    "machine files": _machine_stages,
}


# -- in a child


def try_mutant(kind: str, seed: int, folder: Path) -> dict[str, str]:
    """How each reader of a mutant ended, in a child process: "ok", "refused", or what went wrong."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with os.fdopen(write, "w", buffering=1, errors="backslashreplace") as out:
            _child(kind, seed, folder, out)
    os.close(write)
    with os.fdopen(read) as lines:
        events = [json.loads(line) for line in lines]
    status = os.waitpid(child, 0)[1]
    stages: dict[str, str] = dict(events)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        what = "hang" if number == signal.SIGALRM else f"signal {signal.Signals(number).name}"
        stages[events[-1][0] if events else "start"] = what
    elif os.WEXITSTATUS(status):
        stages[events[-1][0] if events else "start"] = f"exit {os.WEXITSTATUS(status)}"
    return stages


def _child(kind: str, seed: int, folder: Path, out: Any) -> None:
    """Never returns."""
    status = 0
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        for stage, run in KINDS[kind](seed, folder):
            signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
            out.write(json.dumps([stage, "no answer"]) + "\n")
            out.write(json.dumps([stage, _outcome(run)]) + "\n")
    except BaseException:  # of the script, not of a reader
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
