"""A package in a folder of its own, over the sources of a tree, with a native library built for it.

The library has one SIMD width, which every name of a width gives: that takes a fifth of the time to build.
"""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_FLAGS = ["-std=c++20", "-fPIC", "-pthread", "-DMK_SIMD=portable", "-DMK_LANES=4"]
_FLAGS += ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
_FLAGS += [f"-D{width}_kernels=portable_kernels" for width in ("avx2", "avx512", "avx512bf16")]


def link_package(tree: Path, folder: Path) -> Path:
    """`folder/megakernel`, with links to the sources of `tree` and without a native library."""
    package = folder / "megakernel"
    package.mkdir(parents=True)
    parts = [p for p in (tree / "megakernel").iterdir() if p.name != "_native.so" and not p.name.startswith("__pyc")]
    for part in [*parts, tree / "scheduler", tree / "serving", tree / "csrc"]:
        (package / part.name).symlink_to(part)
    return package


def build_native(tree: Path, package: Path, *flags: str) -> None:
    """Compile the native library of `tree` into `package`."""
    objects = package.parent / "objects"
    objects.mkdir()
    sources = [p for room in ("cpu", "simulate", "verify") for p in (tree / "csrc" / room).glob("*.cpp")]
    targets = [str(objects / f"{p.stem}.o") for p in sources]
    commands = [["g++", *_FLAGS, *flags, "-c", str(s), "-o", t] for s, t in zip(sources, targets, strict=True)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda command: subprocess.run(command, check=True), commands))
    library = package / "_native.so"
    library.unlink(missing_ok=True)
    subprocess.run(["g++", *_FLAGS, *flags, "-shared", *targets, "-o", str(library)], check=True)
