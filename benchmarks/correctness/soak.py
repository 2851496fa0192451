"""Tests that a server survives long mixed traffic with every kind of client fault.

    python benchmarks/correctness/soak.py --minutes 60 --rounds 12 -o benchmarks/results/soak.json

The script starts `megakernel serve`, by default with a small random model whose tokens are bytes. Some clients send
well-formed requests. Others disconnect while their request is queued, prefilling or decoding, send malformed or huge
bodies or prompts that are too long, stop reading a stream, or repeat a request id. Then 2,000 connections open at once.
At the end, the server gets SIGTERM in the middle of traffic. Meanwhile the script samples the resources of the server's
processes, and repeats one prompt whose answer must never change by a bit. It fails if this answer changes, if an answer
is a 5xx other than 503, if an error is not in the documented format, if a request hangs, or if a KV page is still in
use when no sequence is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from family import taken
from model_helpers import byte_model
from record import options, text, write
from servers import megakernel

from megakernel.serving.server.frontend import allow_connections

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
HANG = 600.0  # seconds without an answer after which a request counts as hanging
SAMPLES = 720  # number of samples of the server's resources in the whole run


@dataclass
class Target:
    """The server under test, and the answers and faults that clients saw.

    While `ending` is true, the server may refuse and close connections.
    """

    host: str
    port: int
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    ending: bool = False

    def complain(self, what: str) -> None:
        if len(self.wrong) < 100:
            self.wrong.append(what)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)

    async def send(
        self, path: str, body: bytes | None, headers: str = ""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection and send one request on it."""
        reader, writer = await self.open()
        head = (
            f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}"
        )
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"\r\n" + (body or b""))
        return reader, writer

    async def ask(self, path: str, body: bytes | None, headers: str = "") -> tuple[int, bytes]:
        """Send one request and return the answer's status and body. Record a fault if the answer shows one."""
        reader, writer = await self.send(path, body, headers)
        try:
            async with asyncio.timeout(HANG):
                data = await reader.read()
        except TimeoutError:
            self.complain(f"no answer within {HANG:.0f} s: {path}")
            return 0, b""
        finally:
            writer.close()
        status, content = parse(data)
        self.seen[str(status)] += 1
        if not status and not self.ending:
            self.complain(f"a connection closed without an answer: {path}")
        if status >= 400:
            self.check_error(status, content)
        return status, content

    def check_error(self, status: int, content: bytes) -> None:
        """Record a fault if an error is not in the documented format, or if its status is 500 or higher, except 503."""
        try:
            error = json.loads(content)["error"]
            fine = isinstance(error["message"], str) and isinstance(error["type"], str) and error["code"] == status
            fine = fine and set(error) == {"message", "type", "param", "code"}
        except (ValueError, KeyError, TypeError):
            fine = False
        if not fine:
            self.complain(f"{status} in an undocumented format: {content[:200]!r}")
        if status >= 500 and status != 503:
            self.complain(f"{status}: {content[:200]!r}")


def parse(data: bytes) -> tuple[int, bytes]:
    """Return the status and body of an HTTP/1.1 answer, given all bytes of its connection. Status 0 means no answer."""
    head, _, body = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return 0, b""
    if b"transfer-encoding: chunked" in head.lower():
        parts = []
        while body:
            size, _, body = body.partition(b"\r\n")
            length = int(size, 16)
            parts.append(body[:length])
            body = body[length + 2 :]
        body = b"".join(parts)
    return int(head[9:12]), body


class Traffic:
    """The kinds of clients, with one method each. A call acts as one client, from connecting to disconnecting."""

    def __init__(self, target: Target, facts: dict[str, Any], seed: int) -> None:
        self.target, self.random = target, random.Random(seed)
        self.context: int = facts["max_model_len"]
        self.vocab = 256
        self.same: Counter[bytes] = Counter()  # answer to the prompt of `asks_again` -> how often it came

    def kinds(self) -> list[Callable[[], Awaitable[None]]]:
        return [
            self.whole, self.whole, self.stream, self.stream, self.several, self.scored, self.malformed, self.too_long,
            self.leaves, self.leaves, self.leaves, self.leaves_while_sending, self.stalls, self.same_id, self.looks,
            self.chats, self.huge, self.tokenizes, self.asks_again, self.asks_again,
        ]  # fmt: skip

    def body(self, **changes: Any) -> bytes:
        prompt = [self.random.randrange(self.vocab) for _ in range(self.random.randint(1, self.context // 2))]
        tokens = self.random.randint(1, self.context // 3)
        given = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": self.random.randrange(1 << 30)}
        return json.dumps(given | {"request_id": "soak"} | changes).encode()

    async def whole(self) -> None:
        body = self.body(n=self.random.choice((1, 1, 1, 3)))
        status, content = await self.target.ask(COMPLETIONS, body)
        if status == 200:
            wanted, got = json.loads(body), json.loads(content)
            if got["usage"]["completion_tokens"] != wanted["max_tokens"] * wanted["n"]:
                self.target.complain(f"{got['usage']} for max_tokens {wanted['max_tokens']} and n {wanted['n']}")

    async def stream(self) -> None:
        body = self.body(stream=True, stream_options={"include_usage": True})
        status, content = await self.target.ask(COMPLETIONS, body)
        if status == 200 and not self.target.ending:
            *events, done, _ = content.decode().split("\n\n")
            last = json.loads(events[-1].removeprefix("data: "))
            if "error" in last:
                self.target.check_error(last["error"]["code"], events[-1].removeprefix("data: ").encode())
            elif done != "data: [DONE]" or last["usage"]["completion_tokens"] != json.loads(body)["max_tokens"]:
                self.target.complain(f"a stream ended unexpectedly, with {events[-1][:200]} and {done[:100]}")

    async def several(self) -> None:
        prompts = [[self.random.randrange(self.vocab) for _ in range(8)] for _ in range(self.random.randint(1, 20))]
        status, content = await self.target.ask(COMPLETIONS, self.body(prompt=prompts, max_tokens=4))
        if status == 200 and len(json.loads(content)["choices"]) != len(prompts):
            self.target.complain("a prompt has no answer")

    async def scored(self) -> None:
        await self.target.ask(COMPLETIONS, self.body(echo=True, logprobs=1, max_tokens=1))

    async def malformed(self) -> None:
        body = self.body()
        cut = self.random.randrange(1, len(body))
        junk = [
            body[:cut], b"", b"null", b"[]", b"{}", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"\xff" * 50,
            self.body(temperature=-1), self.body(n=10**9), self.body(max_tokens=-1), self.body(prompt=[-1]),
            self.body(prompt=[10**9]), self.body(logit_bias={"x": 1}), self.body(model="none"), b"[" * 10_000,
        ]  # fmt: skip
        status, _ = await self.target.ask(self.random.choice((COMPLETIONS, CHAT)), self.random.choice(junk))
        if status not in (0, 400, 404, 503):
            self.target.complain(f"{status} for a malformed body")

    async def too_long(self) -> None:
        prompt = [1] * (self.context + self.random.randint(-1, 3))
        status, _ = await self.target.ask(COMPLETIONS, self.body(prompt=prompt, max_tokens=2))
        if status not in (0, 400, 503):
            self.target.complain(f"{status} for a prompt of {len(prompt)} and 2 tokens in a context of {self.context}")

    async def chats(self) -> None:
        messages = [{"role": "user", "content": "ab"}] * self.random.randint(1, 9)
        await self.target.ask(CHAT, json.dumps({"messages": messages, "max_tokens": 8}).encode())

    async def huge(self) -> None:
        """Send a body that exceeds a limit of the server or comes close to it."""
        word, many = b"a" * self.random.choice((100_000, 8_000_000, 17_000_000)), self.random.choice((1000, 200_000))
        path, body = self.random.choice(
            (
                (COMPLETIONS, b'{"prompt": "%s", "max_tokens": 1}' % word),
                (TOKENIZE, b'{"prompt": "%s"}' % word),
                (CHAT, b'{"messages": [%s]}' % b",".join([b'{"role": "user", "content": ""}'] * many)),
                ("/detokenize", b'{"tokens": [%s]}' % b",".join([b"7"] * many)),
                (COMPLETIONS, b'{"prompt": %s}' % (b"[" * many)),
            )
        )
        status, _ = await self.target.ask(path, body)
        if status not in (0, 200, 400, 413, 503) or (status == 200 and len(body) > 10_000):
            self.target.complain(f"{status} for a body of {len(body)} bytes to {path}")

    async def tokenizes(self) -> None:
        prompt = "ab \u00e9 " * self.random.randint(1, self.context // 6)
        status, content = await self.target.ask(TOKENIZE, json.dumps({"prompt": prompt}).encode())
        if status == 200:
            tokens = json.dumps({"tokens": json.loads(content)["tokens"]}).encode()
            status, content = await self.target.ask("/detokenize", tokens)
            if status == 200 and json.loads(content)["prompt"] != prompt:
                self.target.complain("a text changed after tokenize and detokenize")

    async def asks_again(self) -> None:
        """Send one prompt, always with the same seed. Its token ids, log-probabilities and text must never change."""
        wanted = {"prompt": "Once upon a time", "max_tokens": 24, "seed": 7, "temperature": 0.9, "top_p": 0.95}
        body = json.dumps(wanted | {"logprobs": 5, "return_token_ids": True, "ignore_eos": True}).encode()
        status, content = await self.target.ask(COMPLETIONS, body)
        if status == 200:
            self.same[json.dumps(json.loads(content)["choices"]).encode()] += 1
            if len(self.same) > 1:
                self.target.complain(f"one prompt has {len(self.same)} answers")

    async def leaves(self) -> None:
        """Send a request, and disconnect at once or a little later, while the request waits, prefills or decodes."""
        long = {"prompt": [1] * (self.context // 2), "max_tokens": self.context // 3}
        stream = self.random.random() < 0.5
        _, writer = await self.target.send(COMPLETIONS, self.body(**long, n=self.random.choice((1, 4)), stream=stream))
        await asyncio.sleep(self.random.choice((0.0, 0.001, 0.01, 0.1, 0.5)))
        writer.transport.abort() if self.random.random() < 0.5 else writer.close()
        self.target.seen["left"] += 1

    async def leaves_while_sending(self) -> None:
        _, writer = await self.target.open()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        await asyncio.sleep(self.random.choice((0.0, 0.05)))
        writer.transport.abort()
        self.target.seen["left"] += 1

    async def stalls(self) -> None:
        """Act as a client that reads a few bytes of a streamed answer, pauses, and then disconnects."""
        reader, writer = await self.target.send(COMPLETIONS, self.body(stream=True, n=4, logprobs=5))
        await asyncio.wait_for(reader.read(100), HANG)
        await asyncio.sleep(self.random.random() * 2)
        writer.close()
        self.target.seen["stalled"] += 1

    async def same_id(self) -> None:
        """Send two requests with the same id at the same time. Their answers must have different ids."""
        body, header = self.body(request_id="same"), "X-Request-Id: same\r\n"
        answers = await asyncio.gather(*(self.target.ask(COMPLETIONS, body, header) for _ in range(2)))
        bodies = [json.loads(content) for status, content in answers if status == 200]
        if len(bodies) == 2 and bodies[0]["id"] == bodies[1]["id"]:
            self.target.complain("two answers with one id")

    async def looks(self) -> None:
        for path in ("/health", "/metrics", "/v1/models", "/version", "/openapi.json", "/nowhere"):
            status, _ = await self.target.ask(path, None)
            if status not in (0, 404 if path == "/nowhere" else 200):
                self.target.complain(f"{status} for {path}")


async def mixed(traffic: Traffic, seconds: float, clients: int) -> int:
    """Run `clients` clients of random kinds at a time, for `seconds` seconds. Return the total number of clients."""
    deadline, count = time.monotonic() + seconds, 0

    async def one_after_another() -> None:
        nonlocal count
        while time.monotonic() < deadline:
            kind = traffic.random.choice(traffic.kinds())
            try:
                await kind()
            except (ConnectionError, asyncio.IncompleteReadError) as e:
                if not traffic.target.ending:
                    traffic.target.complain(f"{kind.__name__}: {type(e).__name__}: {e}")
            count += 1

    await asyncio.gather(*(one_after_another() for _ in range(clients)))
    return count


async def burst(traffic: Traffic, connections: int) -> None:
    """Open `connections` connections at once, and send one request on each."""

    async def one() -> None:
        try:
            await traffic.target.ask(COMPLETIONS, traffic.body(prompt=[1, 2, 3], max_tokens=4))
        except OSError as e:
            traffic.target.complain(f"burst: {type(e).__name__}: {e}")

    await asyncio.gather(*(one() for _ in range(connections)))


async def gauges(target: Target) -> dict[str, float]:
    """Return the numbers of running and waiting sequences and of preemptions, and the fraction of KV pages in use."""
    _, content = await target.ask("/metrics", None)
    found = {}
    for line in content.decode().splitlines():
        name = line.partition("{")[0].removeprefix("vllm:")
        if name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
            found[name] = float(line.rsplit(" ", 1)[1])
    return found


async def at_rest(target: Target) -> dict[str, float]:
    """Wait until no sequence is left and no KV page is in use, and return the metrics. After a minute, record a
    fault."""
    for _ in range(600):
        found = await gauges(target)
        if not any(found[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")):
            return found
        await asyncio.sleep(0.1)
    target.complain(f"sequences or KV pages are left after a minute: {found}")
    return found


async def watch(pid: int, target: Target, every: float, samples: list[dict[str, float]]) -> None:
    """Append the server's resources to `samples` every `every` seconds, until the server ends or this task is
    cancelled.
    """
    begin = time.monotonic()
    while True:
        try:
            held = await gauges(target)
        except (OSError, KeyError):
            return  # the server has ended
        samples.append({"at": round(time.monotonic() - begin, 1)} | asdict(taken(pid)) | held)
        await asyncio.sleep(every)


async def soak(args: argparse.Namespace) -> dict[str, Any]:
    started = megakernel("serve", "--json", "--port", "0", "--shutdown-timeout", "60", *args.serve)
    server = await asyncio.create_subprocess_exec(*started, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    try:
        line = await server.stdout.readline()
        if not line:
            raise SystemExit("the server did not start: see its messages above")
        facts = json.loads(line)
        host, _, port = facts["url"].removeprefix("http://").rpartition(":")
        target = Target(host, int(port))
        traffic = Traffic(target, facts, args.seed)
        begin = time.monotonic()
        samples: list[dict[str, float]] = []
        watching = asyncio.create_task(watch(server.pid, target, max(1.0, args.minutes * 60 / SAMPLES), samples))
        resting = [asdict(taken(server.pid))]
        clients = 0
        for _ in range(args.rounds):
            clients += await mixed(traffic, args.minutes * 60 / args.rounds, args.clients)
            resting.append(asdict(taken(server.pid)) | await at_rest(target))
        await burst(traffic, args.connections)
        rest = await at_rest(target)
        seconds = time.monotonic() - begin
        seen = dict(target.seen)
        watching.cancel()
        ending = asyncio.ensure_future(mixed(traffic, min(3.0, args.minutes * 60), args.clients))
        await asyncio.sleep(min(1.0, args.minutes * 20))
        target.ending = True
        server.send_signal(signal.SIGTERM)
        async with asyncio.timeout(HANG):
            status = await server.wait()
            await ending
        if status != 0:
            target.complain(f"exit status {status} after SIGTERM")
    finally:
        if server.returncode is None:
            server.kill()
    return {
        "ok": not target.wrong,
        "wrong": target.wrong,
        "clients": clients + args.connections,
        "seconds": round(seconds, 1),
        "answers": seen,
        "at_rest": rest,
        "same_answers": list(traffic.same.values()),
        "server": facts,
        "after_each_round": resting,
        "samples": samples,
    }


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes of mixed traffic (default: 10)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of rounds; after each, all sequences must have ended (default: 5)"
    )
    parser.add_argument("--clients", type=int, default=64, help="concurrent clients (default: 64)")
    parser.add_argument("--connections", type=int, default=2000, help="connections to open at once (default: 2000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("serve", nargs="*", help="flags for megakernel serve, after --")
    args = parser.parse_args()
    allow_connections()
    with tempfile.TemporaryDirectory() as folder:
        if not args.serve:
            byte_model(Path(folder))
            args.serve = ["--model", folder, "--served-model-name", "bytes", "--max-model-len", "1024"]
        result = asyncio.run(soak(args))
    print(text({name: value for name, value in result.items() if name != "samples"}))
    write(args.output, result)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
