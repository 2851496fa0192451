"""Creates a package in a separate folder, with links to a source tree's files and a native library of its own. The
library contains only the portable kernels, and the names of the AVX kernels refer to them. This reduces the time to
build it to a fifth."""

import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from built_once import built_once, sources, version

_FLAGS = ["-std=c++20", "-fPIC", "-pthread", "-DMK_SIMD=portable", "-DMK_LANES=4"]
_FLAGS += ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
_FLAGS += [f"-D{width}_kernels=portable_kernels" for width in ("avx2", "avx512", "avx512bf16")]


def link_package(tree: Path, folder: Path) -> Path:
    """Create `folder/megakernel` with links to the sources of `tree` but no native library, and return its path."""
    package = folder / "megakernel"
    package.mkdir(parents=True)
    parts = [p for p in (tree / "megakernel").iterdir() if p.name != "_native.so" and not p.name.startswith("__pyc")]
    for part in [*parts, tree / "scheduler", tree / "serving", tree / "csrc"]:
        (package / part.name).symlink_to(part)
    return package


def build_native(tree: Path, package: Path, *flags: str) -> None:
    """Compile the native library from the sources of `tree`, and put it in `package` in place of any other."""
    files = sorted((tree / "csrc").rglob("*.cpp"))

    def make(target: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [str(Path(scratch) / f"{p.stem}.o") for p in files]
            commands = [["g++", *_FLAGS, *flags, "-c", str(p), "-o", o] for p, o in zip(files, objects, strict=True)]
            list(pool.map(lambda command: subprocess.run(command, check=True), commands))
            subprocess.run(["g++", *_FLAGS, *flags, "-shared", *objects, "-o", str(target)], check=True)

    content = " ".join((version(), *_FLAGS, *flags)).encode() + sources(tree)
    library = package / "_native.so"
    library.unlink(missing_ok=True)
    library.symlink_to(built_once("_native.so", content, make))
