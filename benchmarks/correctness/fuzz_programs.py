"""Coverage-guided fuzzing of program files: libFuzzer, through atheris, mutates correct files.

    pip install -e '.[fuzz]'
    python benchmarks/correctness/fuzz_programs.py -max_total_time=600 CORPUS

The folder CORPUS keeps files that reach new code, and the next run continues from there. If a file is given instead, it
is tried once. Each file gets the right checksum, so that more than the checksum is tested. A file that loads is
verified, disassembled, simulated and launched without arithmetic. Any failure other than a MegakernelError ends the
run, and the file is kept. Coverage is measured for `megakernel.program`, which checks files; coverage of the native
library would need a build by clang.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

with atheris.instrument_imports(include=["megakernel.program"]):
    import megakernel.program

import hostile_files

from megakernel.errors import MegakernelError

counts = {"taken": 0, "refused": 0}


def try_file(data: bytes) -> None:
    sealed = data[:8] + hashlib.sha256(data[40:]).digest() + data[40:]
    try:
        program = megakernel.program.program_from_bytes(sealed, "a file")
    except MegakernelError:
        counts["refused"] += 1
        return
    counts["taken"] += 1
    good = next((g for g in hostile_files.good_programs() if g.program.dims == program.dims), None)
    for stage, use in hostile_files.uses(program, good or hostile_files.good_programs()[0]):
        if stage != "cpu":
            with contextlib.suppress(MegakernelError):
                use()


def main() -> None:
    named = [Path(a) for a in sys.argv[1:] if not a.startswith("-")]
    for folder in [path for path in named if not path.is_file()][:1]:
        folder.mkdir(parents=True, exist_ok=True)
        for i, good in enumerate(hostile_files.good_programs()):
            (folder / f"good{i}").write_bytes(good.program.to_bytes())
    atexit.register(lambda: print(counts))
    atheris.Setup([sys.argv[0], "-max_len=65536", "-timeout=120", "-rss_limit_mb=4096", *sys.argv[1:]], try_file)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
