"""Measures the processor time that a server needs in addition to the model's arithmetic.

`python benchmarks/speed/serving_overhead.py [--before PYTHON] -o FILE`. The null backend computes nothing, so all of
the server's processor time is overhead. Requests have ShareGPT's prompt and answer lengths, and answers are streamed.
With `--before`, the runs alternate between this installation and the installation that PYTHON belongs to. The client
uses the same cores as the server, so the tokens per second are lower than with a client on another machine.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from family import session_times
from record import options, text, write
from servers import measured, megakernel, server

SERVE = ["serve", "--backend", "null", "--port", "{port}", "--max-model-len", "2048"]
SERVE += ["--max-num-batched-tokens", "1024"]


def cpu_seconds(session: int) -> float:
    """Return the seconds of processor time that the running processes of a Unix session have used."""
    return sum(seconds for _, seconds in session_times(session))


def run(python: str, args: Any, log: Path) -> dict[str, Any]:
    """Start a server with the installation that `python` belongs to, run the load twice, and measure the second run."""
    in_flight = str(args.max_concurrency)
    command = [python, *megakernel(*SERVE, "--model", args.model, "--max-num-seqs", in_flight)[1:]]
    with server(command, log) as peer:
        load = ["bench", "serve", "--base-url", peer.url, "--model", args.model, "--seed", "1"]
        load += ["--num-prompts", str(args.num_prompts), "--max-concurrency", in_flight]
        measured(*load)  # warm-up, in which the server compiles its programs
        before = cpu_seconds(peer.pid)
        done = measured(*load)
        spent = cpu_seconds(peer.pid) - before
    tokens = done["output_tokens"]
    parts = {name: figure for name, figure in (done["cpu_us_per_token"] or {}).items() if figure}
    return {
        "output_tokens": tokens,
        "failed": done["failed"],
        "tokens_per_s": done["tokens_per_s"],
        "server_us_per_token": spent / tokens * 1e6,
        "cpu_us_per_token": parts,
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--before", metavar="PYTHON", help="Python interpreter of another megakernel installation, to compare with"
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-prompts", type=int, default=512)
    parser.add_argument("--max-concurrency", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    sides = {"now": sys.executable} | ({"before": args.before} if args.before else {})
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.runs):
            for side, python in sides.items():
                runs[side].append(run(python, args, Path(folder) / f"{side}.log"))
    summary = {
        side: {name: median(r[name] for r in found) for name in ("tokens_per_s", "server_us_per_token")}
        for side, found in runs.items()
    }
    print(text(summary))
    write(args.output, {"summary": summary, "runs": runs})


if __name__ == "__main__":
    main()
