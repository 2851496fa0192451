"""Tests that only regular files are read, so that a FIFO, a device, a socket or a folder in the place of a file gives
one error instead of a hang, and that processes that write one file at once leave a whole file.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megakernel import machine as machines
from megakernel.cli.serve import _flags
from megakernel.errors import MegakernelError
from megakernel.model import load_sampling, load_tokenizer, open_checkpoint
from megakernel.program import load_program
from megakernel.roofline import kept
from megakernel.serving.bench.workload import length_pairs, sharegpt_file
from megakernel.trace import Trace

# The files that are read only if another file is missing.
INSTEAD = {"model.safetensors.index.json": "model.safetensors"}
INSTEAD |= dict.fromkeys(("tekken.json", "tokenizer.model"), "tokenizer.json")
READERS: dict[str, Callable[[Path], Any]] = {
    "config.json": lambda path: open_checkpoint(str(path.parent)),
    "generation_config.json": lambda path: load_sampling(str(path.parent)),
    "model.safetensors": lambda path: open_checkpoint(str(path.parent)),
    "model.safetensors.index.json": lambda path: open_checkpoint(str(path.parent)),
    "tokenizer.json": lambda path: load_tokenizer(str(path.parent)),
    "tokenizer_config.json": lambda path: load_tokenizer(str(path.parent)),
    "tekken.json": lambda path: load_tokenizer(str(path.parent)),
    "tokenizer.model": lambda path: load_tokenizer(str(path.parent)),
    "chat_template.jinja": lambda path: load_tokenizer(str(path.parent)).apply_chat_template([]),
    "m.gguf": lambda path: open_checkpoint(str(path)),
    "a.program": load_program,
    "a.trace": Trace.load,
    "a.toml": lambda path: machines.load(str(path)),
    "serve.yaml": _flags,
    "prompts.json": lambda path: sharegpt_file(path, str.encode, 1, 0),
    "lengths.csv": lambda path: length_pairs(path, 1, 100, 0),
}


def _socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the path of a socket must be short
    socket.socket(socket.AF_UNIX).bind(path.name)
    os.chdir(before)


MAKERS: dict[str, Callable[[Path], None]] = {
    "FIFO": os.mkfifo,
    "link to a FIFO": lambda path: (os.mkfifo(path.with_name("fifo")), path.symlink_to("fifo"))[1],
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "socket": _socket,
}


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError("the reader hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_refused(tmp_path: Path, model: str, name: str, kind: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(model).iterdir():
        if file.name not in (name, INSTEAD.get(name)):
            (folder / file.name).symlink_to(file)  # links to regular files are read
    MAKERS[kind](folder / name)
    message = "no model folder" if (name, kind) == ("m.gguf", "folder") else rf"{name}.*it is not a regular file"
    with pytest.raises(MegakernelError, match=message):
        READERS[name](folder / name)


def test_kept_ceilings_are_read_from_a_file_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEGAKERNEL_CACHE", str(tmp_path))
    os.mkfifo(tmp_path / "ceilings.json")
    assert kept.recall("a machine", 1) is None and "it is not a regular file" in caplog.text


WRITER = """
import sys
from pathlib import Path
from megakernel.errors import whole_file
path = Path(sys.argv[1])
for _ in range(200):
    with whole_file(path, "the file") as part:
        with part.open("wb") as file:
            file.write(sys.argv[2].encode() * 5000)
            file.flush()
            file.write(sys.argv[2].encode() * 5000)
    found = path.read_bytes()
    assert len(found) == 10000 and len(set(found)) == 1
"""


def test_several_processes_write_one_file(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "file")]
    writers = [subprocess.Popen([*command, letter], stderr=subprocess.PIPE, text=True) for letter in "abc"]
    assert [(writer.communicate()[1], writer.returncode) for writer in writers] == [("", 0)] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
