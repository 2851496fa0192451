"""Tests of writing to a full disk: an existing file stays, no partial file is left, and the error is one line."""

import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import Cli
from hostile_files import good_programs
from record import put
from small_programs import CONFIG

from megakernel.errors import MegakernelError
from megakernel.isa import Dtype
from megakernel.model.gguf_writer import write_gguf
from megakernel.model.random_checkpoint import RandomCheckpoint
from megakernel.program import program_from_bytes
from megakernel.timeline import resolve, summarise, write_html, write_perfetto
from megakernel.timeline.resolve import Resolved


def step() -> Resolved:
    good = good_programs()[0]
    return resolve(good.program, good.trace)


WRITERS: dict[str, Callable[[Path], None]] = {
    "program": lambda path: good_programs()[0].program.save(path),
    "trace": lambda path: good_programs()[0].trace.save(path),
    "timeline": lambda path: write_html(path, (step(), summarise(step()))),
    "Perfetto trace": lambda path: write_perfetto(path, step()),
    "figures": lambda path: put(path, {"runs": list(range(10000))}),
    "GGUF file": lambda path: write_gguf(RandomCheckpoint("random", CONFIG), path, Dtype.F32),
}


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Limit files to `size` bytes within the block. A write beyond that fails, as it does on a full disk. Modules that
    are imported within the block are not cached: Python would cut their bytecode off without an error, and each later
    import of them would fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    cached = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = cached


@pytest.mark.parametrize("what", WRITERS)
def test_what_was_there_stays(tmp_path: Path, what: str) -> None:
    path = tmp_path / "file"
    WRITERS[what](path)
    size = path.stat().st_size
    path.write_bytes(b"before")
    with no_file_beyond(size // 2), pytest.raises(MegakernelError, match=rf"cannot write {what}.*(too large|written)"):
        WRITERS[what](path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and path.read_bytes() == b"before"


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="the system has no /dev/full")
@pytest.mark.parametrize("what", WRITERS)
def test_a_device_that_is_full_is_one_line(what: str) -> None:
    with pytest.raises(MegakernelError, match=rf"^cannot write {what}.*: (No space left on device|.*written)"):
        WRITERS[what](Path("/dev/full"))
    assert Path("/dev/full").is_char_device()


def test_a_path_that_cannot_be_looked_up_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MegakernelError, match=r"^cannot write program .*: File name too long"):
        WRITERS["program"](tmp_path / ("x" * 300))


@pytest.mark.parametrize("verb", ["simulate", "timeline"])
def test_a_step_that_cannot_be_kept_is_one_line(cli: Cli, tmp_path: Path, tiny_shape: str, verb: str) -> None:
    model = ("--model", tiny_shape, "--machine", "h100") if verb == "simulate" else ("--model", tiny_shape)
    with no_file_beyond(1000):
        err = cli.fails(verb, *model, "--save", str(tmp_path / "step"))
    assert "cannot write program" in err and [*tmp_path.iterdir()] == []


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    """Saving to a device writes to it and does not replace it with a file. The test uses a pipe, because a faulty save
    as root would replace the system's /dev/null."""
    good = good_programs()[0].program
    pipe = tmp_path / "pipe"

    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    good.save(pipe)
    reader.join()
    assert pipe.is_fifo() and program_from_bytes(read[0], "the pipe").hash == good.hash
