"""Damaged or hostile programs, traces and machine files, and the functions that load and use them."""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from mutants import EDGES, Kind, Mutant, Rng, Stage, change_json, scramble
from small_programs import CONFIG

from megakernel import machine as machines
from megakernel import program as programs
from megakernel.isa import Dtype
from megakernel.isa.record import WORDS
from megakernel.model.random_checkpoint import RandomCheckpoint
from megakernel.program import SEGMENTS, Program, Segment, load_program
from megakernel.runtime import even_step
from megakernel.runtime.cpu.backend import CpuBackend
from megakernel.scheduler import Options, Spec, compile_program, disassemble
from megakernel.scheduler.simulate import simulate
from megakernel.scheduler.verify import verify
from megakernel.timeline import resolve, summarise, write_html, write_perfetto
from megakernel.trace import Trace

PAGES = 16
DEADLOCK_S = 0.2
_KNOWN = Path(machines.__file__).with_name("known")


@dataclass(frozen=True)
class Good:
    """A correct program, and the trace of one simulated step of it."""

    name: str
    program: Program
    trace: Trace


@cache
def good_programs() -> list[Good]:
    """Return correct programs: for a CPU with and without a queue, for two CPU ranks, and for a GPU with a queue."""
    gpu = replace(machines.MACHINES["h100"], workers=2).with_tiles(rows=32, cols=64)
    shapes: dict[str, tuple[machines.Machine, dict[str, Any]]] = {
        "cpu": (machines.host(2), {"options": Options()}),
        "cpu, queue": (machines.host(2), {"options": Options(queue="body")}),
        "cpu, two ranks": (machines.host(2), {"tp": 2, "options": Options(o="sharded", residual="dealt")}),
        "gpu": (gpu, {"dtype": Dtype.BF16, "options": Options(queue="attention")}),
    }
    made = []
    for name, (machine, changes) in shapes.items():
        bucket = {"dtype": Dtype.F32, "tokens": 4, "logit_rows": 2, "max_seqs": 4, "max_context": 32} | changes
        program = compile_program(Spec(replace(CONFIG, layers=3), machine, **bucket))
        done = simulate(program, machine, even_step(program.dims, 4, 16), trace=True)
        assert done.trace is not None
        made.append(Good(name, program, done.trace))
    return made


def machine_texts() -> list[str]:
    """Return the text of each machine file that the package contains."""
    return [path.read_text() for path in sorted(_KNOWN.glob("*.toml"))]


# -- changes


def odd_word(rng: Rng, old: int) -> int:
    """Return a word (integer) to replace `old`: `old` plus or minus 1, with one bit flipped, one of EDGES, or
    random."""
    near = [old - 1, old + 1, old ^ 1 << int(rng.integers(32)), int(rng.choice(EDGES[:-2])), int(rng.integers(1 << 32))]
    return near[int(rng.integers(len(near)))] & 0xFFFFFFFF


def _change_words(words: np.ndarray, rng: Rng) -> np.ndarray:
    """Return a copy of `words` with one or two words changed. In 80 % of cases, a word that is not 0 is chosen."""
    out = words.copy().reshape(-1)
    for _ in range(int(rng.integers(1, 3))):
        used = np.flatnonzero(out) if rng.random() < 0.8 else np.arange(len(out))
        if len(used):
            at = int(rng.choice(used))
            out[at] = np.array(odd_word(rng, int(out[at])), np.uint32).astype(np.int32)
    return out.reshape(words.shape)


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header of a program file and the bytes of its arrays."""
    end = 48 + int.from_bytes(data[40:48], "little")
    return json.loads(data[48:end]), data[end:]


def sealed(header: object, arrays: bytes) -> bytes:
    """Return a program file with this header, these arrays and a valid checksum."""
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-(48 + len(text)) % 64)
    payload = len(text).to_bytes(8, "little") + text + arrays
    return b"MKPROG\0" + bytes([programs.VERSION]) + hashlib.sha256(payload).digest() + payload


def program_file(good: Good, rng: Rng) -> bytes:
    """Return the program's file with some bytes, its header or its arrays changed. The checksum is recomputed in 90 %
    of cases, so that the change is not rejected because of the checksum."""
    data = good.program.to_bytes()
    kind = rng.random()
    if kind < 0.1:
        return scramble(data, rng)
    if kind < 0.25:
        payload = scramble(data[40:], rng)
        return data[:8] + hashlib.sha256(payload).digest() + payload
    header, arrays = split(data)
    if kind < 0.6:
        return sealed(change_json(header, rng), arrays)
    spans, start = [], 0
    for name, length in header["arrays"]:
        words = length * (WORDS if name.endswith(".records") else 1)
        spans += [(start, start + words)] * (words > 0)
        start += words
    words = np.frombuffer(arrays, np.int32).copy()
    # Choose an array first, and then words in it. Otherwise hardly any change would hit offsets and totals, because
    # instructions (records) have far more words.
    begin, end = spans[int(rng.integers(len(spans)))]
    words[begin:end] = _change_words(words[begin:end], rng)
    return sealed(header, words.tobytes())


def program_object(good: Good, rng: Rng) -> Program:
    """Return a program built wrongly in memory: an array has other words or another length, or a size is off by 1."""
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


@cache
def _trace_bytes(good_name: str) -> bytes:
    [good] = [good for good in good_programs() if good.name == good_name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "good.trace"
        good.trace.save(path)
        return path.read_bytes()


def trace_file(data: bytes, rng: Rng) -> bytes:
    """Return a trace file with some bytes, its header or its intervals changed."""
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
    """Return a machine file with some bytes changed, or with the value of one key changed or removed."""
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


def uses(program: Program, good: Good) -> Iterator[Stage]:
    """Yield the uses of a damaged program, each as a stage with its own time limit: verify, disassemble and simulate
    it, and launch it on the CPU backend, first without computing anything ("null"), then with computation."""

    def virtual() -> None:
        machine = replace(machines.host(program.workers), workers=program.workers)
        done = simulate(program, machine, even_step(program.dims, 1, 16), trace=True)
        if done.trace is not None:
            _look(program, done.trace)

    def launch(null: bool) -> None:
        dims = good.program.dims
        checkpoint = RandomCheckpoint("random", replace(CONFIG, layers=dims.model.layers))
        backend = CpuBackend(checkpoint, dims, PAGES, threads=2, null=null, deadlock_s=DEADLOCK_S)
        for _ in range(2):
            backend.launch(program, even_step(program.dims, 1, 16))
        backend.close()

    yield from [
        ("verify", lambda: verify(program)),
        ("disasm", lambda: list(disassemble(program))),
        ("simulate", virtual),
        ("null", partial(launch, True)),
        ("cpu", partial(launch, False)),
    ]


def _look(program: Program, trace: Trace) -> None:
    step = resolve(program, trace)
    write_html(Path(os.devnull), (step, summarise(step)))
    write_perfetto(Path(os.devnull), step)


def _seal(data: bytes) -> bytes:
    return data[:8] + hashlib.sha256(data[40:]).digest() + data[40:]


def _good(seed: int) -> Good:
    return good_programs()[seed % len(good_programs())]


def _program(rng: Rng, seed: int) -> Mutant:
    good = _good(seed)
    return Mutant("mutant.program", good.program.to_bytes(), program_file(good, rng), _seal, good)


def _read_program(path: Path, mutant: Mutant) -> Iterator[Stage]:
    loaded: list[Program] = []
    yield "load", lambda: loaded.append(load_program(path))
    if loaded:
        yield from uses(loaded[0], mutant.context)


def _object(rng: Rng, seed: int) -> Mutant:
    good = _good(seed)
    return Mutant("no file", context=(program_object(good, rng), good))


def _trace(rng: Rng, seed: int) -> Mutant:
    good = _good(seed)
    data = _trace_bytes(good.name)
    return Mutant("mutant.trace", data, trace_file(data, rng), context=good)


def _read_trace(path: Path, mutant: Mutant) -> Iterator[Stage]:
    loaded: list[Trace] = []
    yield "load", lambda: loaded.append(Trace.load(path))
    if loaded:
        yield "timeline", lambda: _look(mutant.context.program, loaded[0])


def _machine(rng: Rng, seed: int) -> Mutant:
    texts = machine_texts()
    text = texts[seed % len(texts)]
    return Mutant("mutant.toml", text.encode(), machine_file(text, rng))


def _read_machine(path: Path, mutant: Mutant) -> Iterator[Stage]:
    good = good_programs()[-1]
    machine: list[machines.Machine] = []
    yield "hardware", lambda: machines.hardware(str(path))
    yield "load", lambda: machine.append(machines.load(str(path)))
    if machine:
        bucket = {"dtype": Dtype.BF16, "tokens": 4, "logit_rows": 2, "max_seqs": 4, "max_context": 32}
        yield "compile", lambda: compile_program(Spec(CONFIG, replace(machine[0], workers=2), **bucket))
        table = even_step(good.program.dims, 4, 16)
        yield "simulate", lambda: simulate(good.program, replace(machine[0], workers=2), table)


KINDS = {
    "machine files": Kind(_machine, _read_machine),
    "traces": Kind(_trace, _read_trace, share=0.5),
    "program files": Kind(_program, _read_program, share=0.3),
    "programs in memory": Kind(_object, lambda _, mutant: uses(*mutant.context), share=0.15),
}
