"""Runs tests with a native library built with sanitizers. Fails if a test fails or a sanitizer reports an error.

python tests/support/sanitized.py thread tests/runtime/test_cpu_threads.py
python tests/support/sanitized.py address,undefined tests/runtime
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from own_package import build_native, link_package

ROOT = Path(__file__).parents[2]
FLAGS = ["-O1", "-g1", "-fno-omit-frame-pointer", "-Wno-tsan", "-fno-sanitize-recover=all"]
# Sanitizers write their reports to files, because pytest hides the output of processes. Leaks are not reported, because
# Python does not free all memory at exit. The allocator returns null when memory is exhausted, as malloc does.
OPTIONS = "log_path={log} exitcode=66 halt_on_error=1 detect_leaks=0 allocator_may_return_null=1 print_stacktrace=1"
RUNTIMES = {"thread": "libtsan.so", "address": "libasan.so", "undefined": "libubsan.so"}


def build(folder: Path, sanitizers: str) -> dict[str, str]:
    """Create a package in `folder` whose native library is built with `sanitizers`. Returns the environment variables
    with which Python imports that package."""
    build_native(ROOT, link_package(ROOT, folder), *FLAGS, f"-fsanitize={sanitizers}")
    preloaded = [_runtime(RUNTIMES[name]) for name in sanitizers.split(",")]
    options = OPTIONS.format(log=folder / "report")
    names = ("ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS")
    found = {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1", "LD_PRELOAD": " ".join(preloaded)}
    return found | dict.fromkeys(names, options)


def reports(folder: Path) -> str:
    """Return the sanitizers' reports on all processes that ran with the environment of `build`."""
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
        command = [sys.executable, "-c", where]
        used = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert used.stdout.strip() == str(folder / "megakernel" / "_native.so"), used.stdout
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        found = reports(folder)
    print(found, end="")
    return status or (1 if found else 0)


if __name__ == "__main__":
    sys.exit(main())
