"""Measures how good the verifier is: changes correct programs in many ways (mutate.py in tests/support), and runs the
changed programs, the mutants, to find out which of them are really unsafe.

    python benchmarks/correctness/verifier.py --per-kind 5500 --processes 2 -o benchmarks/results/verifier.json

A mutant of a small program is judged by visiting every state that its counters allow. A mutant of a larger program is
judged by runs in adversarial orders. Both use several step tables, the inputs of a step. Exit status 1 means that the
verifier accepts an unsafe mutant or rejects a correct program.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from atomic_steps import expected, make_table
from ground_truth import Verdict, adversarial, explore
from mutate import KINDS
from record import options, write
from small_programs import large, small

from megakernel.program import Program
from megakernel.scheduler.verify import verify

# Number of step tables (inputs of a step) for each correct program, and how many of them judge a changed program.
STEPS, TABLES = 4, 2
STATES = 20_000
RUNS = 2
OUTCOMES = {
    (False, False): "unsafe, rejected",
    (True, False): "UNSAFE, ACCEPTED",
    (True, True): "equivalent, accepted",
    (False, True): "equivalent, rejected",
    (True, None): "no run failed, accepted",
    (False, None): "no run failed, rejected",
}


class Base:
    """A correct program, with STEPS step tables (inputs of a step) and the outputs that each of them should produce.

    `states` is the number of states that the program's counters allow, or 0 if there are too many to visit.
    """

    def __init__(self, name: str, program: Program, exhaustive: bool) -> None:
        self.name, self.program = name, program
        self.steps = [(t, expected(program, t)) for t in (make_table(program.dims, seed) for seed in range(STEPS))]
        self.states = explore(program, *self.steps[0], STATES).states if exhaustive else 0


def settle(base: Base, mutant: Program, exhaustive: bool, seed: int) -> Verdict:
    """Judge a mutant (changed program) with the inputs of TABLES steps. It is unsafe if one of them shows that."""
    verdict = Verdict(True, "", 0)
    for number in range(seed, seed + TABLES):
        table, want = base.steps[number % STEPS]
        found = explore(mutant, table, want, STATES) if exhaustive else adversarial(mutant, table, want, seed, RUNS)
        if found.safe is False:
            return found
        if found.safe is None:
            verdict = found
    return verdict


def work(share: tuple[int, int, int, float, list[str]]) -> tuple[Counter[tuple[str, str, bool]], list[str]]:
    """Judge one process's mutants (changed programs). Return counts of outcomes, and the unsafe mutants that were
    accepted.

    `share` is (number, processes, ...): this process judges every `processes`-th mutant of each kind, from `number` on.
    """
    number, processes, per_kind, large_part, kinds = share
    bases = [[Base(name, program, not n) for name, program in group] for n, group in enumerate((small(), large()))]
    # The time to judge a changed program is proportional to its number of states, so change small programs more often.
    weights = [np.array([1 / max(base.states, 1) for base in group]) for group in bases]
    counts: Counter[tuple[str, str, bool]] = Counter()
    failures: list[str] = []
    for k, (kind, mutate) in enumerate(KINDS.items()):
        if kind not in kinds:
            continue
        made, seed = 0, number
        while made < per_kind // processes:
            rng = np.random.default_rng([k, seed])
            seed += processes
            exhaustive = bool(rng.random() >= large_part)
            chance = weights[not exhaustive] / weights[not exhaustive].sum()
            base = bases[not exhaustive][int(rng.choice(len(chance), p=chance))]
            mutant = mutate(base.program, rng)
            if mutant is None:
                continue
            made += 1
            accepted = verify(mutant).ok
            verdict = settle(base, mutant, exhaustive, seed)
            counts[kind, OUTCOMES[accepted, verdict.safe], exhaustive] += 1
            if accepted and verdict.safe is False:
                failures.append(f"{kind}, seed {seed - processes}, of {base.name}: {verdict.why}")
    return counts, failures


def good_programs() -> tuple[int, list[str]]:
    """Check correct programs. Return their number, and those that the verifier rejects or that runs prove unsafe."""
    wrong, count = [], 0
    for exhaustive, group in ((True, small()), (False, large())):
        for name, program in group:
            count += 1
            report = verify(program)
            verdict = settle(Base(name, program, exhaustive), program, exhaustive, 0)
            if not report.ok or verdict.safe is False:
                wrong.append(f"{name}: {report.violations[:1]} {verdict}")
    return count, wrong


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--per-kind", type=int, default=200)
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument(
        "--large-part", type=float, default=0.1, help="fraction of mutants made from larger programs (default: 0.1)"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    bases, failures = good_programs()
    shares = [
        (i, arguments.processes, arguments.per_kind, arguments.large_part, arguments.kinds)
        for i in range(arguments.processes)
    ]
    counts: Counter[tuple[str, str, bool]] = Counter()
    with multiprocessing.Pool(arguments.processes) as pool:
        for found, wrong in pool.imap_unordered(work, shares):
            counts += found
            failures += wrong
    seconds = time.perf_counter() - begin
    columns = [name for name in OUTCOMES.values() if any(key[1] == name for key in counts)]
    rows = {
        kind: {
            "mutants": sum(n for key, n in counts.items() if key[0] == kind),
            "settled exhaustively": sum(
                n for key, n in counts.items() if key[0] == kind and key[2] and "no run" not in key[1]
            ),
            **{c: sum(n for key, n in counts.items() if key[:2] == (kind, c)) for c in columns},
        }
        for kind in arguments.kinds
    }
    total = {name: sum(row[name] for row in rows.values()) for name in next(iter(rows.values()))}
    for kind, row in {**rows, "total": total}.items():
        print(f"{kind:<24}", *(f"{name}: {n:<7}" for name, n in row.items()))
    print(f"{bases} good programs, {len(failures)} failures, {seconds:.0f} s")
    for line in failures:
        print("FAILURE", line)
    result = {
        "base_programs": bases,
        "seconds": round(seconds),
        "tables_per_mutant": TABLES,
        "kinds": rows,
        "total": total,
        "failures": failures,
    }
    write(arguments.output, result)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
