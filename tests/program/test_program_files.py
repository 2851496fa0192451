"""Tests that every reader of program files refuses damaged and hostile files with an error of one line."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_files import PAGES, good_programs, sealed, split
from mutate import edit, rows_of
from small_programs import CONFIG

from megakernel import machine as machines
from megakernel.errors import MegakernelError
from megakernel.isa import Forward, record
from megakernel.model.random_checkpoint import RandomCheckpoint
from megakernel.program import Program, Segment, checks, load_program, program_from_bytes
from megakernel.program.program import ALIGNMENT, START
from megakernel.runtime import even_step
from megakernel.runtime.cpu.backend import CpuBackend
from megakernel.scheduler.simulate import simulate

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "correctness" / "hostile_files.py"


@pytest.fixture(scope="module")
def program() -> Program:
    return good_programs()[1].program  # with a queue


def test_a_sample_of_hostile_files() -> None:
    """No reader crashes, hangs, prints a traceback, or prints control characters from the file."""
    command = [sys.executable, str(SCRIPT), "--count", "15"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "load: refused" in done.stdout and "cpu: ok" in done.stdout


@pytest.mark.parametrize("length", [1, 2, 3, 64])
def test_arrays_are_aligned_whatever_the_length_of_the_header(program: Program, length: int) -> None:
    data = replace(program, machine="m" * length).to_bytes()
    assert (START + int.from_bytes(data[40:START], "little")) % ALIGNMENT == 0
    loaded = program_from_bytes(data, "a file")
    assert loaded.machine == "m" * length and loaded.to_bytes() == data
    assert all(array.flags.aligned for array in loaded.arrays().values())


def test_other_versions_sizes_beyond_a_limit_and_names_that_a_terminal_would_obey_are_refused(program: Program) -> None:
    def refuses(data: bytes, message: str) -> None:
        with pytest.raises(MegakernelError, match=message):
            program_from_bytes(data, "a file")

    data = program.to_bytes()
    refuses(data[:7] + bytes([6]) + data[8:], "a file has format version 6, but this release reads 8: compile")
    refuses(replace(program, machine="\x1b[2J").to_bytes(), "the machine's name is not printable")
    prologue, *others = program.forward.segments
    for name in ("<img src=x onerror=alert(1)>", "@@DATA@@", "a b", "", "a\n", "é", "x" * 256, "$x$", "a/../b", '"'):
        renamed = Forward((replace(prologue[0], name=name), *prologue[1:]), *others)
        refuses(replace(program, forward=renamed).to_bytes(), "must be 1 to 255 letters")
    sizes = {"layers": (1 << 20, "layers are more than"), "max_context": (1 << 28, "be at most")}
    sizes |= {"heads": (0, "least 1")}
    for field, (value, message) in sizes.items():
        refuses(replace(program, dims=program.dims.changed(**{field: value})).to_bytes(), message)


def test_a_step_has_room_for_the_items_that_it_may_need(program: Program) -> None:
    dims = program.dims
    least = min(dims.bucket.tokens, dims.bucket.row_blocks + dims.bucket.max_seqs)
    for items, refused in ((least, False), (least - 1, True)):
        told = list(checks._sizes(dims.changed(items=items)))
        assert any("attention items" in why for why in told) == refused
    for field in ("partials", "bias_entries", "mask_rows"):
        for count in (0, -1):
            told = list(checks._sizes(dims.changed(**{field: count})))
            assert any("attention items" in why for why in told) == (count < 0)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (["ranks"], True, "at `$.ranks`"),
        (["ranks"], 1 << 31, "`$.ranks`"),
        (["counters"], 3, "arrays do not have the lengths that its header states"),
        (["dims"], {"vocab": 8}, "`hidden`"),
        (["dims", "rms_eps"], -1, "`$.dims.rms_eps`"),
        (["machine"], "m" * 256, "length <= 255"),
        (["arrays"], [["body.records", 3]], "the header's list of arrays must be prologue.records"),
        (["arrays", 0, 1], -1, "`$.arrays[0][1]`"),
        (["forward"], {"prologue": []}, "`body`"),
        (["forward", "body", 1, "operation"], 99, "Invalid enum value 99 - at `$.forward.body[1].operation`"),
        (["forward", "body", 1, "weights"], 1000, "Invalid enum value 1000"),
        (["forward", "body", 1, "rows"], "all", "at `$"),
    ],
)
def test_a_wrong_header_field_is_named(program: Program, place: list[str | int], value: object, message: str) -> None:
    header, arrays = split(program.to_bytes())
    field: Any = header
    for key in place[:-1]:
        field = field[key]
    field[place[-1]] = value
    with pytest.raises(MegakernelError) as failed:
        program_from_bytes(sealed(header, arrays), "a file")
    assert "program a file is damaged" in str(failed.value) and message in str(failed.value)


# -- programs made in memory, which no file reader has checked


def launch(program: Program) -> None:
    good = good_programs()[1].program.dims
    checkpoint = RandomCheckpoint("random", replace(CONFIG, layers=good.model.layers))
    backend = CpuBackend(checkpoint, good, PAGES, threads=2, null=True, deadlock_s=0.2)
    backend.launch(program, even_step(program.dims, 1, 16))


@pytest.mark.parametrize("total", [-(1 << 31), (1 << 31) - 1])
def test_the_native_simulator_takes_any_total(program: Program, total: int) -> None:
    """The simulation ends with an error if counters never reach their totals, or if they exceed them from the start."""
    totals = [np.full_like(getattr(program, name), total) for name in ("totals_first", "totals_middle", "totals_last")]
    wrong = replace(program, totals_first=totals[0], totals_middle=totals[1], totals_last=totals[2])
    with pytest.raises(MegakernelError):
        simulate(wrong, machines.host(2), even_step(program.dims, 4, 16))


@pytest.mark.parametrize(
    ("part", "phase", "word", "value", "message"),
    [
        ("queues", "qkv_rope", 0, 99, "the program has no such phase"),
        ("body", "drain", 0, 200, "the program has no such phase"),
        ("body", "drain", record.OPERAND_WORD, 1, "its queue does not exist"),
        ("body", "drain", record.OPERAND_WORD + 1, 1000, "its end lies outside its queue"),
        ("queues", "qkv_rope", record.WAIT_WORD, record.COUNTER_MASK, "a wait names no counter"),
        ("queues", "qkv_rope", record.WAIT_WORD, record.NEXT, "a wait names no counter"),
        ("prologue", "embed", record.OPERAND_WORD, 1 << 20, "its box lies outside"),
        ("queues", "qkv_rope", record.OPERAND_WORD, 1000, "its box lies outside"),
        ("queues", "qkv_rope", record.OPERAND_WORD + 1, 0, "an operand is out of range"),
        ("prologue", "embed", record.OPERAND_WORD + 1, -1, "an operand is out of range"),
        ("queues", "qkv_rope", record.OPERAND_WORD + 3, 0, "an operand is out of range"),
        ("queues", "qkv_rope", record.OPERAND_WORD + 2, -32, "an operand is out of range"),
        ("queues", "qkv_rope", record.OPERAND_WORD + 2, 1, "its column tile cuts a RoPE pair"),
        ("queues", "attention", record.OPERAND_WORD, 1 << 20, "the step table has no such slot"),
        ("queues", "attention", record.OPERAND_WORD + 1, 0, "its groups do not cover"),
        ("queues", "qkv_rope", record.SIGNAL_WORD, 1 | record.INDEXED, "a signal word here cannot be indexed"),
        ("queues", "qkv_rope", record.SIGNAL_WORD, record.counter_word(0, rank=2), "a signal names no rank"),
        ("prologue", "embed", record.SIGNAL_WORD, 1 | record.NEXT, "only the body signals the next block"),
    ],
)
def test_a_wrong_record_is_refused(
    program: Program, tmp_path: Path, part: str, phase: str, word: int, value: int, message: str
) -> None:
    """Backends, the simulator and readers of files refuse it. The error about a file names the file and the record,
    although the file's checksum is correct."""
    wrong = edit(program, part, rows_of(program, part, phase)[0], word, value)
    wrong.save(path := tmp_path / "wrong.program")
    place = "body, rank 0, queue 0" if part == "queues" else f"{part}, rank 0"
    with pytest.raises(MegakernelError, match=rf"wrong\.program is wrong: .*{place}.*{message}"):
        load_program(path)
    with pytest.raises(MegakernelError, match=message):
        launch(wrong)
    with pytest.raises(MegakernelError, match=message):
        simulate(wrong, machines.host(2), even_step(program.dims, 4, 16))


def test_the_cpu_backend_refuses_offsets(program: Program) -> None:
    launch(program)
    offsets = program.body.offsets.copy()
    offsets[1] += 1000
    with pytest.raises(MegakernelError, match="body: offsets are not monotone"):
        launch(replace(program, body=Segment(program.body.records, offsets)))
