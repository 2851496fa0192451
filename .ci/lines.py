"""Counts the lines of the product, the tests and the benchmarks, and fails if there are more than lines.toml allows."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = {".py", ".h", ".cpp", ".cu", ".cuh", ".js", ".html", ".css", ".toml"}
COUNTED = {
    "product": (["megakernel", "scheduler", "serving", "csrc"], CODE),
    "tests": (["tests"], {".py", ".h", ".cpp", ".js"}),
    "benchmarks": (["benchmarks"], {".py"}),
}


def lines(folders: list[str], suffixes: set[str]) -> int:
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, check=True)
    names = {name for name in listed.stdout.decode().split("\0") if name}
    paths = [ROOT / name for name in names if Path(name).suffix in suffixes]
    return sum(path.read_bytes().count(b"\n") for path in paths if path.exists())


limits = tomllib.loads((ROOT / ".ci" / "lines.toml").read_text())
counts = {name: lines(*what) for name, what in COUNTED.items()}
for name, count in counts.items():
    print(f"{name}: {count:,} lines of at most {limits[name]:,}")
if over := [name for name, count in counts.items() if count > limits[name]]:
    sys.exit(f"too many lines: {', '.join(over)}. Whoever needs room makes it: delete as many lines elsewhere.")
