"""Checks that no HTTP request delays the others, leaks memory, or gets a 5xx.

    python benchmarks/correctness/hostile_http.py --count 10000 -o benchmarks/results/hostile-http.json

The script starts `megakernel serve --api-key` with a small random model and sends hostile requests: malformed bodies
and headers, sizes beyond every limit, clients that send slowly or disconnect. Most requests have the key; some have a
wrong one or none. Seed and number determine a request, so `--first 17 --count 1` sends the same request again. Another
process asks for `/health` all the time, on a connection that it keeps and on new ones. Memory is that of all server
processes. The script fails if an answer is a 5xx, if the server ends, if memory has grown by 100 MB, or, with --quiet
(for a machine that does nothing else), if `/health` takes longer than 100 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from family import taken
from hostile_http import KEY, Attempt, attempt
from model_helpers import byte_model
from record import options, text, write
from servers import megakernel

MOST_HEALTH_MS, MOST_GROWTH_MB = 100.0, 100.0
POLLER = """
import http.client, json, select, sys, time
port, kept, times = int(sys.argv[1]), None, []
while not times or not select.select([sys.stdin], [], [], 0.01)[0]:
    connection = kept if len(times) % 2 and kept else http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    begin = time.monotonic()
    connection.request("GET", "/health")
    answer = connection.getresponse()
    answer.read()
    times.append((time.monotonic() - begin, answer.status, begin))
    if len(times) % 2 == 0 or kept is None:
        kept = connection
    else:
        connection.close()
print(json.dumps(times))
"""


@dataclass
class Outcome:
    """The outcome of one request: its status (0 without an answer), and the times at which it began and ended."""

    number: int
    kind: str
    status: int
    begin: float
    end: float


async def status_of(reader: asyncio.StreamReader) -> int:
    """Return the status of an answer. If the answer has a Content-Length, its body is read too.

    Raises IncompleteReadError if the connection ends earlier.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:-2])
    await reader.readexactly(int(fields.get(b"content-length", b"0")))
    return int(head[9:12])


async def send(port: int, sent: Attempt) -> int:
    """Send a request, and return the status of the answer, or 0 if no complete answer came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        with suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            async with asyncio.timeout(sent.patience):
                for i, part in enumerate(sent.parts):
                    if i:
                        await asyncio.sleep(sent.pause)
                    writer.write(part)
                with suppress(ConnectionError):  # a refusal may arrive before the request is sent completely
                    await writer.drain()
                return await status_of(reader)
        return 0
    finally:
        writer.transport.abort()


async def attack(port: int, seed: int, numbers: range, clients: int) -> list[Outcome]:
    outcomes = []
    left = iter(numbers)

    async def one_after_another() -> None:
        for number in left:
            sent, begin = attempt(seed, number), time.monotonic()
            status = await send(port, sent)
            outcomes.append(Outcome(number, sent.kind, status, begin, time.monotonic()))

    await asyncio.gather(*(one_after_another() for _ in range(clients)))
    return outcomes


def by_kind(outcomes: list[Outcome]) -> dict[str, dict[str, int]]:
    """Return the number of requests for each kind and each status of the answer."""
    counts = Counter((one.kind, str(one.status or "none")) for one in outcomes)
    kinds = sorted({kind for kind, _ in counts})
    return {kind: {status: n for (k, status), n in sorted(counts.items()) if k == kind} for kind in kinds}


def slowest(times: list[tuple[float, int, float]], outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """Return the longest waits for `/health`, each with the hostile requests that were in flight during the wait."""
    return [
        {
            "ms": round(1000 * seconds, 1),
            "meanwhile": [f"{o.kind} {o.number}" for o in outcomes if o.begin < at + seconds and at < o.end],
        }
        for seconds, _, at in sorted(times, reverse=True)[:5]
    ]


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    byte_model(folder)
    flags = ["--model", str(folder), "--served-model-name", "bytes", "--max-model-len", "1024", "--api-key", KEY]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            megakernel("serve", "--json", "--port", "0", *flags, *args.serve), stdout=subprocess.PIPE, stderr=log
        )
    try:
        assert server.stdout is not None
        facts = json.loads(server.stdout.readline() or "{}")
        if not facts:
            raise SystemExit(f"the server did not start: {(folder / 'log').read_text()[-500:]}")
        port = int(facts["url"].rpartition(":")[2])
        before, begin = taken(server.pid), time.monotonic()
        command = [sys.executable, "-c", POLLER, str(port)]
        poller = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        os.nice(10)  # the server gets the cores first, as if this client ran on another machine
        numbers = range(args.first, args.first + args.count)
        outcomes = asyncio.run(attack(port, args.seed, numbers, args.clients))
        seconds = time.monotonic() - begin
        times = json.loads(poller.communicate(b"\n")[0])
        time.sleep(1)  # leave the server time to clean up
        after = taken(server.pid)
        ended = server.poll()
        server.terminate()
        server.wait(60)
    finally:
        server.kill()
    wrong = [(one.number, one.status) for one in outcomes if one.status >= 500]
    log_text = (folder / "log").read_text()
    health = sorted(1000 * seconds for seconds, _, _ in times)
    grown = after.memory_mb - before.memory_mb
    return {
        "ok": not wrong and ended is None and "Traceback" not in log_text and grown < MOST_GROWTH_MB
        and all(status == 200 for _, status, _ in times) and not (args.quiet and health[-1] > MOST_HEALTH_MS),
        "requests": args.count,
        "seed": args.seed,
        "clients": args.clients,
        "seconds": round(seconds, 1),
        "answers": by_kind(outcomes),
        "wrong": wrong,
        "tracebacks": log_text.count("Traceback"),
        "health": {"asked": len(health), "median_ms": round(health[len(health) // 2], 2),
                   "p99_ms": round(health[len(health) * 99 // 100], 2), "worst_ms": round(health[-1], 2)},
        "slowest": slowest(times, outcomes),
        "grown_mb": round(grown, 1),
        "before": asdict(before),
        "after": asdict(after),
        "server": facts,
    }  # fmt: skip


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="requests (default: 10000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first request (default: 0)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=8, help="concurrent clients (default: 8)")
    parser.add_argument("--quiet", action="store_true", help="also fail if /health takes longer than 100 ms")
    parser.add_argument("serve", nargs="*", help="flags of megakernel serve, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(args, Path(folder))
    print(text(result))
    write(args.output, result)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
