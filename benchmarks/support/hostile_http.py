"""Hostile HTTP requests: odd bodies, heads, sizes and protocols, and clients that send slowly or disconnect early."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mutants import Rng, change_json, scramble

KEY = "the key"
MESSAGES = [{"role": "user", "content": "ab \u00e9"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
SAMPLING = {"max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1, "stop": ["x", "yz"], "n": 2}
BODIES: dict[str, list[Any]] = {
    "/v1/completions": [
        {"prompt": "ab", "logit_bias": {"7": 1.5}, "echo": True, "logprobs": 2} | SAMPLING,
        {"prompt": [[1, 2], [3]], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
    ],
    "/v1/chat/completions": [{"messages": MESSAGES, "logprobs": True, "top_logprobs": 2} | SAMPLING],
    "/tokenize": [{"prompt": "ab", "add_special_tokens": False}, {"messages": MESSAGES}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}
PATHS = ["/health", "/metrics", "/v1/models", "/version", "/openapi.json", "/timeline", *BODIES]
_PATHS = [
    "*", "//", "/../../etc/passwd", "/v1/models/%00", "/v1/models/" + "%ff" * 99, "/v1/models/" + "x" * 60_000, "/%",
    "http://other.example/health", "/health/", "/health?x=" + "y" * 30_000, "/tokenize#x", "/\u00e9", "?", "/\x1b[2J",
]  # fmt: skip
_METHODS = ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH", "get", "FOO", "PRI", "", "POST"]
_HEADERS = [
    "Content-Length: -1", "Content-Length: 99999999999999999999", "Content-Length: 5\r\nContent-Length: 6",
    "Content-Length: 1000000000", "Content-Length: x", "Content-Length: 0", "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: x", "Transfer-Encoding: chunked\r\nContent-Length: 3",
    "Expect: 100-continue", "Expect: x", "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x",
    "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: x", "Connection: keep-alive, close",
    "Content-Type: text/plain", "Content-Type: multipart/form-data; boundary=x", "Content-Type: a/b; q=\u00e9",
    "Content-Encoding: gzip", "Host: evil.example", "Host: ", "Host: [::1", "Host: a\r\nHost: b", "Origin: null",
    "Authorization: Basic *", "Authorization: Bearer", "Authorization: " + "x" * 20_000, "Cookie: " + "y" * 70_000,
    "X: \x00", "X\x00: y", " folded: x", "X: a\r\n b", "no colon", ": no name", "Range: bytes=0-1", "Accept: x/y",
    "X-Request-Id: \x1b[2J", "Content-Length: 3, 3", "Content-Length: +3", "Content-Length: 0x3",
]  # fmt: skip
_LINES = [
    b"hello\r\n\r\n", b"\r\n" * 1000, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x80" * 500, b"\0" * 2000,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /health\r\n\r\n", b"GET /health HTTP/1.0\r\n\r\n", b"POST",
    b"GET /health HTTP/1.1\n\n", b"GET /health HTTP/1.1\r\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 200, b"GET /" + b"x" * 200_000, b"X: y\r\n" * 20_000,
    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"Y" * 100_000,
]  # fmt: skip


@dataclass(frozen=True)
class Attempt:
    """What one client sends: `parts`, with `pause` seconds between them. The client disconnects `patience` seconds
    after it has connected if it has no answer by then."""

    kind: str
    parts: list[bytes]
    pause: float = 0.0
    patience: float = 30.0


def attempt(seed: int, number: int) -> Attempt:
    """Return what client `number` sends, which depends only on the seed and the number."""
    rng = np.random.default_rng([seed, number])
    kind = ("body", "bytes", "huge", "head", "line", "slow", "leaves")[int(rng.choice(7, p=_SHARES))]
    return _KINDS[kind](rng)


_SHARES = (0.35, 0.2, 0.03, 0.2, 0.1, 0.05, 0.07)


def _one(rng: Rng, values: list[Any]) -> Any:
    return values[int(rng.integers(len(values)))]


def _head(rng: Rng, method: str, path: str, *headers: str) -> bytes:
    """Return the head of a request with the correct API key, a wrong key or no key."""
    lines = [f"{method} {path} HTTP/1.1", *(["Host: localhost"] if rng.random() < 0.95 else []), *headers]
    lines += _one(rng, [[f"Authorization: Bearer {KEY}"]] * 6 + [["Authorization: Bearer wrong"], []])
    lines += ["Connection: close"] if rng.random() < 0.5 else []
    return "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n"


def _post(rng: Rng, path: str, body: bytes) -> bytes:
    """Return a POST request that has its body in one piece or, in 20 % of cases, in HTTP chunks."""
    kind = "Content-Type: application/json"
    if rng.random() < 0.8:
        return _head(rng, "POST", path, kind, f"Content-Length: {len(body)}") + body
    size = int(rng.integers(1, max(2, len(body))))
    chunks = [body[i : i + size] for i in range(0, len(body), size)][:1000]
    coded = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return _head(rng, "POST", path, kind, "Transfer-Encoding: chunked") + coded + b"0\r\n\r\n"


def _good(rng: Rng) -> tuple[str, Any]:
    path = _one(rng, [*BODIES])
    return path, _one(rng, BODIES[path])


def _body(rng: Rng) -> Attempt:
    path, value = _good(rng)
    return Attempt("body", [_post(rng, path, json.dumps(change_json(value, rng)).encode())])


def _bytes(rng: Rng) -> Attempt:
    path, value = _good(rng)
    return Attempt("bytes", [_post(rng, path, scramble(json.dumps(value).encode(), rng))])


def _huge(rng: Rng) -> Attempt:
    """Return a request with a body that is larger than the server allows, or close to the limit."""
    size = int(rng.choice([50_000, 130_000, 400_000, 2_500_000]))
    path, body = _one(rng, _HUGE)
    return Attempt("huge", [_post(rng, path, body(size))])


def _times(item: bytes, count: int) -> bytes:
    return b",".join([item] * count)


_MESSAGE = b'{"role":"user","content":""}'
_HUGE: list[tuple[str, Callable[[int], bytes]]] = [
    ("/tokenize", lambda n: b'{"prompt":"%s"}' % (b"a" * 3 * n)),
    ("/tokenize", lambda n: b'{"messages":[%s]}' % _times(_MESSAGE, n // 2)),
    ("/detokenize", lambda n: b'{"tokens":[%s]}' % _times(b"7", n)),
    ("/v1/completions", lambda n: b'{"prompt":"%s","max_tokens":1}' % (b"," * 3 * n)),
    ("/v1/completions", lambda n: b'{"prompt":[%s],"max_tokens":1}' % _times(b"7", n)),
    ("/v1/completions", lambda n: b'{"prompt":["x","%s"]}' % (b"\\u00e9" * (n // 2))),
    ("/v1/completions", lambda n: b'{"prompt":[%s]}' % _times(b'"x"', n // 2)),
    ("/v1/completions", lambda n: b'{"prompt":"x","stop":[%s]}' % _times(b"7", n)),
    (
        "/v1/completions",
        lambda n: b'{"prompt":"x","logit_bias":{%s}}' % b",".join(b'"%d":1' % i for i in range(n // 8)),
    ),
    ("/v1/chat/completions", lambda n: b'{"messages":[%s]}' % _times(_MESSAGE, n // 2)),
    ("/v1/chat/completions", lambda n: b'{"messages":[{"role":"user","content":"%s"}]}' % (b"a" * 3 * n)),
    ("/v1/chat/completions", lambda n: b'{"messages":[{"role":"%s","content":"x"}]}' % (b"a" * 3 * n)),
    ("/v1/completions", lambda n: b"[" * n),
    ("/v1/completions", lambda n: b'{"prompt":' + b'{"a":' * n),
    ("/tokenize", lambda n: b'{"prompt":"x","y":%s}' % (b"9" * n)),
    ("/v1/models", lambda n: b"a" * 9 * n),
]


def _odd_head(rng: Rng) -> Attempt:
    method = _one(rng, _METHODS) if rng.random() < 0.5 else "POST"
    path = _one(rng, _PATHS) if rng.random() < 0.4 else _one(rng, PATHS)
    headers = [_one(rng, _HEADERS) for _ in range(int(rng.integers(0, 4)))]
    return Attempt("head", [_head(rng, method, path, *headers) + (b"{}" if rng.random() < 0.3 else b"")], patience=0.3)


def _line(rng: Rng) -> Attempt:
    data = _one(rng, _LINES)
    return Attempt("line", [scramble(data, rng) if rng.random() < 0.5 else data], patience=0.3)


def _slow(rng: Rng) -> Attempt:
    path, value = _good(rng)
    data = _post(rng, path, json.dumps(value).encode())
    begin, count = int(rng.integers(len(data))), int(rng.integers(1, 30))
    parts = [data[:begin], *(data[i : i + 1] for i in range(begin, begin + count))]
    rest = [data[begin + count :]] if rng.random() < 0.5 else []
    return Attempt("slow", parts + rest, pause=0.02, patience=5.0 if rest else 0.2)


def _leaves(rng: Rng) -> Attempt:
    path, value = _good(rng)
    data = _post(rng, path, json.dumps(value).encode())
    return Attempt("leaves", [data[: int(rng.integers(len(data) + 1))]], patience=float(rng.choice([0.0, 0.001, 0.02])))


_KINDS: dict[str, Callable[[Rng], Attempt]] = {
    "body": _body, "bytes": _bytes, "huge": _huge, "head": _odd_head, "line": _line, "slow": _slow, "leaves": _leaves,
}  # fmt: skip
