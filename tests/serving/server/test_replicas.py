"""Several servers (replicas) behind one address: routing, placement on a cluster, and two replicas on Ray."""

# ruff: noqa: E402

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

import extras
import pytest

extras.needs("ray")

import yaml
from api_support import Live, by_choice, until
from commands import Cli, command
from model_helpers import byte_model
from schemas import closed
from serve_process import SMALL, at, begin_stream, process, rest

from megakernel.cli import main, parser
from megakernel.errors import MegakernelError
from megakernel.serving import replicas
from megakernel.serving.replicas import cluster, placement
from megakernel.serving.replicas.placement import Resources, place, prepare
from megakernel.serving.replicas.routing import choose, prefix_of, remember
from megakernel.serving.replicas.server_process import Head
from megakernel.serving.server.writer import Replay


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def common(one: bytes, other: bytes) -> int:
    return sum(a == b for a, b in zip(prefix_of(one), prefix_of(other), strict=False))


def test_prompts_share_the_names_of_what_they_begin_with() -> None:
    text = "".join(f"{number} " for number in range(1000))
    one, other = body(prompt=text[:1024] + "a" * 512), body(temperature=1, prompt=text[:1024] + "b" * 512)
    assert len(prefix_of(one)) == 6 and common(one, other) == 4  # blocks of 256 bytes
    assert common(body(prompt="x" + text[1:]), body(prompt=text)) == 0
    turns = [{"role": "user", "content": text[:900]}, {"role": "assistant", "content": "b" * 900}]
    assert common(body(messages=turns[:1]), body(messages=turns)) == 3
    tools = [{"type": "function", "function": {"name": "f" * 600}}]
    assert common(body(messages=turns, tools=tools), body(messages=turns)) == 0
    assert len(prefix_of(body(prompt="a" * 100_000))) == 128


@pytest.mark.parametrize("bad", [b"", b"[1]", b"{", b'"\xff"', b'{"prompt": "short"}', b"{}"])
def test_what_has_no_prefix_has_no_names(bad: bytes) -> None:
    assert prefix_of(bad) == []


def test_the_replica_is_chosen_by_prefix_then_by_load() -> None:
    a, b, c = b"a", b"ab", b"abc"
    known = {1: {a}, 2: {a, b}, 3: {c}}
    assert choose([a, b, c], known, {1: 0, 2: 2, 3: 0}, slack=2) == 2
    assert choose([a, b, c], known, {1: 0, 2: 3, 3: 0}, slack=2) == 1  # replica 2 is overloaded, 3 lacks block `a`
    assert choose([a], known, {1: 1, 2: 0, 3: 0}, slack=2) == 2
    assert choose([], known, {1: 2, 2: 1, 3: 0, 4: 3}, slack=9) == 3
    assert choose([c], {}, {4: 1, 5: 0}, slack=0) == 5
    assert choose([c], {9: {c}}, {4: 0}, slack=0) == 4  # replica 9 is gone and not chosen


def test_only_the_last_beginnings_are_kept() -> None:
    seen = OrderedDict[bytes, None]()
    remember(seen, [b"a", b"b"], most=2)
    remember(seen, [b"a", b"c"], most=2)
    assert seen.keys() == {b"a", b"c"}


@pytest.mark.parametrize(
    ("nodes", "replicas", "tp", "threads", "on_gpus", "share"),
    [
        ([(2, 0)], 2, 1, None, False, Resources(1, 0)),
        ([(2, 0)], 1, 1, None, False, Resources(2, 0)),
        ([(8, 0), (4, 0)], 3, 1, None, False, Resources(4, 0)),
        ([(8, 0), (4, 0)], 5, 1, 2, False, Resources(2, 0)),
        ([(64, 8), (64, 8)], 4, 4, None, True, Resources(32, 4)),
        ([(64, 8), (64, 0)], 2, 4, 64, True, "which has room for 1"),
        ([(2, 0)], 3, 1, None, False, "3 replicas of 1 CPU each do not fit the cluster, which has room for 2"),
        ([(2, 0), (2, 0)], 1, 1, 4, False, "--threads 4 exceeds the 2 CPUs"),
        ([(64, 4), (64, 4)], 1, 8, None, True, "ranks of a replica must be on one node"),
        ([], 1, 1, None, False, "do not fit"),
    ],
)
def test_replicas_are_placed_on_whole_nodes(
    nodes: list[tuple[int, int]], replicas: int, tp: int, threads: int | None, on_gpus: bool, share: Resources | str
) -> None:
    cluster = [Resources(*node) for node in nodes]
    if isinstance(share, Resources):
        assert place(cluster, replicas, tp, threads, on_gpus=on_gpus) == share
    else:
        with pytest.raises(MegakernelError, match=share):
            place(cluster, replicas, tp, threads, on_gpus=on_gpus)


def test_ray_may_be_missing(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "megakernel.serving.replicas.cluster", raising=False)
    monkeypatch.delattr(replicas, "cluster", raising=False)
    assert "--replicas needs Ray, and ray is missing: pip install" in cli.fails("serve", "--replicas", "2")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--ray-address", "nonsense"), "'nonsense' is neither HOST:PORT nor auto"),
        (("--ray-address", "/tmp/1:port"), "'/tmp/1:port' is neither HOST:PORT nor auto"),
        (("--routing", "round"), "'round' is not one of prefix, least-loaded"),
        (("--replicas", "0"), "'0' is not a whole number of 1 or more"),
    ],
)
def test_a_wrong_flag_is_one_line(flags: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["serve", "--replicas", "2", *flags])
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("token", "join", "mode"), [(True, True, "token"), (False, True, None), (True, False, None)])
def test_the_token_is_shown_to_a_cluster(
    token: bool, join: bool, mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"HOME": str(tmp_path)}
    if token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("t")
    monkeypatch.setattr(os, "environ", given)
    prepare(join=join)
    assert given.get("RAY_AUTH_MODE") == mode and given["RAY_USAGE_STATS_ENABLED"] == "0"


def test_an_address_where_nobody_listens(cli: Cli) -> None:
    assert "--ray-address needs --replicas" in cli.fails("serve", "--ray-address", "auto")
    asked = ("serve", "--replicas", "2", "--ray-address", "127.0.0.1:1")
    assert "no Ray cluster answers at 127.0.0.1:1: Connection refused" in cli.fails(*asked, "--port", "8399")
    assert "listen on the same port: give another --port" in cli.fails(*asked, "--port", "0")


def test_an_interrupt_that_ray_swallows_ends_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    def deploy(*_: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    undeploy = Mock()
    fakes = {"join": lambda *_: [Resources(4, 0)], "deploy": deploy, "address": str, "undeploy": undeploy}
    for name, fake in (fakes | {"leave": Mock()}).items():
        monkeypatch.setattr(cluster, name, fake)
    monkeypatch.setattr(placement, "prepare", Mock())
    before = signal.getsignal(signal.SIGTERM)
    assert main(["serve", "--replicas", "1", "--model", "random:smollm2-135m", "--port", "0"]) == 130
    undeploy.assert_called_once()
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("healthy", [True, False])
def test_a_server_that_cannot_answer_is_a_lost_replica(healthy: bool) -> None:
    """If a healthy server answers 503, the client gets this answer. If it is not healthy, the replica is lost."""
    from megakernel.serving.replicas.cluster import Replica

    async def ask(method: str, target: str, headers: Any, body: bytes, replay: Any = None) -> AsyncIterator[Any]:
        yield Head(200 if target == "/health" and healthy else 503, [], "kind")

    async def answer() -> list[Any]:
        replica = Replica.__new__(Replica)
        replica._server = Mock(ask=ask)
        return [part async for part in replica.answer("POST", "/v1/completions", [], b"", Replay(1, 1), [])]

    with contextlib.nullcontext() if healthy else pytest.raises(RuntimeError, match="/health"):
        assert [part.status for part in asyncio.run(answer())] == [503]


LIMITS = ("--threads", "1", *SMALL)


@dataclass
class Fleet:
    """A running server with two replicas on its own Ray cluster. All of its processes have `folder`, the cluster's
    temporary folder, in their environment."""

    process: subprocess.Popen[str]
    folder: str
    ray_address: str
    live: Live
    token: str
    model: str

    def servers(self) -> dict[int, Live]:
        """Return the process id of each replica's own server, with a client for the port on which it listens."""
        listening = {}
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                listening[f"socket:[{fields[9]}]"] = int(fields[1].partition(":")[2], 16)
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended
                ours = self.folder.encode() in (entry / "environ").read_bytes()
                if ours and b"--port\0000\0--config\0/dev/stdin" in (entry / "cmdline").read_bytes():
                    for descriptor in list((entry / "fd").iterdir()):
                        with contextlib.suppress(OSError):  # the file has been closed
                            if port := listening.get(str(descriptor.readlink())):
                                found[int(entry.name)] = at(f"http://127.0.0.1:{port}")
        return found

    def join(self, *flags: str) -> subprocess.CompletedProcess[str]:
        """Run another `megakernel serve` that deploys on the same cluster. Its environment has the cluster's token but
        not RAY_AUTH_MODE, which the command must then set itself."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= {"RAY_AUTH_TOKEN": self.token}
        arguments = command("serve", *flags, "--ray-address", self.ray_address, "--model", self.model, *LIMITS)
        return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=200)


@contextmanager
def two_replicas(model: str) -> Iterator[Fleet]:
    token = secrets.token_hex(16)
    short = {"prefix": "ray-", "dir": "/tmp"}  # paths of Unix sockets must be short
    with tempfile.TemporaryDirectory(**short, ignore_cleanup_errors=True) as folder:
        ray = {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        with mock.patch.dict(os.environ, ray), process("--replicas", "2", "--model", model) as (server, facts, live):
            assert (facts["replicas"], facts["threads"], facts["routing"]) == (2, 1, "prefix")
            yield Fleet(server, folder, facts["ray_address"], live, token, model)


def running(server: Live) -> float:
    return server.metric("vllm:num_requests_running")


def generated(server: Live) -> float:
    return server.metric("vllm:generation_tokens_total")


def some(**fields: Any) -> dict[str, Any]:
    return {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True, **fields}


def it_is_the_same_server(fleet: Fleet) -> None:
    answers = [fleet.live.post("/v1/completions", some(seed=1)) for _ in range(2)]
    assert answers[0]["choices"] == answers[1]["choices"]
    events = fleet.live.events("/v1/completions", some(return_token_ids=True))
    assert sum(len(event["choices"][0]["token_ids"]) for event in events) == 4
    assert "prompt must be" in fleet.live.post("/v1/completions", some(prompt=3), 400)["error"]["message"]
    assert "this server has" in fleet.live.post("/v1/nothing", {}, 404)["error"]["message"]
    status, headers, _ = fleet.live.request("GET", "/v1/models?x=1", headers={"X-Request-Id": "mine"})
    assert (status, headers["x-request-id"]) == (200, "mine")
    assert fleet.live.request("GET", "/v1/models", headers={"Host": "elsewhere.example"})[0] == 403
    assert "larger than" in fleet.live.post("/v1/completions", some(user="x" * (17 << 20)), 413)["error"]["message"]


def requests_are_shared_batched_and_cancelled(fleet: Fleet) -> None:
    streams = [begin_stream(fleet.live, 1900) for _ in range(4)]
    servers = fleet.servers().values()
    until(lambda: [*map(running, servers)] == [4, 4])  # each request has two choices
    for stream in streams:
        stream.close()
    idle_servers(fleet)


def a_prompt_goes_where_its_beginning_went(fleet: Fleet) -> None:
    for number in range(3):
        prompt = [100 + number] * 200
        for turn in range(3):
            details = fleet.live.post("/v1/completions", some(prompt=[*prompt, 7 + turn]))["usage"]
            assert (details["prompt_tokens_details"]["cached_tokens"] > 0) == (turn > 0)


def what_does_not_fit_is_refused_and_changes_nothing(fleet: Fleet) -> None:
    before = fleet.servers().keys()
    done = fleet.join("--replicas", "1", "--backend", "cuda", "--tp", "8")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert "ranks of a replica must be on one node" in done.stderr
    assert fleet.servers().keys() == before


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


PERSON = closed(name={"type": "string", "minLength": 60, "maxLength": 60})
CALL = {"tools": [{"type": "function", "function": {"name": "f", "parameters": PERSON}}]}
CALL |= {"tool_choice": "required", "parallel_tool_calls": False}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"seed": 5, "stop": ["zzz", "\ufffd" * 9]}),
    ("/v1/completions", {"temperature": 0, "logprobs": 1, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"return_token_ids": True, "logprobs": 0}),  # without a seed
    ("/v1/chat/completions", {"seed": 7, **CALL}),
    ("/v1/chat/completions", {"seed": 8, "n": 2, "structured_outputs": {"json": PERSON}}),
    ("/v1/chat/completions", {"seed": 9, "stream": False, **CALL}),
    ("/v1/responses", {"seed": 1}),
]

REQUESTS = 24


def varied(number: int) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of one of REQUESTS requests."""
    path, fields = KINDS[number % len(KINDS)]
    text = f"prompt {number} " * (1 + number % 5)
    given: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 150}
    if path == "/v1/completions":
        given = {"prompt": list(text.encode()), "max_tokens": 100, "ignore_eos": True}
    elif path == "/v1/responses":
        given = {"input": text, "max_output_tokens": 100}
    return path, {"stream": True, **given, **fields}


def without_names(data: bytes) -> list[bytes]:
    """Return the events of an answer, choice by choice, without the values that differ whenever a request is repeated.
    These values are the ids and the times of creation. Within one answer, each kind of value must be the same
    everywhere."""
    for name in (b"id", b"created", b"created_at", b"item_id"):
        pattern = rb'"%s":("[a-z]+-?_?[0-9a-f]{24}"|\d+)' % name
        found = set(re.findall(pattern, data))
        assert len({value.strip(b'0123456789abcdef"') for value in found}) == len(found), found
        data = re.sub(pattern, b"", data)
    return by_choice(data)


def ask_all(fleet: Fleet, numbers: Sequence[int]) -> list[Future[tuple[int, dict[str, str], bytes]]]:
    pool = ThreadPoolExecutor(len(numbers))
    asked = [pool.submit(fleet.live.request, "POST", *varied(number)) for number in numbers]
    pool.shutdown(wait=False)
    return asked


def idle_servers(fleet: Fleet) -> dict[int, Live]:
    """Wait until each replica has a server that computes nothing, and return both. Ray replaces what was killed."""
    found: dict[int, Live] = {}

    def both_are_idle() -> bool:
        found.clear()
        found.update(fleet.servers())
        return len(found) == 2 and not any(map(running, found.values()))

    until(both_are_idle, 100, pause=0.2)
    return found


def a_lost_replica_loses_nothing(fleet: Fleet, expected: list[bytes]) -> None:
    """Processes are killed while 24 requests are answered. Each answer must equal the answer that the same request gets
    when no process is killed. A request without a seed gets other tokens each time. Its tokens are therefore checked in
    another way: a server scores them as a prompt, and the log-probabilities must agree."""
    servers = idle_servers(fleet)
    before = {pid: generated(server) for pid, server in servers.items()}
    answers = ask_all(fleet, range(REQUESTS))
    until(lambda: all(generated(server) > before[pid] + 60 for pid, server in servers.items()))
    one, other = servers
    for pid in (parent(one), other):  # the Ray actor of one replica, and the server of the other
        os.kill(pid, signal.SIGKILL)
    for number, answer in enumerate(answers):
        status, _, data = answer.result()
        assert status == 200, data
        path, body = varied(number)
        if "seed" in body or "temperature" in body:
            assert without_names(data) == without_names(expected[number]), number
            continue
        *events, end, _ = data.split(b"\n\n")
        assert end == b"data: [DONE]"
        choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
        tokens = [token for choice in choices for token in choice["token_ids"]]
        scores = [score for choice in choices for score in choice["logprobs"]["token_logprobs"]]
        asked = {"prompt": body["prompt"] + tokens, "max_tokens": 0, "echo": True, "logprobs": 0}
        told = fleet.live.post(path, asked)["choices"][0]["logprobs"]["token_logprobs"]
        assert len(tokens) == 100 and scores == told[-100:]
    idle_servers(fleet)


def replicas_are_replaced_without_a_failed_request(fleet: Fleet) -> None:
    before, over, statuses = fleet.servers().keys(), threading.Event(), []

    def ask() -> None:
        while not over.is_set():
            statuses.append(fleet.live.request("POST", "/v1/completions", some(max_tokens=8))[0])

    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(ask) for _ in range(2)]
        done = fleet.join("--replicas", "2", "--port", str(fleet.live.port))
        over.set()
        for asker in asked:
            asker.result()
    assert done.returncode == 0, done.stderr
    assert len(fleet.servers()) == 2 and not fleet.servers().keys() & before
    assert set(statuses) == {200} and len(statuses) > 4


def the_end_leaves_nothing_behind(fleet: Fleet) -> None:
    stream = begin_stream(fleet.live, 60)
    fleet.process.terminate()
    text = rest(stream)
    assert text.count(b'"finish_reason":"length"') == 2 and b"data: [DONE]" in text
    assert fleet.process.wait(60) == 0
    until(lambda: not fleet.servers(), pause=0.2)


@pytest.mark.slow
def test_the_life_of_two_replicas(tmp_path: Path) -> None:
    """This is one test, because starting Ray takes longer than all of these checks."""
    byte_model(tmp_path, hidden_size=192, intermediate_size=512, num_hidden_layers=4)
    with two_replicas(str(tmp_path)) as fleet:
        it_is_the_same_server(fleet)
        requests_are_shared_batched_and_cancelled(fleet)
        a_prompt_goes_where_its_beginning_went(fleet)
        what_does_not_fit_is_refused_and_changes_nothing(fleet)
        expected = [asked.result()[2] for asked in ask_all(fleet, range(REQUESTS))]
        a_lost_replica_loses_nothing(fleet, expected)
        replicas_are_replaced_without_a_failed_request(fleet)
        the_end_leaves_nothing_behind(fleet)


CONFIGURATIONS = Path(__file__).parents[3] / "docs" / "replicas"


def test_what_kubernetes_starts_can_be_typed() -> None:
    parts = {part["kind"]: part for part in yaml.safe_load_all((CONFIGURATIONS / "kubernetes.yaml").read_text())}
    pod = parts["Deployment"]["spec"]["template"]
    [container] = pod["spec"]["containers"]
    given = vars(parser().parse_args(container["args"]))
    [port] = container["ports"]
    assert given["host"] == "0.0.0.0" and given["port"] == port["containerPort"]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pause + given["shutdown_timeout"] < pod["spec"]["terminationGracePeriodSeconds"]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert probes == [{"path": "/health", "port": port["name"]}] * 3
    for kind in ("Service", "PodDisruptionBudget"):
        selector = parts[kind]["spec"]["selector"]
        assert selector.get("matchLabels", selector) == pod["metadata"]["labels"]


@pytest.mark.skipif(not shutil.which("nginx"), reason="nginx is not installed")
def test_nginx_understands_its_configuration(tmp_path: Path) -> None:
    for_all = f"pid {tmp_path}/pid; error_log stderr;"
    nginx = ["nginx", "-t", "-p", str(tmp_path), "-c", str(CONFIGURATIONS / "nginx.conf"), "-g", for_all]
    done = subprocess.run(nginx, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
