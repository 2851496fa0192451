"""A server of several processes: if one process is killed or suspended, the others go on or end cleanly."""

import json
import os
import resource
import signal
import socket
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from threading import Event

import pytest
from api_support import Live, until
from serve_process import SLOW, asleep, at, begin_stream, children, process, rest, started, state

from megakernel.serving.engine.engine import Step

COMPLETIONS = "/v1/completions"
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
TWO = ("--api-server-count", "2")
BRIEF = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found in /proc")


def stream_of(frontend: int, other: int, live: Live) -> socket.socket:
    """Start a stream that `frontend` serves, because the process `other` is suspended when the request arrives."""
    with asleep(other):
        return begin_stream(live, 1200)


def to_end(stream: socket.socket) -> bytes:
    """Read a stream until its end mark, or until its connection is closed, and return what came."""
    text = b""
    while not text.endswith(END) and (piece := stream.recv(1 << 20)):
        text += piece
    return text


def at_rest(live: Live) -> bool:
    return not any(live.metric(f"vllm:{name}") for name in ("num_requests", "kv_cache_usage_perc"))


@pytest.mark.slow
def test_the_death_of_a_frontend_ends_only_its_own_streams(model: str) -> None:
    with process("--model", model, *TWO, first=SLOW) as (server, _, live):
        first, second = children(server.pid)
        live.post(COMPLETIONS, BRIEF)
        with stream_of(first, second, live) as lost, stream_of(second, first, live) as kept:
            with asleep(server.pid):  # so that neither stream can finish
                os.kill(first, signal.SIGKILL)
                assert b"[DONE]" not in rest(lost)
            assert to_end(kept).endswith(END)
        until(lambda: len(children(server.pid)) == 2)
        assert first not in children(server.pid)
        with asleep(second):  # so that the new frontend must answer
            live.post(COMPLETIONS, BRIEF)
            until(lambda: at_rest(live))
            # The engine stopped the two choices of the killed frontend's stream before they had 1200 tokens each.
            assert live.metric("megakernel:token_rows_total") < 3.6 * 1200
            # The metrics still include what the killed frontend counted. In total these are two requests of 3 tokens,
            # the two choices of the kept stream with 1200 tokens each, and part of the lost stream.
            assert live.metric("vllm:request_success_total") == 4
            assert live.metric("vllm:generation_tokens_total") >= 3 + 2 * 1200 + 3
        server.terminate()
        _, err = server.communicate(timeout=30)
        assert server.returncode == 0
        assert "a frontend process ended with status -9; starting another one" in err


@pytest.mark.slow
def test_a_frontend_without_free_descriptors_answers_when_it_has_some(model: str) -> None:
    def answered() -> bool:
        try:
            live.post(COMPLETIONS, BRIEF)
        except ConnectionError:
            return False  # the frontend had not yet seen that the others are closed: it closes what it cannot hold
        return True

    with process("--model", model) as (server, _, live):
        [frontend] = children(server.pid)
        most = len(list(Path(f"/proc/{frontend}/fd").iterdir())) + 4
        resource.prlimit(frontend, resource.RLIMIT_NOFILE, (most, most))
        with ExitStack() as crowd:
            for _ in range(20):
                crowd.enter_context(socket.create_connection(("127.0.0.1", live.port), timeout=30))
        until(answered)
        assert children(server.pid) == [frontend]


@pytest.mark.slow
def test_a_frontend_that_sleeps_holds_nobody_up(model: str) -> None:
    with process("--model", model, *TWO, first=SLOW) as (server, _, live):
        first, second = children(server.pid)
        with stream_of(first, second, live) as late:
            with asleep(first):
                for _ in range(3):
                    live.post(COMPLETIONS, BRIEF)
                until(lambda: at_rest(live))  # the engine is done, and the tokens wait for `first`
            text = to_end(late)
            assert text.endswith(END)
            assert text.count(b"data: {") < 2 * 1200  # late tokens come several per event
        until(lambda: live.metric("vllm:generation_tokens_total") == 3 * 3 + 2 * 1200)


@pytest.mark.slow
def test_a_dead_engine_is_told_to_everybody(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with process("--model", model, *TWO, first=SLOW) as (server, _, live):
        first, second = children(server.pid)
        with stream_of(first, second, live) as one, stream_of(second, first, live) as two:
            os.kill(server.pid, signal.SIGKILL)
            for stream in (one, two):
                text = rest(stream)
                assert b'"code":503' in text and b"the engine's process has ended: restart the server" in text
        assert server.wait(timeout=30) == -signal.SIGKILL
        until(lambda: state(first) in "XZ" and state(second) in "XZ")
        with pytest.raises(OSError):
            live.request("GET", "/health")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_engine_that_fails_ends_the_server(model: str) -> None:
    patch = """
from megakernel.serving.engine.engine import Engine
step, left = Engine.step, list(range(20))
def fail(self, **options):
    left.pop()
    return step(self, **options)
Engine.step = fail
"""
    with started("--json", "--model", model, *TWO, first=patch) as server:
        assert server.stdout is not None
        facts = json.loads(server.stdout.readline())
        with begin_stream(at(facts["url"]), 1200) as stream:
            text = rest(stream)
        assert b'"code":503' in text and b"the engine has stopped, restart the server" in text
        _, err = server.communicate(timeout=30)
        assert server.returncode == 1
        assert "IndexError" in err and err.endswith("error: the engine has stopped: the reason is in the log above\n")


@pytest.mark.slow
def test_a_frontend_that_cannot_start_ends_the_server(model: str, tmp_path: Path) -> None:
    patch = f"""
import megakernel.serving.server.loop as loop
made = loop.Description
loop.Description = lambda **given: made(**(given | {{"source": {str(tmp_path / "none")!r}}}))
"""
    with started("--json", "--model", model, first=patch) as server:
        out, err = server.communicate(timeout=60)
    assert server.returncode == 1 and out == ""
    said, last = err.splitlines()
    assert said.startswith("megakernel: error: ") and "none" in said
    assert last.startswith("megakernel: error: a frontend process ended with status 1 before it accepted connections")


def test_a_late_frontend_sends_several_tokens_in_an_event(null: Live) -> None:
    steps, go_on = count(), Event()

    def hold_up(step: Step, seconds: float) -> None:
        """Block the frontend's event loop in the middle of the answer until the engine has done ten more steps."""
        assert null.service.engine._loop is not None
        if (number := next(steps)) == 50:
            null.service.engine._loop.call_soon_threadsafe(go_on.wait, 60)
        elif number == 60:
            go_on.set()

    null.host.on_step.append(hold_up)
    body = {"prompt": [5], "max_tokens": 200, "ignore_eos": True, "return_token_ids": True}
    events = [event["choices"][0]["token_ids"] for event in null.events(COMPLETIONS, body)]
    assert sum(map(len, events)) == 200 and len(events) < 200
