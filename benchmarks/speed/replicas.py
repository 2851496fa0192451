"""Compares servers with replicas on Ray and a server without Ray, or two ways of routing requests to replicas.

`python benchmarks/speed/replicas.py --load unlike -o FILE`. The load `unlike`, whose prompts have nothing in common,
runs on three servers: one without Ray, one with a replica that uses all cores, and one with several replicas of one
thread each. The load `alike` runs on two servers with several replicas, which route by prefix or to the least loaded
replica. Its prompts begin with one of a few long texts and have short answers, so that a prefix cache saves most of the
work. Each round runs the load on every server once. Results of the load not chosen stay in FILE.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from family import session_times
from record import made, options, put, text
from servers import measured, megakernel

from megakernel.machine import cpu_count


@contextmanager
def server(command: list[str]) -> Iterator[str]:
    """Start a server, and yield its URL. Stop the server when the `with` block ends.

    The server runs in the Unix session of this process, so that `spent` finds its processes.
    """
    print("$", *command, file=sys.stderr)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait()


def served(args: Any) -> list[str]:
    flags = ["--model", args.model, "--max-num-seqs", str(args.max_concurrency), "--max-model-len", "2048"]
    return [*flags, "--port", "0", "--json"]


def fleet(args: Any, replicas: int, threads: int, routing: str) -> list[str]:
    flags = ["--replicas", str(replicas), "--threads", str(threads), "--routing", routing]
    return megakernel("serve", *flags, *served(args))


# Kinds of processes, each with a regular expression for its command line. The first expression that matches counts.
_PARTS = {
    "front": "FrontActor",
    "replicas' actors": "ServeReplica",
    "Ray's proxy": "ProxyActor",
    "frontends": "serving.api.frontend",
    "engines": "/dev/stdin",
    "rest of Ray": "ray::|/ray/",
}


def spent() -> Counter[str]:
    """Return the seconds of processor time that the running processes of this Unix session have used, by kind."""
    found: Counter[str] = Counter()
    for line, seconds in session_times(os.getsid(0)):
        found[next((kind for kind, part in _PARTS.items() if re.search(part, line)), "engines")] += seconds
    return found


def unlike(url: str, args: Any, seed: int) -> dict[str, float]:
    """Measure streamed answers to random prompts, which share no prefix.

    Returns the tokens per second, the number of failed requests, and the processor time per token by kind of process.
    """
    load = ["bench", "serve", "--base-url", url, "--model", args.model, "--seed", str(seed)]
    load += ["--dataset", "random", "--random-input-len", "32", "--random-output-len", str(args.output_len)]
    load += ["--num-prompts", str(args.num_prompts), "--max-concurrency", str(args.max_concurrency)]
    before = spent()
    done = measured(*load)
    tokens = args.num_prompts * args.output_len
    used = {f"ms_per_token: {kind}": 1e3 * (s - before[kind]) / tokens for kind, s in spent().items()}
    return {"tokens_per_s": done["tokens_per_s"], "failed": done["failed"], **used}


def alike(url: str, args: Any, seed: int) -> dict[str, float]:
    """Measure short answers to prompts of 512 tokens, and the share of prompt tokens that a prefix cache held.

    The first 480 tokens of a prompt are one of `args.texts` shared prefixes.
    """
    chance = random.Random(seed)
    texts = [[chance.randrange(1000, 40000) for _ in range(480)] for _ in range(args.texts)]
    prompts = [
        [*chance.choice(texts), *(chance.randrange(1000, 40000) for _ in range(32))] for _ in range(args.num_prompts)
    ]

    def ask(prompt: list[int]) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", int(url.rpartition(":")[2]), timeout=300)
        body = json.dumps({"prompt": prompt, "max_tokens": 4, "ignore_eos": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    begin = time.perf_counter()
    with ThreadPoolExecutor(args.max_concurrency) as pool:
        cached = sum(pool.map(ask, prompts))
    seconds = time.perf_counter() - begin
    return {"prompts_per_s": len(prompts) / seconds, "cached_share": cached / sum(map(len, prompts))}


def alternate(load: Any, sides: dict[str, list[str]], args: Any) -> dict[str, Any]:
    """Run a load on each server in turn, in a round to warm up and then in `args.runs` rounds.

    Returns the figures of each server in these rounds, and their medians.
    """
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    with ExitStack() as stack:
        urls = {name: stack.enter_context(server(command)) for name, command in sides.items()}
        for seed in range(args.runs + 1):
            for name, url in urls.items():
                found = load(url, args, seed)
                if seed:
                    runs[name].append(found)
    return {
        "summary": {name: {k: median(r[k] for r in found) for k in found[0]} for name, found in runs.items()},
        "runs": runs,
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load", choices=("unlike", "alike"), default="unlike", help="prompts (default: unlike)")
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--max-concurrency", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument(
        "--texts",
        type=int,
        default=8,
        help="number of different texts; each prompt begins with one of them (default: 8)",
    )
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    cores = cpu_count()
    several = max(2, cores)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.environ["RAY_TMPDIR"] = folder  # a short path, because Ray creates Unix sockets in this folder
        if args.load == "unlike":
            load = unlike
            sides = {
                "no Ray": megakernel("serve", "--threads", str(cores), *served(args)),
                "1 replica": fleet(args, 1, cores, "prefix"),
                f"{several} replicas": fleet(args, several, 1, "prefix"),
            }
        else:
            load = alike
            sides = {routing: fleet(args, several, 1, routing) for routing in ("prefix", "least-loaded")}
        found = alternate(load, sides, args)
    print(text(found["summary"]))
    if args.output:
        known = json.loads(args.output.read_text()) if args.output.exists() else {}
        put(args.output, known | {args.load: made() | found})


if __name__ == "__main__":
    main()
