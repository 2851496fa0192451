"""Measures how long the timeline page takes to draw a frame, in a headless browser.

    python benchmarks/speed/viewer.py -o benchmarks/results/viewer.json

The script makes a trace of two layers of a 70B-like model on eight ranks of 132 workers with four roles each, writes
its page and opens it from the disk. It measures four views: the page as it opens, the page with one rank open, with all
roles of all workers open, and with a search. For each view it shows the whole trace and then ever smaller parts, down
to a thousandth. It draws 25 frames per view and part, spread over the trace, and prints the time inside the page's draw
function, which excludes the browser's compositing. Panning is measured with all rows open, in frames per second. A
search is timed from the last key to the frame that shows the answer, including the pause in which the page waits for
another key. With --program and --trace, a saved program and its trace are used instead.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from megakernel.program import load_program
from megakernel.timeline import resolve, summarise, write_html
from megakernel.trace import Trace

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import synthetic
from browser import Browser, browser
from record import options, write

FRAMES = 25  # frames per view
PANNED = 180  # frames
SPANS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.001)  # fractions of the trace that are visible in a frame
SIZE = (1600, 1000)


def frames(page: Browser, span: float, total_s: float) -> list[float]:
    """Return the milliseconds of frames that each show the fraction `span` of the trace, from different start times."""
    return [
        float(
            page.run(
                "timeline.show(arguments[0], arguments[1]); return timeline.frameMs();",
                start := total_s * (1 - span) * n / (FRAMES - 1),
                start + total_s * span,
            )
        )
        for n in range(FRAMES)
    ]


PAN = """
window.done = null;
const [span, total, frames] = arguments, started = performance.now();
let n = 0;
const step = () => {
  if (n === frames) { window.done = (1000 * frames) / (performance.now() - started); return; }
  const from = (total * (1 - span) * n++) / frames;
  timeline.show(from, from + total * span);
  requestAnimationFrame(step);
};
requestAnimationFrame(step);
"""
SEARCH = """
window.done = null;
const box = document.getElementById("search"), shown = document.getElementById("matches");
box.value = arguments[0]; shown.textContent = "";
const started = performance.now();
box.dispatchEvent(new Event("input"));
const wait = () => {
  if (shown.textContent === "") setTimeout(wait, 1);
  else requestAnimationFrame(() => { window.done = performance.now() - started; });
};
wait();
"""


def timed(page: Browser, script: str, *arguments: object) -> float:
    """Run a script in the page, and return the value that it leaves in `window.done`."""
    page.run(script, *arguments)
    while (found := page.run("return window.done")) is None:
        time.sleep(0.1)
    return round(float(found), 1)


def look(page: Browser, what: str, total_s: float) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for span in SPANS:
        runs = frames(page, span, total_s)
        found.append(
            {
                "rows": what,
                "span": span,
                "median_ms": round(statistics.median(runs), 2),
                "worst_ms": round(max(runs), 2),
                "frames_ms": [round(r, 2) for r in runs],
            }
        )
        print(
            f"  {what:<28} {span:>6.1%} visible: median {found[-1]['median_ms']} ms, worst {found[-1]['worst_ms']} ms"
        )
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--program", type=Path)
    parser.add_argument("--trace", type=Path)
    arguments = parser.parse_args()
    if arguments.program:
        program, trace = load_program(arguments.program), Trace.load(arguments.trace)
    else:
        program, trace = synthetic.node()
    with tempfile.TemporaryDirectory() as folder, browser(*SIZE) as page:
        path = Path(folder) / "timeline.html"
        started = time.perf_counter()
        step = resolve(program, trace)
        write_html(path, (step, summarise(step)))
        written_s = time.perf_counter() - started
        size = path.stat().st_size
        started = time.perf_counter()
        page.open_timeline(path)
        opened_s = time.perf_counter() - started
        print(f"{len(trace.intervals):,} intervals, {size / 1e6:.1f} MB: written in {written_s:.1f} s, ", end="")
        print(f"open in {opened_s:.1f} s")
        total_s = float(page.run("return timeline.visibleRange()[1]"))
        first = page.run("return timeline.rows()[0].key")
        rows = look(page, "as it opens", total_s)
        if page.run("return timeline.rows()[0].type") == "rank":
            page.run("timeline.toggle(arguments[0])", first)
            rows += look(page, "a rank open", total_s)
        page.keys("EE")
        rows += look(page, "all open", total_s)
        pans = {str(span): timed(page, PAN, span, total_s, PANNED) for span in SPANS[1:]}
        searches = {text: timed(page, SEARCH, text) for text in ("gate_up_silu", "qkv layer=1 rank=1", "H[96]")}
        print(f"panning, frames per second by visible part: {pans}")
        print(f"a search, ms after the last key: {searches}")
        page.run("timeline.find('gate_up_silu')")
        rows += look(page, "all open, a search", total_s)
        worst = max(float(str(r["worst_ms"])) for r in rows)
        print(f"worst frame {worst} ms")
        figures = {
            "load_average": round(os.getloadavg()[0], 1),  # load of the last minute; this script itself adds about 1
            "intervals": len(trace.intervals),
            "page_bytes": size,
            "written_s": round(written_s, 2),
            "opened_s": round(opened_s, 2),
            "worst_ms": worst,
            "pan_frames_per_s": pans,
            "search_ms": searches,
            "rows": rows,
        }
        write(arguments.output, figures)


if __name__ == "__main__":
    main()
