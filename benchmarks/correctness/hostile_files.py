"""Checks that no damaged file crashes its readers: changes files of every kind at random and reads each in a child
process.

    python benchmarks/correctness/hostile_files.py --count 18000 -o benchmarks/results/hostile-files.json

A changed file is called a mutant. Its kind and number determine its content, so `--kind traces --first 17 --count 1`
makes the same mutant again. Every reader must accept a mutant or refuse it with one line. A signal, a traceback, a
hang, a lack of memory, or a line that cannot be printed gives exit status 1. A mutant with such an outcome is reduced
to the changed bytes that cause it. `--sanitized` uses a native library with AddressSanitizer and
UndefinedBehaviorSanitizer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import hostile_files
import hostile_models
from mutants import FINE, Kind, Mutant, rng_of, shrink, try_data, try_mutants
from record import options, write
from sanitized import build, reports

KINDS = hostile_models.KINDS | hostile_files.KINDS


def smallest(kind: Kind, mutant: Mutant, stages: dict[str, str], folder: Path) -> list[tuple[int, str, str]]:
    """Return the smallest set of changes found with which one of the readers that failed (see `stages`) still fails. A
    change is (offset, byte before, byte after)."""

    def fails(data: bytes) -> bool:
        found = try_data(kind, replace(mutant, data=data), folder)
        return any(found.get(reader, "ok") not in FINE for reader, outcome in stages.items() if outcome not in FINE)

    return shrink(mutant, fails) if mutant.data else []


def sanitized() -> int:
    """Run this script again with the native library that has sanitizers. Return 0 if it succeeds without their
    reports."""
    with tempfile.TemporaryDirectory() as name:
        environment = os.environ | build(Path(name), "address,undefined")
        command = [sys.executable, *(a for a in sys.argv if a != "--sanitized")]
        status = subprocess.run(command, env=environment).returncode
        print(found := reports(Path(name)), end="")
    return status or bool(found)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--kind", choices=KINDS, action="append", help="test only this kind of file; may be repeated")
    parser.add_argument(
        "--count", type=int, default=1000, help="mutants of each kind (default: 1000); slow kinds get fewer"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant (default: 0)")
    parser.add_argument("--sanitized", action="store_true", help="use a native library with sanitizers")
    args = parser.parse_args()
    if args.sanitized:
        return sanitized()
    # Make the programs before child processes are forked, so that all child processes share the programs.
    hostile_files.good_programs()
    found: dict[str, dict[str, int]] = {}
    mutants: dict[str, int] = {}
    failures = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in args.kind or KINDS:
            counts: Counter[str] = Counter()
            mutants[kind] = max(1, round(args.count * KINDS[kind].share))
            seeds = range(args.first, args.first + mutants[kind])
            for seed, stages in try_mutants(kind, KINDS[kind], seeds, folder):
                counts.update(f"{r}: {outcome if outcome in FINE else 'failed'}" for r, outcome in stages.items())
                bad = {reader: outcome for reader, outcome in stages.items() if outcome not in FINE}
                if bad:
                    changes = smallest(KINDS[kind], KINDS[kind].make(rng_of(kind, seed), seed), stages, folder)
                    failures.append({"kind": kind, "number": seed, "readers": bad, "changes": changes})
                    print(f"{kind} {seed}: {bad}; reduced to {changes[:8]}", flush=True)
            found[kind] = dict(sorted(counts.items()))
            lines = (f"{count:6} {what}" for what, count in found[kind].items())
            print(f"{kind}: {mutants[kind]} mutants", *lines, sep="\n  ", flush=True)
            figures = {
                "mutants": sum(mutants.values()),
                "of_each_kind": mutants,
                "library": "sanitized" if "LD_PRELOAD" in os.environ else "as installed",
                "processor_seconds": round(sum(os.times()[:4])),
                "readers": found,
                "failures": failures,
            }
            write(args.output, figures)  # after each kind of file, so that an interrupted run keeps its results
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
