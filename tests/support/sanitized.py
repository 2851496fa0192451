"""Runs tests on a native library that sanitizers watch; fails where they report anything.

    python tests/support/sanitized.py thread tests/runtime/test_cpu_threads.py
    python tests/support/sanitized.py address,undefined tests/runtime

The library has one SIMD width, which every name of a width gives: that takes a fifth of the time to build.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLAGS = ["-std=c++20", "-O1", "-g1", "-fno-omit-frame-pointer", "-fPIC", "-pthread", "-Wno-tsan"]
FLAGS += ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-DMK_SIMD=portable", "-DMK_LANES=4"]
FLAGS += [f"-D{width}_kernels=portable_kernels" for width in ("avx2", "avx512", "avx512bf16")]
# A sanitizer writes what it finds to a file, because tests hide what a process prints. Python leaks by design. The
# allocator gives null where there is no memory, as the system's does.
OPTIONS = "log_path={log} exitcode=66 halt_on_error=1 detect_leaks=0 allocator_may_return_null=1 print_stacktrace=1"
RUNTIMES = {"thread": "libtsan.so", "address": "libasan.so", "undefined": "libubsan.so"}


def build(folder: Path, sanitizers: str) -> dict[str, str]:
    """A package in `folder` with its own native library: the environment in which Python takes it."""
    package = folder / "megakernel"
    package.mkdir()
    parts = [p for p in (ROOT / "megakernel").iterdir() if p.name != "_native.so" and not p.name.startswith("__pyc")]
    for part in [*parts, ROOT / "scheduler", ROOT / "serving", ROOT / "csrc"]:
        (package / part.name).symlink_to(part)
    flags = [*FLAGS, f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    sources = [p for room in ("cpu", "simulate", "verify") for p in (ROOT / "csrc" / room).glob("*.cpp")]
    objects = [folder / f"{p.stem}.o" for p in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        commands = [["g++", *flags, "-c", str(s), "-o", str(o)] for s, o in zip(sources, objects, strict=True)]
        list(pool.map(lambda command: subprocess.run(command, check=True), commands))
    subprocess.run(["g++", *flags, "-shared", *map(str, objects), "-o", str(package / "_native.so")], check=True)
    preloaded = [_runtime(RUNTIMES[name]) for name in sanitizers.split(",")]
    options = OPTIONS.format(log=folder / "report")
    names = ("ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS")
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1", "LD_PRELOAD": " ".join(preloaded)} | dict.fromkeys(
        names, options
    )


def reports(folder: Path) -> str:
    """What sanitizers have found in processes with the environment of `build`."""
    return "\n".join(path.read_text() for path in sorted(folder.glob("report.*")))


def _runtime(name: str) -> str:
    command = ["g++", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    sanitizers, *tests = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = os.environ | build(folder, sanitizers)
        where = "import megakernel.library; print(megakernel.library.load()._name)"
        used = subprocess.run(
            [sys.executable, "-c", where], env=environment, capture_output=True, text=True, check=True
        )
        assert used.stdout.strip() == str(folder / "megakernel" / "_native.so"), used.stdout
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        found = reports(folder)
    print(found, end="")
    return status or (1 if found else 0)


if __name__ == "__main__":
    sys.exit(main())
