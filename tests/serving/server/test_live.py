"""The sums over steps, the timeline of a step over HTTP, and the page of the chat."""

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from api_support import Live as Served
from api_support import serving, until
from browser import Browser
from engine_support import CONFIG, fake_engine
from model_helpers import byte_model

from megakernel import LLM, SamplingParams
from megakernel.model import RandomCheckpoint
from megakernel.roofline import Ceilings, bound, step_work
from megakernel.serving.engine.live import Totals
from megakernel.serving.server import loop
from megakernel.serving.server.limits import AccessRules

CEILINGS = Ceilings(read_bytes_per_s=1e9, flops=4e9, threads=2, how="made up")


def test_totals_sum_the_steps() -> None:
    engine, totals = fake_engine()[0], Totals(CEILINGS, tied=False)
    engine.add([1] * 20, SamplingParams(max_tokens=6))
    engine.add([2] * 3, SamplingParams(max_tokens=9))
    steps = [engine.step() for _ in range(5)]
    for step in steps:
        totals.add(step, 0.5)
    given = ((s.program, s.rows, (s.part.start + s.rows).tolist(), len(s.sequence)) for s in steps)
    works = [step_work(program.forward, program.dims.split, *more) for program, *more in given]  # type: ignore[arg-type]
    assert (totals.steps, totals.wall_s, totals.rows) == (5, 2.5, sum(sum(s.rows) for s in steps))
    assert totals.bound_s == pytest.approx(sum(bound(work, CEILINGS) for work in works))
    assert (totals.flops, totals.bytes) == (sum(w.flops for w in works), sum(w.bytes for w in works))
    assert totals.sequences == sum(len(s.rows) for s in steps)


@contextmanager
def tiny() -> Iterator[Served]:
    """Yield a server whose steps take at least 5 ms. The model's name contains an HTML tag, which pages must escape."""
    checkpoint = RandomCheckpoint("<b>tiny</b>", replace(CONFIG, max_context=4096))
    with LLM(checkpoint, backend="null", max_num_seqs=4) as llm, serving(llm) as server:
        server.host.on_step.append(lambda step, seconds: time.sleep(0.005))
        yield server


def test_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "TRACE_WAIT_S", 0.05)
    with tiny() as server:
        page = server.request("GET", "/chat")[2]
        assert page == server.request("GET", "/")[2]
        assert b"<title>megakernel: chat" in page and b"--panel: " in page
        status, _, text = server.request("GET", "/timeline")
        assert status == 404 and b"Send a request" in text


def test_those_who_wait_for_a_step_hold_one_thread() -> None:
    """While 40 clients wait for a timeline, the server still answers others, and one trace serves all 40."""
    gate = threading.Event()
    trace = Mock(side_effect=lambda: gate.wait(60) and None)
    with tiny() as server:
        server.host.timeline = trace
        waiting = [server.connect(b"GET /timeline HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(40)]
        try:
            until(lambda: len(server.host._looking) == 40)
            assert server.request("GET", "/metrics")[0] == 200
        finally:
            gate.set()
        for sock in waiting:
            assert sock.recv(100).startswith(b"HTTP/1.1 404 ")
            sock.close()
    assert trace.call_count == 1


def test_a_timeline_needs_no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """/timeline works even if no temporary file can be written, for example because the disk is full."""
    with tiny() as server:
        body = {"prompt": [1], "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with server.send("/v1/completions", body) as stream:
            assert stream.recv(100).startswith(b"HTTP/1.1 200 ")
            monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
            status, _, text = server.request("GET", "/timeline")
        assert status == 200 and text.startswith(b"<!") and b"megakernel" in text


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
        server.host.on_step.append(lambda step, seconds: time.sleep(0.03))
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
