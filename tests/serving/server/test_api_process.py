"""`megakernel serve` as a process: its first output, flags and configuration file, signals, and hostile clients."""

import json
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from api_support import serving
from commands import Cli
from serve_process import SLOW, SMALL, begin_stream, process, rest, started

from megakernel import LLM
from megakernel.cli import serve
from megakernel.serving.engine.programs import buckets
from megakernel.serving.server.frontend import Start


@pytest.mark.slow
def test_a_signal_lets_finish_what_has_begun(model: str) -> None:
    flags = ("--served-model-name", "one", "two", "--api-server-count", "2")
    with process("--model", model, *flags) as (server, facts, live):
        assert (facts["model"], facts["max_model_len"], facts["max_num_seqs"]) == ("one", 2048, 8)
        assert facts["kv_tokens"] >= 2048
        with begin_stream(live, 500) as sock:
            server.send_signal(signal.SIGTERM)
            assert rest(sock).rstrip().endswith(b"data: [DONE]\n\n\r\n0")
        _, err = server.communicate(timeout=30)
        assert server.returncode == 0
        assert err.count("\n") == 1 and "finishing the requests in progress; repeat the signal to end at once" in err


def test_what_does_not_finish_in_time_is_told(model: str) -> None:
    flags = ("--model", model, "--shutdown-timeout", "0.1")
    with process(*flags, first=SLOW) as (server, _, live), begin_stream(live, 2000) as sock:
        server.send_signal(signal.SIGINT)
        events = rest(sock).decode()
        assert '"code":503' in events and "the server is shutting down" in events
        assert server.wait(timeout=30) == 128 + signal.SIGINT


def test_what_a_person_sees(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(model, max_context=64, max_num_seqs=4, max_num_batched_tokens=32, threads=1) as llm, serving(llm) as live:
        serve._ready(False, live.url, llm.model, llm)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"{llm.model} is served at {live.url}/v1"
        assert "MB in f32" in lines[2] and "tokens in f32: " in lines[3] and "chat" in lines[4]
        done = subprocess.run(lines[5], shell=True, capture_output=True, text=True, timeout=60)
    if done.returncode != 127:  # 127: there is no curl
        assert json.loads(done.stdout)["choices"][0]["finish_reason"] in ("stop", "length")


def made_of(cli: Cli, *flags: str) -> tuple[LLM, Start]:
    """Return the model and the configuration of the frontends that `megakernel serve` makes of these flags."""
    server = "megakernel.serving.server"
    with mock.patch(f"{server}.loop.EngineLoop") as host, mock.patch(f"{server}.frontends.Frontends") as frontends:
        status, _, err = cli.run("serve", "--port", "0", "--backend", "null", "--threads", "1", *SMALL, *flags)
    assert status == 0, err
    return host.call_args.args[0], frontends.call_args.kwargs["start"]


def test_flags_before_file_before_env(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(f"model: {model}\nmax-model-len: 256\nserved-model-name: [a, b]\napi_key: file\n")
    monkeypatch.setenv("MEGAKERNEL_API_KEY", "environment")
    # Flags override the file, whether they come before --config (--max-model-len) or after it (--served-model-name).
    # No flag sets the API key, so the file's key overrides the environment's.
    llm, start = made_of(cli, "--config", str(config), "--served-model-name", "c")
    assert llm.engine.programs._cache.keys() >= {(size, 1) for size in buckets(16)}  # so the first request is fast
    assert (llm.engine.dims.bucket.max_context, start.names, start.access.keys) == (2048, ["c"], ("file",))
    assert made_of(cli, "--model", model)[1].access.keys == ("environment",)
    assert made_of(cli, "--model", model, "--max_grammar_bytes=9")[0].grammars._most_bytes == 9


def test_who_may_ask_is_set_by_flags(model: str, tmp_path: Path, cli: Cli) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("open-metrics: false\nallowed-hosts: [Proxy.example]\ncors-origin: https://chat.example\n")
    page = {"Origin": "https://chat.example", "Host": "proxy.example"}
    for flags, requests in (
        (
            ["--api-key", "k", "--open-metrics"],
            [("/metrics", "localhost", 200), ("/version", "localhost", 401), ("/version", "evil.example", 403)],
        ),
        (["--config", str(config)], [("/version", "localhost", 403), ("/version", "proxy.example", 200)]),
        (["--allowed-hosts", "*"], [("/version", "evil.example", 200)]),
    ):
        start = made_of(cli, "--model", model, *flags)[1]
        with LLM(model, backend="null", threads=1, max_num_seqs=1) as llm, serving(llm, access=start.access) as live:
            found = [live.request("GET", path, headers={"Host": host})[0] for path, host, _ in requests]
            assert found == [status for *_, status in requests], flags
            answered = live.request("GET", "/version", headers=page)[1]
            assert answered.get("access-control-allow-origin") == (page["Origin"] if "--config" in flags else None)


@pytest.mark.slow
def test_ways_to_listen_and_the_names_of_vllm(model: str, tmp_path: Path) -> None:
    path, template = tmp_path / "socket", tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    flags = (model, "--tensor-parallel-size", "1", "--uds", str(path), "--chat-template", str(template), "--seed", "7")
    texts = []
    for _ in range(2):
        with started("--json", *flags) as running:
            assert running.stdout is not None
            assert json.loads(running.stdout.readline())["url"] == f"unix:{path}"
            curl = ["curl", "-s", "--unix-socket", str(path), "-H", "Content-Type: application/json"]
            bodies = [("tokenize", {"messages": [{"role": "user", "content": "x"}]})]
            bodies += [("v1/completions", {"prompt": "x", "max_tokens": 4, "ignore_eos": True})] * 2
            said = []
            for where, body in bodies:
                answer = subprocess.check_output([*curl, f"http://localhost/{where}", "-d", json.dumps(body)])
                said.append(json.loads(answer))
            assert said[0]["count"] == len("[x]")
            texts.append([one["choices"][0]["text"] for one in said[1:]])
            running.terminate()
            assert running.wait(timeout=30) == 0
        assert not path.exists()
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]


@pytest.mark.slow
def test_https_under_a_path(model: str, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    line = f"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -keyout {key} -out {certificate}"
    subprocess.run(line.split(), check=True, capture_output=True)
    context = ssl.create_default_context(cafile=str(certificate))
    context.check_hostname = False
    files = ("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate), "--root-path", "llm/")
    more = ("--max-body-bytes", "100", "--log-level", "info", "--disable-log-requests")
    with process("--model", model, *files, *more) as (running, facts, live):
        assert facts["url"] == f"https://127.0.0.1:{live.port}"
        asked = (("GET /version", 0, 200), ("GET /llm/version", 0, 200), ("POST /llm/tokenize", 999, 413))
        for request, length, status in asked:
            with context.wrap_socket(socket.create_connection(("127.0.0.1", live.port))) as secure:
                head = f"{request} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
                secure.sendall(head.encode())
                assert secure.recv(100).startswith(b"HTTP/1.1 %d " % status)
        running.terminate()
        err = running.communicate(timeout=60)[1]
        assert "Warning" not in err and "POST" not in err


def test_wrong_ways_to_listen_are_one_line(cli: Cli, tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no key")
    with socket.socket(socket.AF_UNIX) as live, socket.create_server(("127.0.0.1", 0)) as taken:
        live.bind(str(tmp_path / "live"))
        live.listen()
        port = str(taken.getsockname()[1])
        for flags, why in (
            (("--port", port), f"cannot listen on 127.0.0.1 port {port}: Address already in use: choose"),
            (("--uds", str(tmp_path / "live")), "another server listens there"),
            (("--uds", str(broken)), "Address already in use"),
            (("--uds", str(tmp_path / "none" / "socket")), "No such file"),
            (("--uds", "x" * 200), "too long"),
            (("--ssl-keyfile", str(broken)), "--ssl-keyfile needs --ssl-certfile"),
            (("--ssl-certfile", str(broken)), "its private key, also in PEM and without a passphrase"),
            (("--ssl-certfile", "/dev/null"), "it is not a regular file"),
            (("--ssl-certfile", str(tmp_path / "none")), "No such file"),
            (("--chat-template", str(tmp_path / "none")), "cannot read the chat template"),
            (("--chat-template", "{% for %}"), "the chat template of --chat-template is broken"),
            (("--replicas", "2", "--uds", "x"), "--uds cannot be combined with --replicas"),
            (("--model", "a"), "two models are given, /nowhere and --model a"),
        ):
            assert why in cli.fails("serve", "/nowhere", *flags), flags


@pytest.mark.parametrize(
    "text, message",
    [
        ("prot: 1\n", "prot is not a flag of serve"),
        ("- port\n", "must contain flags and their values"),
        ("port: [\n", "is not YAML"),
        ("[" * 1500, "is not YAML"),
        ("port: " + "9" * 5000 + "\n", "is not YAML"),
        ("port: {a: 1}\n", "the value of port must be text, a number"),
        ("port: &a [x, x]\nhost: [*a, *a]\n", "the value of host must be text, a number"),
        ('ssl-certfile: "a\\0b"\n', r"the value of ssl-certfile has the character '\x00'"),
        ('uds: ["\\ud800"]\n', r"the value of uds has the character '\ud800'"),
        (None, "cannot read"),
    ],
)
def test_a_wrong_file_is_one_line(cli: Cli, tmp_path: Path, text: str | None, message: str) -> None:
    config = tmp_path / "serve.yaml"
    if text is not None:
        config.write_text(text)
    err = cli.fails("serve", "--config", str(config))
    assert message in err and str(config) in err and len(err) < 600


def test_a_wrong_variable_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, message in (
        ("MEGAKERNEL_API_KEY", " ", "an API key must not be empty"),
        ("MEGAKERNEL_LOG_LEVEL", "loud", "MEGAKERNEL_LOG_LEVEL=loud: 'loud' is not one of debug, info, warning, error"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert message in cli.fails("serve", "--port", "0", "--model", "/nowhere")


@pytest.mark.slow
def test_a_sample_of_hostile_requests() -> None:
    """300 hostile requests cause no 5xx, no traceback and no memory leak. benchmarks/results/hostile-http.json has the
    result for 10,000."""
    script = Path(__file__).parents[3] / "benchmarks" / "correctness" / "hostile_http.py"
    arguments = [sys.executable, str(script), "--count", "300", "--seed", "1", "--", "--threads", "1", *SMALL[:4]]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    answers = {status for statuses in result["answers"].values() for status in statuses}
    assert {"200", "400", "401", "404", "405", "413"} <= answers and result["health"]["asked"] > 0


@pytest.mark.slow
def test_mixed_traffic(model: str) -> None:
    """The server survives 2 seconds of benchmarks/correctness/soak.py. benchmarks/results/soak.json has the result of
    an hour."""
    script = Path(__file__).parents[3] / "benchmarks" / "correctness" / "soak.py"
    flags = ["--minutes", "0.03", "--rounds", "1", "--clients", "8", "--connections", "100"]
    serve = ["--model", model, "--backend", "null", "--max-model-len", "256", "--api-server-count", "2", *SMALL[:4]]
    arguments = [sys.executable, str(script), *flags, "--", *serve]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["answers"]["200"] > 0 and result["wrong"] == []
