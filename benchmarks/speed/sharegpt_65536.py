"""Runs 65,536 requests (by default) with ShareGPT lengths: the usual comparison of tensor-parallel megakernels.

    python benchmarks/speed/sharegpt_65536.py --model meta-llama/Llama-3.1-8B-Instruct --num-prompts 4096 -o h200.json
    python benchmarks/speed/sharegpt_65536.py --backend null --repetitions 1 -o null.json    # without arithmetic

If SGLang or vLLM is installed, its server and ours take turns. Each repetition sends all requests, up to 8,192 of them
in flight. Sampling is greedy, answers have the lengths recorded in ShareGPT, and they are not streamed. The first
repetition is a warm-up and is not counted. Meanwhile the script samples the resident memory of our server's process.
Reference: HazyResearch, throughput megakernel (2025-09), Llama-70B on 8 x H100, tensor parallel.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import options, text, write
from servers import Child, machine_facts, measured, megakernel, server

PUBLISHED = {
    "what": "Llama-70B, tp 8, 8 x H100, 65,536 ShareGPT prompts",
    "megakernel_tokens_per_s": 23468,
    "sglang_tokens_per_s": 19170,
    "ours_tokens_per_s": "not yet run",
}
PEERS = {
    "sglang": ["-m", "sglang.launch_server", "--model-path", "{model}", "--tp", "{tp}", "--port", "{port}"],
    "vllm": ["-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "-tp", "{tp}", "--port", "{port}"],
}
SAMPLE_S = 1.0
FLAT = 0.02  # memory that grows by at most this fraction counts as flat


def installed() -> str | None:
    return next((name for name in PEERS if importlib.util.find_spec(name)), None)


@contextmanager
def memory_of(child: Child) -> Iterator[list[tuple[float, int]]]:
    """Yield a list to which a thread adds (seconds, resident bytes) of a process until the block ends."""
    samples: list[tuple[float, int]] = []
    stop = threading.Event()
    start = time.monotonic()

    def sample() -> None:
        while not samples or not stop.wait(SAMPLE_S):
            try:
                status = Path(f"/proc/{child.pid}/status").read_text()
            except OSError:
                return
            [resident] = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
            samples.append((time.monotonic() - start, int(resident) * 1024))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def flatness(samples: list[tuple[float, int]]) -> dict[str, Any]:
    """Return the relative growth of mean memory from the run's second quarter to its last, and whether memory is flat.

    The first quarter is a warm-up and does not count.
    """
    quarters = [samples[len(samples) * i // 4 : len(samples) * (i + 1) // 4] for i in range(4)]
    means = [sum(size for _, size in quarter) / len(quarter) if quarter else None for quarter in quarters]
    growth = means[3] / means[1] - 1 if means[3] and means[1] else None
    thinned = samples[:: max(1, len(samples) // 100)]
    return {
        "resident_bytes_by_quarter": means,
        "growth_after_warm_up": growth,
        "flat": None if growth is None else growth <= FLAT,
        "samples": [(round(moment, 1), size) for moment, size in thinned],
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    logs = args.logs
    logs.mkdir(parents=True, exist_ok=True)
    ours = ["serve", "--model", args.model, "--backend", args.backend, "--tp", str(args.tp), "--port", "{port}"]
    ours += ["--max-model-len", "2048", *args.serve_flags]
    peer = None if args.backend == "null" else installed()
    flags = ["--num-prompts", str(args.num_prompts), "--max-concurrency", str(args.max_concurrency)]
    flags += ["--runs", str(args.repetitions), "--disable-stream", "--seed", "1", "--model", args.model]
    with ExitStack() as stack:
        child = stack.enter_context(server(megakernel(*ours), logs / "megakernel.log"))
        flags += ["--base-url", child.url]
        if peer:
            line = [part.replace("{model}", args.model).replace("{tp}", str(args.tp)) for part in PEERS[peer]]
            other = stack.enter_context(server([sys.executable, *line], logs / f"{peer}.log"))
            flags += ["--vs", other.url]
        samples = stack.enter_context(memory_of(child))
        figures = measured("bench", "serve", *flags)
    [versus] = figures["vs"].values() if peer else [None]
    return {
        "what": f"{args.num_prompts:,} requests with ShareGPT lengths, {args.repetitions} repetitions",
        "published": PUBLISHED,
        "machine": machine_facts(),
        "model": args.model,
        "backend": args.backend,
        "tp": args.tp,
        "max_concurrency": args.max_concurrency,
        "answered": all(
            one["completed"] == args.num_prompts and not one["short"]
            for one in figures["runs"] + (versus["runs"] if versus else [])
        ),
        "ours": counted(figures["runs"]),
        "peer": counted(versus["runs"]) | {"name": peer} if versus else "neither sglang nor vllm is installed",
        "memory": flatness(samples),
        "raw": figures,
    }


def counted(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over all repetitions but the first. If there is only one repetition, its figures count."""
    names = ("tokens_per_s", "total_tokens_per_s", "requests_per_s", "duration_s")
    return {name: median(one[name] for one in runs[1:] or runs) for name in names} | {"repetitions": len(runs)}


def main() -> int:
    parser = options(__doc__, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--num-prompts", type=int, default=65_536)
    parser.add_argument("--max-concurrency", type=int, default=8192)
    parser.add_argument("--repetitions", type=int, default=4)
    parser.add_argument("--logs", type=Path, default=Path("logs"), help="folder for the servers' logs (default: logs)")
    parser.add_argument(
        "--serve-flags", nargs=argparse.REMAINDER, default=[], help="flags for our server, after all other arguments"
    )
    args = parser.parse_args()
    result = run(args)
    write(args.output, result)
    print(text({name: result[name] for name in ("what", "answered", "ours", "peer", "published")}))
    memory = result["memory"]
    print("memory by quarter of the time:", *(f"{m / 1e6:.0f} MB" for m in memory["resident_bytes_by_quarter"] if m))
    return 0 if result["answered"] else 1


if __name__ == "__main__":
    sys.exit(main())
