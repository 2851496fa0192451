"""Takes the pictures of docs/timeline.md.

    megakernel timeline --model smollm2-135m --backend cpu -o cpu.html
    python benchmarks/pictures/timeline.py [--cpu cpu.html]

The script simulates two decode steps on a node of eight H100s: two layers of Llama-3.1-70B with 4,096 decode rows, once
with and once without pipelining across instructions. `--cpu` also takes a picture of a timeline that was recorded on
this machine's CPU, while nothing else ran.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megakernel import machine as machines
from megakernel.model import load_config
from megakernel.program import Program
from megakernel.runtime import even_step
from megakernel.scheduler.simulate import simulate
from megakernel.scheduler.simulate.costs import costs_of
from megakernel.timeline import compare, resolve, summarise, write_html
from megakernel.trace import Trace

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "calibration"))

from browser import Browser, browser
from predictions import CONTEXT, ON
from steps import compiled

TOKENS = 4096
DOCS = Path(__file__).parents[2] / "docs"
FIRST = "for (let i = 0; i < timeline.intervalCount; i++) { const d = timeline.describe(i); if (WHICH) return i; }"


def first(page: Browser, which: str) -> int:
    """Return the index of the first interval whose description `d` in the timeline satisfies the JavaScript `which`."""
    return int(page.run(FIRST.replace("WHICH", which)))


def take(page: Browser, name: str) -> None:
    page.run("timeline.frameMs()")
    page.screenshot(DOCS / f"timeline-{name}.png")
    print(f"docs/timeline-{name}.png: {page.run('return timeline.visibleRange()')}")


def around(page: Browser, i: int, width_s: float) -> None:
    """Select interval `i` and show `width_s` seconds around its end."""
    page.run("timeline.select(arguments[0])", i)
    d = page.run("return timeline.describe(arguments[0])", i)
    middle = d["begin_s"] + d["duration_s"]
    page.run("timeline.show(arguments[0], arguments[1])", middle - 0.55 * width_s, middle + 0.45 * width_s)


def node(page: Browser, step_s: float) -> None:
    ranks = page.run("return timeline.rows().length")  # one row per rank, because all ranks are still collapsed
    workers = int(page.run("return timeline.laneCount")) // ranks
    take(page, "node")
    remote = f"Math.floor(d.lane / {workers}) !== Math.floor(timeline.describe(d.releaser).lane / {workers})"
    wait = first(
        page,
        f"d.kind === 'counter wait' && d.releaser >= 0 && {remote} "
        f"&& d.duration_s > {step_s / 200} && d.begin_s > {step_s / 5} && d.layer !== 'epilogue'",
    )
    around(page, wait, step_s / 12)
    page.run("timeline.showRow(arguments[0])", wait)
    page.keys("]]]]")
    page.run("timeline.toggle('worker ' + timeline.describe(timeline.selected()).lane)")
    around(page, wait, step_s / 40)
    page.run("timeline.showRow(arguments[0])", wait)
    take(page, "roles")


def worst(page: Browser, _: float) -> None:
    """Take a picture of the timeline page after a click on the first bar under its heading WAITS, the largest wait."""
    page.run("[...document.querySelectorAll('h2')].find((h) => h.innerText === 'WAITS').nextSibling.firstChild.click()")
    page.keys("0")
    take(page, "decode")


def simulated(*, pipelined: bool) -> tuple[Program, Trace]:
    config, machine = replace(load_config("random:llama-3.1-70b"), layers=2), machines.load("h100")
    program = compiled(config, machine, TOKENS, context=CONTEXT, seqs=TOKENS, tp=8, options=ON)
    table = even_step(program.dims, TOKENS, CONTEXT)
    costs = costs_of(machine)
    done = simulate(program, machine, table, costs=costs if pipelined else costs.unpipelined(), trace=True)
    assert done.trace is not None
    return program, done.trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", type=Path, metavar="FILE.html")
    arguments = parser.parse_args()
    first, second = (resolve(*simulated(pipelined=pipelined)) for pipelined in (True, False))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.html"

        def shoot(shots: Callable[[Browser, float], None], path: Path = path) -> None:
            with browser(1500, 900) as page:
                page.open_timeline(path)
                shots(page, float(page.run("return timeline.visibleRange()[1]")))

        write_html(path, (first, summarise(first)))
        shoot(node)
        both = ((step, summarise(step)) for step in (first, second))
        write_html(path, *both, comparison=compare(first, second))
        shoot(lambda page, _: take(page, "compare"))
        if arguments.cpu:
            shoot(worst, arguments.cpu)


if __name__ == "__main__":
    main()
