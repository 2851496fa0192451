"""The live record of steps: its figures, its HTTP routes and its web page."""

import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from api_support import Live as Served
from api_support import serving, until
from browser import Browser
from engine_support import CONFIG, fake_engine
from model_helpers import byte_model

from megakernel import LLM, SamplingParams
from megakernel.model import RandomCheckpoint
from megakernel.roofline import Ceilings, bound, step_work
from megakernel.serving.engine.engine import Engine
from megakernel.serving.engine.live import Live, Totals
from megakernel.serving.engine.scheduler import Counts, Stats
from megakernel.serving.server import host
from megakernel.serving.server.limits import AccessRules

CEILINGS = Ceilings(read_bytes_per_s=1e9, flops=4e9, threads=2, how="made up")
STATS = Stats(
    running=2, waiting=3, pages=64, pages_used=7, preemptions=0, prefix_queries=0, prefix_hits=0, counts=Counts()
)
ABOUT = {"model": "<b>tiny</b>", "backend": "fake"}


def record() -> Live:
    return Live(CEILINGS, replace(STATS, running=0, waiting=0), tied=False, max_seqs=4, about=ABOUT)


def run(engine: Engine, live: Live, steps: int, wall_s: float = 0.5) -> list[Any]:
    made = [engine.step(trace=live.tracing) for _ in range(steps)]
    for step in made:
        live.add(step, wall_s, STATS)
    return made


def test_an_empty_record_is_json() -> None:
    empty = record().snapshot()
    assert empty["total"]["steps"] == 0 and empty["window"]["roofline_fraction"] is None
    assert empty["ttft_s"] == {"p50": None, "p90": None, "p99": None}
    json.dumps(empty, allow_nan=False)


def test_a_snapshot_sums_the_steps() -> None:
    engine, live = fake_engine()[0], record()
    engine.add([1] * 20, SamplingParams(max_tokens=6))
    engine.add([2] * 3, SamplingParams(max_tokens=9))
    steps = run(engine, live, 5)
    works = [step_work(s.program.forward, s.program.dims.split, s.rows, s.contexts, s.logit_rows) for s in steps]
    bounds = [bound(work, CEILINGS) for work in works]
    snapshot = live.snapshot()
    total = snapshot["total"]
    assert total["steps"] == 5 and total["wall_s"] == 2.5
    assert total["bound_s"] == pytest.approx(sum(bounds))
    assert total["roofline_fraction"] == pytest.approx(sum(bounds) / 2.5)
    assert total["tokens"] == sum(len(s.tokens) for s in steps) and total["rows"] == sum(sum(s.rows) for s in steps)
    assert total["read_bytes_per_s"] == pytest.approx(sum(w.bytes for w in works) / 2.5)
    assert total["flops_fraction"] == pytest.approx(sum(w.flops for w in works) / 2.5 / 4e9)
    assert snapshot["steps"]["bound_s"] == pytest.approx(bounds)
    assert snapshot["now"] == {"running": 2, "waiting": 3, "kv_pages_used": 7}
    assert sum(snapshot["window"]["limited_by"].values()) == pytest.approx(1)
    assert snapshot["steps"]["sequences"] == [len(s.rows) for s in steps]
    json.dumps(snapshot, allow_nan=False)


def test_what_cannot_be_is_an_error() -> None:
    engine, live = fake_engine()[0], record()
    engine.add([1] * 3, SamplingParams(max_tokens=40))
    run(engine, live, 1)
    assert live.snapshot()["error"] is None
    run(engine, live, 1, wall_s=1e-9)
    assert live.snapshot()["error"] is None  # the mean over both steps is still possible
    live = record()
    run(engine, live, 1, wall_s=1e-9)
    assert "is impossible" in live.snapshot()["error"] and "made up" in live.snapshot()["error"]


def test_the_window_is_of_recent_work() -> None:
    engine, live = fake_engine()[0], record()
    engine.add([1] * 3, SamplingParams(max_tokens=40))
    run(engine, live, 3, wall_s=100.0)
    run(engine, live, 30, wall_s=0.5)
    window = live.snapshot()["window"]
    assert window["step_s"] == 0.5 and live.totals().steps == 33


def test_latencies_are_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, live, clock = fake_engine()[0], record(), 100.0
    monkeypatch.setattr("megakernel.serving.engine.engine.perf_counter", lambda: clock)
    engine.add([1, 2], SamplingParams(max_tokens=3)).added_at = 99.0
    engine.add([1, 2], SamplingParams(max_tokens=1)).added_at = 97.0
    for clock in (100.0, 100.25, 101.0):  # noqa: B007
        run(engine, live, 1)
    snapshot = live.snapshot()
    assert snapshot["ttft_s"]["p50"] == pytest.approx(2.0)
    assert snapshot["itl_s"]["p50"] == pytest.approx(0.5) and snapshot["itl_s"]["p99"] < 0.75


@contextmanager
def tiny(backend: str) -> Iterator[Served]:
    """Yield a server whose steps take at least 5 ms. The model's name contains an HTML tag, which pages must escape."""
    checkpoint = RandomCheckpoint("<b>tiny</b>", replace(CONFIG, max_context=4096))
    with LLM(checkpoint, backend=backend, max_num_seqs=4) as llm, serving(llm) as server:
        server.host.loop.on_step.append(lambda step, seconds: time.sleep(0.005))
        yield server


def test_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "TRACE_WAIT_S", 0.05)
    with tiny("null") as server:
        assert json.loads(server.request("GET", "/roofline")[2])["total"]["steps"] == 0
        for path, title in (("/", b"live roofline"), ("/chat", b"chat")):
            page = server.request("GET", path)[2]
            assert b"<title>megakernel: " + title in page and b"--panel: #ffffff" in page and b"page.css" not in page
        status, _, text = server.request("GET", "/timeline")
        assert status == 404 and b"Send a request" in text


def test_those_who_wait_for_a_step_hold_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """While 40 clients wait for a timeline, the server still answers /roofline, and one trace serves all 40."""
    gate, asked = threading.Event(), threading.Semaphore(0)

    def trace(wait_s: float) -> None:
        asked.release()
        gate.wait(60)

    with tiny("null") as server:
        monkeypatch.setattr(server.host.live, "trace", trace)
        waiting = [server.connect(b"GET /timeline HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(40)]
        try:
            assert asked.acquire(timeout=60)
            assert server.request("GET", "/roofline")[0] == 200
        finally:
            gate.set()
        for sock in waiting:
            assert sock.recv(100).startswith(b"HTTP/1.1 404 ")
            sock.close()
        assert not asked.acquire(blocking=False)


def test_a_timeline_needs_no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """/timeline works even if no temporary file can be written, for example because the disk is full."""
    with tiny("null") as server:
        body = {"prompt": [1], "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with server.send("/v1/completions", body) as stream:
            assert stream.recv(100).startswith(b"HTTP/1.1 200 ")
            monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
            status, _, text = server.request("GET", "/timeline")
        assert status == 200 and text.startswith(b"<!") and b"megakernel" in text


@pytest.mark.slow
def test_page_without_work(driver: Browser) -> None:
    page = driver
    with tiny("null") as server:
        page.visit(server.url, "document.getElementById('about').textContent")
        assert "Nothing has run yet" in page.run("return document.body.innerText")
        assert "<b>tiny</b>" in page.run("return document.getElementById('about').textContent")
        assert page.log() == []


@pytest.mark.slow
def test_page_under_load_and_timeline(driver: Browser) -> None:
    page = driver
    endless = {"prompt": [1] * 9, "max_tokens": 4000, "ignore_eos": True}
    with tiny("cpu") as server, server.send("/v1/completions", endless):
        page.visit(server.url, "document.getElementById('fraction').textContent.includes('%')")
        first = page.run("return document.getElementById('allSteps').textContent")
        shown = page.run("return document.body.innerText")
        for text in ("GB/s", "GFLOP/s", "1 of 4, 0 waiting", " pages"):
            assert text in shown
        assert page.run(_CANVAS_COLOURS) >= 3  # colours of host time, memory or math time, and the scale
        until(lambda: page.run("return document.getElementById('allSteps').textContent") != first)
        assert page.log() == []
        page.visit(f"{server.url}/timeline", "document.getElementById('headline').textContent.includes('intervals')")
        assert page.log() == []
        assert not server.host.live.tracing


_CANVAS_COLOURS = """
const c = document.getElementById("chart"), s = new Set();
const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
for (let i = 0; i < d.length; i += 4) if (d[i + 3] === 255) s.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);
return s.size;
"""


@pytest.mark.slow
def test_chat_page(driver: Browser, tmp_path: Path) -> None:
    """The chat page reports a missing API key, shows an answer, and can stop it. It shows HTML in messages as text."""
    byte_model(tmp_path)
    page = driver
    page.resize(390, 800)
    talk = "return document.getElementById('talk').innerText"
    with (
        LLM(str(tmp_path), backend="cpu", max_num_seqs=4, max_context=2048) as llm,
        serving(llm, access=AccessRules(keys=("k",))) as server,
    ):
        server.host.loop.on_step.append(lambda step, seconds: time.sleep(0.03))
        page.visit(f"{server.url}/chat", "document.activeElement.id === 'message'")
        page.keys("<b>one</b>\ue007")
        until(lambda: "the API key is missing or wrong" in page.run(talk))
        assert page.run("return document.getElementById('message').value") == "<b>one</b>"
        page.run("document.getElementById('key').value = 'k'; document.getElementById('message').focus()")
        page.keys("\ue007")
        answer = "document.querySelector('[class=said]')?.textContent.length > 9"
        until(lambda: page.run(f"return {answer}"))
        page.run("document.getElementById('stop').click()")
        until(lambda: page.run("return document.querySelectorAll('.figures a').length") == 1)
        figures = page.run("return document.querySelector('.figures').textContent")
        assert "tokens/s" in figures and figures.endswith("stopped · timeline of a step of this answer")
        until(server.at_rest)
        assert page.run("return messages.map(m => m.role)") == ["user", "assistant"]
        assert page.run("return document.querySelectorAll('#talk b').length") == 0 and "<b>one</b>" in page.run(talk)
        assert page.run("return document.documentElement.scrollWidth") <= 390
        # The timeline opens as a page in memory. It has the content security policy of the chat page, which must
        # therefore allow the timeline's script.
        page.run("window.step = window.open(document.querySelector('.figures a').href)")
        until(lambda: page.run("return step.document.getElementById('headline')?.textContent.includes('intervals')"))
        page.run("step.close()")
        page.run("document.getElementById('clear').click()")
        assert page.run("return messages.length") == 0 and "Nothing" not in page.run(talk)
        assert all("401" in line for line in page.log())


def test_rates_are_of_time_and_steps_and_fractions_of_ceilings() -> None:
    totals = Totals(
        steps=4, wall_s=2.0, bound_s=0.5, flops=4e9, bytes=1e9, rows=20, tokens=10, sequences=12
    )  # CEILINGS allows 1e9 bytes/s and 4e9 FLOP/s
    assert totals.rates(CEILINGS) == {
        "roofline_fraction": 0.25,
        "step_s": 0.5,
        "tokens_per_s": 5.0,
        "rows_per_s": 10.0,
        "read_bytes_per_s": 5e8,
        "read_fraction": 0.5,
        "flops_per_s": 2e9,
        "flops_fraction": 0.5,
        "sequences": 3.0,
    }
    assert set(Totals().rates(CEILINGS).values()) == {None}
