"""Tests the timeline page in a real browser, opened from a file: what it shows and how it reacts to input."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
from api_support import until
from browser import Browser

from megakernel import machine
from megakernel.isa import Dtype, Forward
from megakernel.model import load_config
from megakernel.runtime import even_step
from megakernel.scheduler import Spec, compile_program
from megakernel.scheduler.simulate import simulate
from megakernel.timeline import compare, resolve, summarise, write_html
from megakernel.timeline.resolve import WAIT, Resolved
from megakernel.timeline.resources import RESOURCES, curves
from megakernel.trace import IntervalKind

ENTER, ESCAPE = "\ue007", "\ue00c"
# The traces have 3 workers per rank, and this machine gives 3 workers the peak rates of a whole H100.
LIMITS = replace(machine.load("h100"), workers=3)


@pytest.fixture(scope="module")
def stalled() -> Resolved:
    return resolve(*synthetic.stalled())


@pytest.fixture(scope="module")
def gpus() -> Resolved:
    """Return a step of two GPUs, whose trace names the roles of warps (loaders, consumers and so on)."""
    return resolve(*synthetic.node(2, 3, clock_error_s=2e-6))


@pytest.fixture(scope="module")
def limited(gpus: Resolved) -> Resolved:
    return resolve(gpus.program, gpus.trace, LIMITS)


@pytest.fixture(scope="module")
def files(
    stalled: Resolved, gpus: Resolved, limited: Resolved, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Return the paths of timeline pages by name. They show a step with a stalled instruction ("page"), the GPUs of a
    node with their roles ("node"), this node with peak rates ("limits"), and this node compared with a slower one
    ("pair")."""
    slower = resolve(*synthetic.renumbered(*synthetic.node(2, 3, slow=2.0)))
    folder = tmp_path_factory.mktemp("pages")
    made = {"page": [stalled], "node": [gpus], "limits": [limited], "pair": [gpus, slower]}
    for name, steps in made.items():
        comparison = compare(*steps) if len(steps) == 2 else None
        write_html(folder / f"{name}.html", *((step, summarise(step)) for step in steps), comparison=comparison)
    return {name: folder / f"{name}.html" for name in made}


def _opened(name: str) -> Any:
    @pytest.fixture(name=name)
    def fixture(driver: Browser, files: dict[str, Path]) -> Browser:
        driver.open_timeline(files[name])
        return driver

    return fixture


page, node, pair, limits = map(_opened, ("page", "node", "pair", "limits"))


def _text(page: Browser, element: str) -> str:
    return str(page.run("return document.getElementById(arguments[0]).innerText", element))


def _range(page: Browser) -> tuple[float, float]:
    begin, end = page.run("return timeline.visibleRange()")
    return begin, end


def _describe(page: Browser, interval: int | None = None) -> Any:
    """Return the page's description of an interval, by default of the selected one."""
    return page.run("return timeline.describe(arguments[0] ?? timeline.selected())", interval)


def _complaints(page: Browser) -> list[str]:
    """Return the page's console messages, without warnings about reading pixels, which only the tests do."""
    return [line for line in page.log() if "getImageData" not in line]


def test_page_shows_every_interval(page: Browser, stalled: Resolved) -> None:
    r = stalled
    assert page.run("return [timeline.laneCount, timeline.intervalCount]") == [r.lanes, len(r)]
    names, cause = r.causes.names, r.cause
    assert "embed" in {names[n] for n in cause if n >= 0}
    shown = page.run("return Array.from({length: timeline.intervalCount}, (_, i) => timeline.describe(i))")
    for i, d in enumerate(shown):
        assert d["name"] == r.phase(i).name and d["lane"] == r.lane[i] and d["releaser"] == r.releaser[i]
        assert d["begin_s"] == pytest.approx(r.begin[i] * 1e-9)
        assert d["duration_s"] == pytest.approx((r.end[i] - r.begin[i]) * 1e-9)
        assert d["operands"] == r.operands(i) and d["cause"] == (names[cause[i]] if cause[i] >= 0 else "")
    worst = max(shown, key=lambda d: d["duration_s"] if d["kind"] == "compute" else 0)
    assert worst["duration_s"] > 5e-3 and worst["layer"] == "epilogue"
    assert _complaints(page) == []


def test_wheel_zooms_at_the_pointer_and_keys_move(page: Browser) -> None:
    page.keys("f")
    begin, end = _range(page)
    page.wheel(500, 300, -400)
    after = _range(page)
    assert begin < after[0] < after[1] < end
    page.keys("d")
    moved = _range(page)
    assert moved[0] > after[0] and moved[1] - moved[0] == pytest.approx(after[1] - after[0])
    page.drag((700, 400), (800, 400))
    dragged = _range(page)
    assert dragged[0] < moved[0]
    page.keys("s")
    assert np.ptp(_range(page)) > np.ptp(dragged)
    page.keys("0")
    assert _range(page) == pytest.approx((begin, end))


def _a_wait(page: Browser) -> tuple[int, dict[str, float]]:
    """Find a long wait that is completely visible. Returns the wait's interval number and its rectangle on the page."""
    page.keys("f")
    wait = page.run(
        "for (let i = 0; i < timeline.intervalCount; i++) { const d = timeline.describe(i);"
        " if (d.kind === 'counter wait' && d.duration_s > 1e-3 && d.releaser >= 0) return i; }"
    )
    return wait, page.run("return timeline.locate(arguments[0])", wait)


def test_a_click_selects_and_explains_a_wait(page: Browser) -> None:
    wait, at = _a_wait(page)
    page.click(at["x"], at["y"])
    assert page.run("return timeline.selected()") == wait
    described, text = _describe(page), _text(page, "details")
    assert described["name"] in text and described["cause"] in text and "released by" in text
    for operand, value in described["operands"].items():
        assert f"{operand}\t{value}" in text
    page.keys("r")
    assert page.run("return timeline.selected()") == described["releaser"]
    assert "Released" in page.run("return document.getElementById('details').textContent")


def test_waits_are_drawn_and_the_legend_hides_families(page: Browser) -> None:
    _, wait = _a_wait(page)
    page.run("timeline.select(-1); timeline.frameMs()")
    colours = (
        "const c = document.getElementById('canvas'), r = c.getBoundingClientRect(), seen = {};"
        "const d = c.getContext('2d').getImageData(arguments[0] - r.left - 20, arguments[1] - r.top - 30, 40, 8).data;"
        "for (let i = 0; i < d.length; i += 4) { const c = d.slice(i, i + 3).join(); seen[c] = (seen[c] ?? 0) + 1; }"
        "return Object.values(seen);"
    )
    shown = page.run(colours, wait["x"], wait["y"])
    assert max(shown) < 0.95 * sum(shown)  # hatched
    toggle = "document.querySelector('[data-toggle=wait]').click(); timeline.frameMs();"
    page.run(toggle)
    hidden = page.run(colours, wait["x"], wait["y"])
    assert max(hidden) >= 0.95 * sum(hidden)  # the lane is empty, except perhaps for a grid line
    page.run(toggle)
    assert page.run(colours, wait["x"], wait["y"]) == shown


def test_search_finds_by_name_operand_and_layer(page: Browser) -> None:
    count = page.run("return ['qkv_rope', 'qkv_rope col=32', 'qkv_rope col=32 layer=1', 'col=31'].map(timeline.find)")
    assert count == [24, 6, 2, 0]
    page.keys("/lm_head")
    until(lambda: _text(page, "matches") == "8")
    page.keys(ENTER)
    first = _describe(page)
    assert first["name"] == "lm_head"
    page.keys("n")  # the key now controls the timeline and is not typed into the field
    second = page.run("return timeline.selected()")
    assert _describe(page)["begin_s"] >= first["begin_s"] and second != first["interval"]
    page.keys("N")
    assert _describe(page) == first
    page.keys(ESCAPE)
    assert page.run("return timeline.selected()") == -1


def test_a_click_on_a_bar_goes_to_its_worst_place_and_the_next_to_another(limits: Browser, limited: Resolved) -> None:
    """Each click on a bar of the waterfall selects another interval to which the bar refers, the worst one first. After
    that, the key p selects the next of these intervals and P the previous one."""
    node, bars = limits, summarise(limited).waterfall.bars
    shown = node.run("return [...document.querySelectorAll('.waterfall [data-walk]')].map((b) => b.innerText)")
    for n, text in enumerate(shown[:-1]):
        bar = next(b for b in bars if b.name in text)
        go = "document.querySelectorAll('.waterfall [data-walk]')[arguments[0]].click();"
        for place in [*bar.places, bar.places[0]]:
            node.run(go, n)
            assert node.run("return timeline.selected()") == place.interval
            begin, end = _range(node)
            assert begin <= place.begin_s <= place.end_s <= end
        node.keys("p")
        assert node.run("return timeline.selected()") == bar.places[1 % len(bar.places)].interval
        node.keys("P")
        assert node.run("return timeline.selected()") == bar.places[0].interval
    assert len(shown) > 2 and f"of {len(bar.places)}:" in _text(node, "details")


def test_an_instruction_stands_beside_those_of_its_phase(page: Browser, stalled: Resolved) -> None:
    """The details of an instruction compare it with others of its phase, and have a link to the one that stalled."""
    r, length = stalled, stalled.length
    worst = int(np.argmax(np.where(r.kind(IntervalKind.COMPUTE), length, 0)))
    same = np.flatnonzero(r.kind(IntervalKind.COMPUTE) & (r.number == r.number[worst]))
    page.run("timeline.select(arguments[0])", int(same[same != worst][0]))
    assert f"{len(same)} OF THIS PHASE" in _text(page, "details") and "1 above 8 ×" in _text(page, "details")
    page.run("document.querySelector('#details .link[data-walk]').click()")
    assert page.run("return timeline.selected()") == worst
    ratio = length[worst] / np.sort(length[same])[len(same) // 2]
    assert f"this one × {float(f'{ratio:.3g}'):g}" in _text(page, "details")


def test_a_link_keeps_the_view(page: Browser) -> None:
    page.run("timeline.select(7); timeline.show(1e-3, 3e-3)")
    until(lambda: bool(page.run("return location.hash.endsWith('-7')")))
    address, shown = page.run("return location.href"), _range(page)
    page.visit("about:blank", "true")
    page.visit(address, "window.timeline")
    assert _range(page) == pytest.approx(shown, abs=2e-9) and page.run("return timeline.selected()") == 7


def test_keys_alone_select_open_and_measure(node: Browser) -> None:
    """With the pointer away from the canvas, keys open the row at the cursor and select the first visible interval."""
    node.move(1550, 500)
    node.keys("k")
    before = [r["type"] for r in node.run("return timeline.rows()")]
    node.keys("e")
    assert [r["type"] for r in node.run("return timeline.rows()")] == ["rank", *before[4:]]
    node.keys("ej.")
    chosen = _describe(node)
    assert chosen["lane"] == 0 and chosen["kind"] in ("compute", "store")
    node.keys("mm")
    begin, end = node.run("return timeline.measured()")
    assert begin == pytest.approx(chosen["begin_s"]) and end - begin == pytest.approx(chosen["duration_s"])
    node.keys(ESCAPE)


BOX = (
    "const r = arguments[0].getBoundingClientRect();"
    " return [r.left, r.right, r.top, r.bottom, innerWidth, innerHeight, document.documentElement.scrollWidth]"
)


@pytest.mark.parametrize("name", ["node", "pair", "limits"])
def test_a_small_screen_shows_everything(driver: Browser, files: dict[str, Path], name: str) -> None:
    """At a width of 390 pixels, all buttons and numbers are inside the page, and nothing needs horizontal scrolling."""
    small = driver
    small.resize(390, 844)
    small.open_timeline(files[name])
    header = small.run("return [...document.querySelectorAll('header > *, #canvas, aside')].map((e) => e.id)")
    for n, element in enumerate(header):
        find = f"const all = document.querySelectorAll('header > *, #canvas, aside'); arguments[0] = all[{n}];"
        left, right, top, bottom, wide, tall, page = small.run(find + BOX, None)
        assert (wide, tall, page) == (390, 844, 390)
        assert 0 <= left < right <= wide and 0 <= top < bottom <= tall and bottom - top > 10, element
    numbers = small.run(
        "return [...document.querySelectorAll('.numbers b, .bars .value')].map((e) => { e.scrollIntoView();"
        " const r = e.getBoundingClientRect(); return [e.innerText, r.left, r.right, r.width]; })"
    )
    assert len(numbers) > 20
    for text, left, right, width in numbers:
        assert text and 0 <= left < right <= 390 and width > 5, text
    assert small.run("const a = document.querySelector('aside'); return a.scrollWidth <= a.clientWidth")


def test_no_label_of_a_row_is_cut_at_the_top(driver: Browser, tmp_path: Path) -> None:
    """Rows of many workers are lower than letters."""
    r = resolve(*synthetic.node(1, 60, layers=1))
    write_html(tmp_path / "many.html", (r, summarise(r)))
    for width, height in ((1600, 900), (390, 844)):
        driver.resize(width, height)
        driver.open_timeline(tmp_path / "many.html")
        texts = driver.run(
            "const texts = [], own = CanvasRenderingContext2D.prototype;"
            " const drawn = own.fillText; own.fillText = (...said) => { texts.push(said); };"
            " timeline.frameMs(); own.fillText = drawn; return texts"
        )
        top = driver.run("return timeline.rows()")[0]["y"]
        labels = [(text, y) for text, _, y in texts if text.startswith("worker")]
        assert labels[0][0] == "worker 0" and min(y for _, y in labels) >= top + 6


def test_the_header_of_a_rank_stays_while_its_workers_scroll(node: Browser) -> None:
    node.keys("E]]]]]]")
    rows = node.run("return timeline.rows()")
    second = next(r for r in rows[1:] if r["type"] == "rank")
    assert second["y"] > 500
    top, inside = rows[0]["y"], (second["y"] - rows[0]["y"]) / 2
    node.run("timeline.scroll(arguments[0])", inside)
    shown = node.run("timeline.frameMs(); return timeline.rows()")
    assert shown[0]["y"] == top and shown[1]["y"] == pytest.approx(rows[1]["y"] - inside, abs=1)
    node.run("timeline.scroll(arguments[0])", second["y"] - top - rows[0]["height"] / 2)  # rank 1 pushes it out
    shown = {r["text"]: r for r in node.run("timeline.frameMs(); return timeline.rows()") if r["type"] == "rank"}
    assert shown["rank 0"]["y"] == pytest.approx(top - rows[0]["height"] / 2, abs=1)
    assert shown["rank 1"]["y"] == pytest.approx(top + rows[0]["height"] / 2, abs=1)
    node.run("timeline.scroll(arguments[0])", second["y"] - top + 2 * rows[1]["height"])
    canvas = node.run("return document.getElementById('canvas').getBoundingClientRect().top")
    node.click(40, canvas + top + 5)  # a click on the header at the top closes rank 1
    assert [r["type"] for r in node.run("return timeline.rows()")][-1] == "rank"


def test_layers_unfold_and_lead_to_their_time(page: Browser, stalled: Resolved) -> None:
    r, compute = stalled, stalled.kind(IntervalKind.COMPUTE)
    for layer in range(3):
        here = compute & (r.segment == 1) & (r.rows["layer"] == layer)
        expected = r.begin[here].min() * 1e-9, r.end[here].max() * 1e-9
        assert page.run("return timeline.block(arguments[0], '')", f"layer {layer}") == pytest.approx(expected)
        mine = here & (r.number == r.program.forward.by_name["attention"].number)
        expected = r.begin[mine].min() * 1e-9, r.end[mine].max() * 1e-9
        assert page.run("return timeline.block(arguments[0], 'attention')", f"layer {layer}") == pytest.approx(expected)
    top = page.run("return timeline.rows()[0].y")
    page.keys("y")
    assert page.run("return timeline.rows()[0].y") > top + 60
    page.keys("y")
    assert page.run("return timeline.rows()[0].y") == top
    page.keys("iii")
    begin, end = page.run("return timeline.block('layer 1', '')")
    margin = (end - begin) / 20
    assert _range(page) == pytest.approx((begin - margin, end + margin), abs=3e-9)
    page.keys("u")
    begin, end = page.run("return timeline.block('layer 0', '')")
    assert _range(page)[0] == pytest.approx(begin - (end - begin) / 20, abs=3e-9)


def test_a_layer_begins_with_its_first_work(driver: Browser, tmp_path: Path) -> None:
    """A layer begins on the page when its first real work begins. Most of the 132 workers have no attention work and
    reach the layer earlier."""
    config, h100 = replace(load_config("random:smollm2-135m"), layers=4), machine.load("h100")
    program = compile_program(Spec(config, h100, tokens=1, logit_rows=1, max_seqs=1, max_context=128, dtype=Dtype.BF16))
    done = simulate(program, h100, even_step(program.dims, 1, 128), trace=True)
    assert done.trace is not None
    step, path = resolve(program, done.trace), tmp_path / "decode.html"
    write_html(path, (step, summarise(step)))
    driver.open_timeline(path)
    layers = [driver.run("return timeline.block(arguments[0], '')", f"layer {layer}") for layer in range(4)]
    for (begin, end), (after, _) in pairwise(layers):
        assert after > (begin + end) / 2


def test_keys_alone_reach_everything(limits: Browser) -> None:
    """Tab moves the focus to every button, link and field, and a ring marks it. Enter clicks the focused element."""
    limits.run("timeline.select(arguments[0])", 5)
    which = "button, input, canvas[tabindex], a[href]"
    wanted = limits.run(
        f"window.all = [...document.querySelectorAll('{which}')].filter((e) => !e.closest('dialog:not([open])'));"
        " document.activeElement?.blur(); return window.all.map((e) => e.title || e.innerText || e.id)"
    )
    assert len(wanted) > 30
    reached: dict[int, str] = {}
    for _ in range(2 * len(wanted)):
        limits.keys("\ue004")
        at, ring = limits.run(
            "const e = document.activeElement;"
            " return [window.all.indexOf(e), e === document.body ? '' : getComputedStyle(e).outlineStyle]"
        )
        if at >= 0:
            reached.setdefault(at, ring)
        if len(reached) == len(wanted):
            break
    assert [wanted[n] for n in range(len(wanted)) if n not in reached] == []
    assert [wanted[n] for n, ring in reached.items() if ring in ("", "none")] == []
    limits.run("document.querySelector('.waterfall [data-walk]').focus()")
    limits.keys(ENTER)
    assert "of" in _text(limits, "details") and limits.run("return timeline.selected()") >= 0
    limits.keys("?")
    assert limits.run("return document.getElementById('guide').open")
    limits.keys(ESCAPE)
    assert not limits.run("return document.getElementById('guide').open")
    limits.keys("c")
    assert limits.run("return document.getElementById('path').getAttribute('aria-pressed')") == "true"
    limits.keys("c")


def test_hover_and_theme(page: Browser) -> None:
    _, at = _a_wait(page)
    page.move(at["x"], at["y"])
    assert "waits for" in _text(page, "tooltip")
    theme = "return document.documentElement.dataset.theme"
    before = page.run(theme)
    page.keys("t")
    assert {before, page.run(theme)} == {"light", "dark"}
    page.keys("t")
    assert _complaints(page) == []


def test_search_finds_what_touches_a_tile(page: Browser) -> None:
    count = page.run(
        "return ['writes=act', 'reads=act', 'buffer=act', 'act[40]', 'act[40,0:32] layer=1', 'act[0:64] gate',"
        " 'kind=counter', 'worker=2 qkv', 'q[64]'].map(timeline.find)"
    )
    # In each of 3 layers, 16 gate_up_silu tiles write ACT, 8 for each of 2 row blocks, and 8 down_proj tiles read it.
    # Each down_proj tile reads all columns of its rows.
    waits = page.run(
        "return Array.from({length: timeline.intervalCount}, (_, i) => timeline.describe(i))"
        ".filter((d) => d.kind === 'counter wait').length"
    )
    assert count == [48, 24, 72, 36, 5, 48, waits, 6, 0]


def test_measuring_snaps_to_edges_and_says_what_happened(page: Browser) -> None:
    wait, at = _a_wait(page)
    described = _describe(page, wait)
    left, right = at["x"] - at["width"] / 2, at["x"] + at["width"] / 2
    page.drag((left + 3, at["y"]), (right - 3, at["y"]), shift=True)
    begin, end = page.run("return timeline.measured()")
    assert begin == pytest.approx(described["begin_s"]) and end - begin == pytest.approx(described["duration_s"])
    assert "waiting" in _text(page, "measured") and "matrix" in _text(page, "measured")
    page.keys(ESCAPE)
    assert page.run("return timeline.measured()") is None
    page.move(left + 3, at["y"])
    page.keys("m")
    page.move(at["x"], at["y"])
    page.keys("m")
    begin, middle = page.run("return timeline.measured()")
    assert begin == pytest.approx(described["begin_s"]) and middle == pytest.approx((begin + end) / 2, rel=0.01)
    page.keys(ESCAPE)


def _pixels(page: Browser, colour: str) -> int:
    """Return the number of pixels of the canvas that have this colour of the style sheet."""
    return int(
        page.run(
            "timeline.frameMs();"
            "const want = getComputedStyle(document.documentElement).getPropertyValue(arguments[0]).trim();"
            "const rgb = [1, 3, 5].map((at) => parseInt(want.slice(at, at + 2), 16));"
            "const c = document.getElementById('canvas'), g = c.getContext('2d');"
            "const d = g.getImageData(0, 0, c.width, c.height).data;"
            "let n = 0; for (let i = 0; i < d.length; i += 4) if (rgb.every((v, k) => d[i + k] === v)) n++; return n;",
            colour,
        )
    )


def test_arrows_and_the_critical_path_are_drawn(page: Browser) -> None:
    page.keys("f")
    page.run("timeline.select(-1)")
    assert _pixels(page, "--accent") == 0
    page.keys("c")
    assert _pixels(page, "--accent") > 500
    page.keys("c")
    assert _pixels(page, "--accent") == 0
    page.run("timeline.select(arguments[0])", _a_wait(page)[0])
    assert _pixels(page, "--accent") > 50


def test_rows_open_from_ranks_to_workers_to_roles(node: Browser) -> None:
    rows = node.run("return timeline.rows()")
    assert [r["type"] for r in rows] == ["rank", *["worker"] * 3] * 2
    second = rows[4]
    node.click(30, 53 + second["y"] + second["height"] / 2)
    assert [r["type"] for r in node.run("return timeline.rows()")] == ["rank", *["worker"] * 3, "rank"]
    node.run("timeline.toggle('worker 1')")
    texts = [r["text"] for r in node.run("return timeline.rows()")]
    assert texts[2:7] == ["worker 1", "loader", "consumer", "storer", "input loader"]
    node.run("timeline.select(arguments[0])", node.run("return timeline.intervalCount") - 1)
    assert node.run("return timeline.rows()").pop()["type"] == "worker"  # selecting an interval opens its rank
    node.keys("E")
    assert all(r["open"] for r in node.run("return timeline.rows()") if r["type"] != "role")
    node.keys("E")
    assert [r["type"] for r in node.run("return timeline.rows()")] == ["rank", "rank"]
    assert _complaints(node) == []


def test_columns_hold_the_shares_of_a_ranks_time(node: Browser, gpus: Resolved) -> None:
    """The columns of a rank show shares of its workers' time: COMPUTE and STORE by phase, and waits without either."""
    r = gpus
    start, waiting = r.period // 3, 0
    names = {n: phase.name for n, phase in r.program.forward.by_number.items()} | {waiting: "waiting"}
    # A long range is drawn from bins, so its two ends are inexact. A short range is drawn from the intervals
    # themselves.
    for length, error in ((r.period // 6, 5e-3), (20_000, 1e-5), (300, 1e-5)):
        ticks = np.full((3, length), -1, dtype=np.int16)
        for kinds in (WAIT, (IntervalKind.STORE,), (IntervalKind.COMPUTE,)):
            for i in np.flatnonzero(r.kind(*kinds) & (r.lane < 3) & (r.end > start) & (r.begin < start + length)):
                here = slice(max(r.begin[i] - start, 0), r.end[i] - start)
                ticks[r.lane[i], here] = waiting if kinds is WAIT else r.number[i]
        expected = {name: (ticks == n).mean() for n, name in names.items()}
        shares = node.run("return timeline.shares('rank 0 0', ...arguments)", start * 1e-9, (start + length) * 1e-9)
        for n in set(expected) | set(shares):
            assert shares.get(n, 0) == pytest.approx(expected.get(n, 0), abs=error)
    workers = summarise(r).per_worker[:3]
    whole = node.run("return timeline.shares('rank 0 0', 0, arguments[0])", r.period * 1e-9)
    assert whole["waiting"] == pytest.approx(sum(w.wait for w in workers) / 3, abs=2e-3)


def test_curves_are_those_of_the_summary(node: Browser, gpus: Resolved) -> None:
    r, summary = gpus, summarise(gpus)
    assert node.run("return timeline.tracks()") == [r.name for r in summary.resources] == [n for n, _ in RESOURCES]
    half = curves(r, 2).mean(axis=0)[:, 1] / (r.period * 1e-9 / 2)
    for resource, expected in zip(summary.resources, half, strict=True):
        shown = node.run("return timeline.rate(0, ...arguments)", resource.name, r.period * 0.5e-9, r.period * 1e-9)
        assert shown == pytest.approx(expected / resource.peak, rel=0.02, abs=1e-4)
    node.move(700, 150)
    assert "per rank" in _text(node, "tooltip")
    before, top = _pixels(node, "--page"), node.run("return timeline.rows()[0].y")
    node.keys("g")
    assert node.run("return timeline.rows()[0].y") < top - 100 and before != _pixels(node, "--page")
    node.keys("g")


def test_clocks_of_ranks_have_an_uncertainty(node: Browser) -> None:
    assert "±2 µs" in _text(node, "headline")
    wait = node.run(
        "const rank = (d) => Math.floor(d.lane / 3);"
        "for (let i = 0; i < timeline.intervalCount; i++) { const d = timeline.describe(i);"
        " if (d.releaser >= 0 && rank(d) !== rank(timeline.describe(d.releaser))) return i; }"
    )
    node.run("timeline.select(arguments[0])", wait)
    assert "± 2 µs" in _text(node, "details")


_HOSTILE = ("<img src=x onerror=window.hit=1>", "@@DATA@@", "</script><script>window.hit=1</script>")
_HOSTILE += ("<!--<script>", "]]>")


def test_names_in_a_file_are_only_text(driver: Browser, tmp_path: Path, stalled: Resolved) -> None:
    """Programs in memory may have any names. None of them becomes markup, ends an element or is expanded, and the
    page's policy refuses every other script."""
    names = iter(_HOSTILE)
    forward = stalled.program.forward
    segments = [tuple(replace(p, name=next(names, p.name)) for p in segment) for segment in forward.segments]
    program = replace(stalled.program, forward=Forward(*segments), machine=_HOSTILE[2])
    header = replace(stalled.trace.header, program=program.hash, source=_HOSTILE[0])
    step = resolve(program, replace(stalled.trace, header=header))
    path = tmp_path / "hostile.html"
    write_html(path, (step, summarise(step)))
    driver.open_timeline(path)
    shown = _text(driver, "legend") + _text(driver, "summary") + _text(driver, "headline")
    used = [name for name in _HOSTILE if name in shown]
    assert _HOSTILE[0] in _text(driver, "headline") and len(used) >= 3 and "@@DATA@@" in shown
    every = "document.querySelectorAll('button, [title]')"
    driver.run(f"for (const row of {every}) row.dispatchEvent(new Event('mouseover'))")
    assert driver.run("return document.querySelectorAll('img').length") == 0 and driver.run("return window.hit") is None
    assert _complaints(driver) == []
    driver.run("const s = document.createElement('script'); s.textContent = 'window.hit = 1'; document.body.append(s)")
    driver.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.hit=1>')")
    until(lambda: sum("Content Security Policy" in line for line in driver.log()) > 0)
    assert driver.run("return window.hit") is None


def test_two_traces_one_below_the_other(pair: Browser) -> None:
    rows = pair.run("return timeline.rows()")
    assert [r["text"] for r in rows if r["type"] == "rank"] == ["A rank 0", "B rank 0", "A rank 1", "B rank 1"]
    table = pair.run("return document.querySelector('.comparison').innerText")
    assert "gate_up_silu" in table and "× 1.99" in table
    find = (
        "return Array.from({length: timeline.intervalCount}, (_, i) => [i, timeline.describe(i)])"
        ".filter(([, d]) => d.name === 'gate_up_silu' && d.kind === 'compute' && d.layer === 'layer 1').map(([i]) => i)"
    )
    mine = pair.run(find)[3]
    pair.run("timeline.select(arguments[0])", mine)
    one = _describe(pair)
    pair.keys("b")
    two = _describe(pair)
    assert two["operands"] == one["operands"] and two["lane"] == one["lane"] + 6 and two["twin"] == mine
    assert one["begin_s"] < two["begin_s"] and two["duration_s"] > 1.3 * one["duration_s"]
    rate = "return timeline.rate(1, 'matrix', ...arguments)"
    before = pair.run(rate, 0, 1e-3)
    pair.keys("l")  # align there
    by = two["begin_s"] - one["begin_s"]
    assert _describe(pair)["begin_s"] == pytest.approx(one["begin_s"])
    assert pair.run(rate, -by, 1e-3 - by) == pytest.approx(before)
    pair.keys(ESCAPE)
    pair.keys("l")
    assert _describe(pair, one["twin"])["begin_s"] == pytest.approx(two["begin_s"])
    assert _complaints(pair) == []
