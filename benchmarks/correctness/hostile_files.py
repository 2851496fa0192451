"""Does any file crash its readers? Changes programs, traces and machine files, and reads each in a child process.

    python benchmarks/correctness/hostile_files.py --count 3000 -o benchmarks/results/hostile-files.json

A mutant follows from its kind and number alone: `--kind traces --first 17 --count 1` makes one again. Every reader must
take it or refuse it with one line. A signal, a traceback, a hang, a lack of memory, or a line that cannot be printed
makes the run end with exit status 1.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from hostile_files import KINDS, good_programs, try_mutant
from record import options, write

FINE = {"ok", "refused"}


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--kind", choices=KINDS, help="only this one")
    parser.add_argument("--count", type=int, default=1000, help="mutants of each kind (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant (default: 0)")
    args = parser.parse_args()
    good_programs()  # before children are made
    found: dict[str, dict[str, int]] = {}
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in [args.kind] if args.kind else KINDS:
            counts: Counter[str] = Counter()
            for seed in range(args.first, args.first + args.count):
                for reader, outcome in try_mutant(kind, seed, Path(folder)).items():
                    counts[f"{reader}: {outcome if outcome in FINE else outcome.split()[0]}"] += 1
                    if outcome not in FINE:
                        failures.append({"kind": kind, "number": seed, "reader": reader, "outcome": outcome})
                        print(f"{kind} {seed}, {reader}: {outcome}", flush=True)
            found[kind] = dict(sorted(counts.items()))
            print(
                f"{kind}: {args.count} mutants",
                *(f"{count:6} {what}" for what, count in found[kind].items()),
                sep="\n  ",
            )
    write(args.output, {"mutants_of_each_kind": args.count, "readers": found, "failures": failures})
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
