"""Draws the pictures of docs/how-a-megakernel-works.md from programs that are compiled and simulated here.

python benchmarks/pictures/how_it_works.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from simulated_steps import Interval, Run, batch, decode
from svg import WIDTH, Picture

from megakernel.isa.record import Records, phase_number
from megakernel.program import Program
from megakernel.scheduler import Options
from megakernel.targets.pages import ROW_PAGES, matmul_pages
from megakernel.trace import IntervalKind

DOCS = Path(__file__).parents[2] / "docs"
WORKER = 5  # the SM that is drawn in detail
LAYER = 1  # the second of three simulated layers is drawn
COLOURS = {
    "attn_norm": "yellow",
    "next_norm": "yellow",
    "down_reduce": "yellow",
    "down_partial": "green",
    "qkv_rope": "blue",
    "attention": "red",
    "o_proj": "purple",
    "o_partial": "purple",
    "o_reduce": "red",
    "mlp_norm": "yellow",
    "gate_up_silu": "orange",
    "down_proj": "green",
}
LEFT, RIGHT = 150, WIDTH - 14  # the x range of a time axis
WAITS = IntervalKind.COUNTER_WAIT, IntervalKind.PAGE_WAIT


class Axis:
    """A time axis from `begin` to `end`, in microseconds, on a picture."""

    def __init__(self, out: Picture, begin: float, end: float) -> None:
        self.out, self.begin, self.end = out, begin, end

    def x(self, at: float) -> float:
        return LEFT + (min(max(at, self.begin), self.end) - self.begin) / (self.end - self.begin) * (RIGHT - LEFT)

    def lane(self, y: float, label: str, shown: Sequence[tuple[Interval, str]], height: float = 26) -> None:
        """Draw one row of intervals with their labels. Waits are hatched."""
        self.out.text(LEFT - 10, y + height / 2 + 4.5, label, anchor="end")
        self.out.line((LEFT, y + height + 2), (RIGHT, y + height + 2))
        for one, words in shown:
            if one.end > self.begin and one.begin < self.end:
                fill = "wait" if one.kind in WAITS else COLOURS[one.phase]
                width = self.x(one.end) - self.x(one.begin)
                self.out.rect(self.x(one.begin), y, width, height, fill, "" if fill == "wait" else words)

    def ticks(self, y: float, step: float) -> None:
        for at in np.arange(0, 0.97 * (self.end - self.begin), step).tolist():
            x = self.x(self.begin + at)
            self.out.line((x, y), (x, y + 5))
            self.out.text(x, y + 18, f"{at:g} µs", anchor="middle" if at else "start", quiet=True, size=12)


def labelled(shown: Sequence[Interval], names: dict[str, str], *kinds: IntervalKind) -> list[tuple[Interval, str]]:
    """Return the intervals of a trace that have one of `kinds`, each with the label that `names` has for its phase."""
    return [(one, names[one.phase]) for one in shown if one.kind in kinds]


def legend(out: Picture, y: float, entries: Sequence[tuple[str, str]]) -> None:
    x = 16.0
    for fill, words in entries:
        out.rect(x, y - 11, 16, 14, fill)
        out.text(x + 22, y + 1, words)
        x += 22 + 7 * len(words) + 22


def pipeline() -> Picture:
    program = decode(16)
    out = Picture(414, "From a model to a trace")

    def box(x: float, y: float, name: str, details: Sequence[str], fill: str = "box", width: float = 176) -> None:
        out.rect(x, y, width, 66, fill)
        lines = [(name, True), *((detail, False) for detail in details)]
        for i, (words, bold) in enumerate(lines):
            at = y + 38 - 9 * (len(lines) - 1) + 18 * i
            out.text(x + width / 2, at, words, anchor="middle", bold=bold, quiet=fill == "box" and not bold)

    columns = [16 + 207 * i for i in range(4)]
    out.text(16, 24, "Compile, ahead of time", bold=True)
    steps = [
        ("Model family", f"{len(program.forward.body)} phases per layer"),
        ("Tiles", f"{len(program.body.records)} per layer"),
        ("Dependencies", f"{program.counters} counters per layer"),
        ("Placement", f"{program.workers} streams"),
    ]
    for x, (name, detail) in zip(columns, steps, strict=True):
        box(x, 36, name, [detail])
        if x > columns[0]:
            out.line((x - 29, 69), (x - 3, 69), arrow=True)
    middle = WIDTH / 2
    out.line((columns[3] + 88, 104), (columns[3] + 88, 120), (middle, 120), (middle, 137), arrow=True)
    box(middle - 110, 140, "Program", [f"{program.instructions:,} instructions"], "blue", 220)

    users = [
        ("Verifier", ["proves the program,", "or shows the fault"]),
        ("CPU interpreter", ["a thread runs", "many streams"]),
        ("GPU interpreter", ["a thread block runs", "one stream"]),
        ("Simulator", ["virtual time,", "any machine"]),
    ]
    out.text(16, 212, "Check, run or simulate", bold=True)
    out.line((middle, 207), (middle, 224), strong=True)
    out.line((columns[0] + 88, 224), (columns[3] + 88, 224), strong=True)
    for x, (name, details) in zip(columns, users, strict=True):
        out.line((x + 88, 224), (x + 88, 241), arrow=True)
        box(x, 244, name, details)
    sides = (columns[1] + 88, 311), (columns[1] + 88, 325), (columns[3] + 88, 325), (columns[3] + 88, 311)
    out.line(*sides, strong=True)
    out.line((columns[2] + 88, 312), (columns[2] + 88, 337), arrow=True)
    box(columns[2], 340, "Trace", ["who did what, when"], "green")
    out.line((columns[2] + 178, 373), (columns[3] - 3, 373), arrow=True)
    box(columns[3], 340, "Timeline", ["and its distance", "from the roofline"])
    return out


def roles() -> Picture:
    """Draw one layer on one SM twice: with and without loads that begin before the previous instruction ends."""
    out = Picture(494, "The roles of one block during one layer")
    short = {"qkv_rope": "QKV", "o_proj": "O", "gate_up_silu": "gate, up", "down_proj": "down"}
    entries = [(COLOURS[phase], words) for phase, words in short.items()]
    legend(out, 26, [*entries, ("wait", "waiting for a counter, or for a free page")])
    ahead = "The loader works ahead: weights of the next instructions arrive while the consumers wait or compute"
    _roles_of(out, 66, ahead, Run(decode(3)), short)
    alone = "Each instruction begins when the one before has ended"
    _roles_of(out, 286, alone, Run(decode(3), pipelined=False), short)
    return out


def _roles_of(out: Picture, y: float, title: str, run: Run, short: dict[str, str]) -> None:
    """Draw 60 µs of one SM, beginning with a down projection. Two dashed lines mark one layer: the end of this down
    projection and the end of the next one.
    """
    shown = [one for one in run.of(0, WORKER) if one.phase in short]
    before, last = (
        one
        for one in shown
        if one.kind is IntervalKind.COMPUTE and one.phase == "down_proj" and one.instruction[0] in (LAYER - 1, LAYER)
    )
    axis = Axis(out, before.begin, before.begin + 60)
    waits = {one.instruction: one.end for one in shown if one.kind is IntervalKind.COUNTER_WAIT}
    early = [one for one in shown if one.kind is IntervalKind.LOAD and one.begin < waits[one.instruction]]
    late = [one for one in shown if one not in early]
    out.text(16, y, title, bold=True)
    axis.lane(y + 14, "controller", labelled(shown, short, IntervalKind.FETCH))
    pages = labelled(shown, short, IntervalKind.PAGE_WAIT)
    axis.lane(y + 46, "loads before wait", [*pages, *labelled(early, short, IntervalKind.LOAD)])
    axis.lane(y + 78, "loads after wait", labelled(late, short, IntervalKind.LOAD))
    axis.lane(y + 110, "consumers", labelled(shown, short, IntervalKind.COUNTER_WAIT, IntervalKind.COMPUTE))
    axis.lane(y + 142, "storer", labelled(shown, short, IntervalKind.STORE))
    ends = axis.x(before.end), axis.x(last.end)
    for x in ends:
        out.line((x, y + 8), (x, y + 176), strong=True, dashed=True)
    out.text(sum(ends) / 2, y + 190, f"one layer: {last.end - before.end:.1f} µs", anchor="middle")


def reading() -> Picture:
    """Draw five SMs during one layer of a prompt of 512 tokens. Arrows lead from work to the waits that it ended."""
    run = Run(batch("llama-3.2-1b", 1, 512, Options()))
    short = {
        "qkv_rope": "QKV",
        "attention": "attention",
        "o_proj": "O",
        "gate_up_silu": "gate, up",
        "down_proj": "down",
    }
    names = dict.fromkeys(COLOURS, "") | short
    layer = run.rows[(run.rows["kind"] == IntervalKind.COMPUTE) & (run.rows["layer"] == LAYER)]
    out = Picture(270, "Work, waits and causes on five SMs")
    axis = Axis(out, float(layer["begin"].min()) / 1e3, float(layer["end"].max()) / 1e3)
    lanes = {worker: 52 + 36 * i for i, worker in enumerate((3, 20, 40, 60, 87))}
    shown = {worker: run.of(0, worker) for worker in lanes}
    for worker, y in lanes.items():
        kinds = IntervalKind.COUNTER_WAIT, IntervalKind.COMPUTE
        axis.lane(y, f"SM {worker}", labelled(shown[worker], names, *kinds), 28)
    waits = [one for one in shown[60] if one.phase == "gate_up_silu" and one.kind is IntervalKind.COUNTER_WAIT]
    wait = next(one for one in waits if one.instruction[0] == LAYER)
    cause, bottom = run.at(int(run.releasers[wait.number])), lanes[87] + 28
    out.line((axis.x(cause.end) - 2, lanes[87]), (axis.x(wait.end), lanes[60] + 30), arrow=True)
    for at, words in ((axis.begin + 38, "work"), (wait.begin + 10, "wait")):
        out.text(axis.x(at), 24, words, anchor="middle", bold=True, size=15)
        out.line((axis.x(at), 30), (axis.x(at), lanes[3] + 2), arrow=True)
    axis.ticks(bottom + 6, 40)
    out.text(axis.x(cause.end), bottom + 42, "cause of the wait", anchor="middle", bold=True, size=15)
    out.line((axis.x(cause.end), bottom + 28), (axis.x(cause.end), bottom - 2), arrow=True)
    return out


def overlap() -> Picture:
    """Draw which operations (phases) the SMs of rank 0 run over time, in one layer of a large batch on eight ranks."""
    run = Run(batch("llama-3.1-70b", 8, 4096, Options(o="replicated", queue="body")))
    rows = run.rows
    mine = (rows["rank"] == 0) & (rows["layer"] == LAYER) & (rows["kind"] == IntervalKind.COMPUTE)
    begin, end = float(rows["begin"][mine].min()), float(rows["end"][mine].max())
    out = Picture(420, "The phases of one layer on one rank, over time")
    axis = Axis(out, begin / 1e3, end / 1e3)
    edges = np.linspace(begin, end, 139)
    xs = [axis.x(at / 1e3) for at in np.repeat(edges, 2)[1:-1]]
    bands = [
        ("norms and sums over ranks", ["mlp_norm", "next_norm", "down_reduce"]),
        ("QKV", ["qkv_rope"]),
        ("attention", ["attention"]),
        ("O", ["o_proj"]),
        ("gate, up", ["gate_up_silu"]),
        ("down", ["down_partial"]),
    ]
    legend(out, 26, [(COLOURS[phases[0]], words) for words, phases in bands])

    def area(low: NDArray[np.float64], high: NDArray[np.float64], bottom: float, height: float, fill: str) -> None:
        def edge(values: NDArray[np.float64]) -> list[tuple[float, float]]:
            return list(zip(xs, bottom - height * np.repeat(values, 2), strict=True))

        out.polygon([*edge(high), *edge(low)[::-1]], fill)

    low = np.zeros(len(edges) - 1)
    out.text(16, 66, "SMs that compute", bold=True)
    for _, phases in bands:
        high = low + run.share(edges, IntervalKind.COMPUTE, phases)
        area(low, high, 286, 200, COLOURS[phases[0]])
        low = high
    out.text(16, 316, "SMs that store for an exchange between ranks", bold=True)
    low = np.zeros(len(edges) - 1)
    for phases in (["attention"], ["mlp_norm", "next_norm"], ["down_partial"]):
        high = low + run.share(edges, IntervalKind.STORE, phases)
        area(low, high, 386, 56, COLOURS[phases[0]])
        low = high
    for bottom, top in ((286, 86), (386, 330)):
        out.line((LEFT, top), (LEFT, bottom), (RIGHT, bottom))
        out.text(LEFT - 8, top + 10, "100 %", anchor="end", quiet=True)
        out.text(LEFT - 8, bottom, "0", anchor="end", quiet=True)
    axis.ticks(388, 200)
    return out


def weight_pages(program: Program, record: Records) -> int:
    """Return through how many pages of shared memory a matmul's weights pass. Its row of inputs lies beside them."""
    phase = program.forward.by_number[int(phase_number(record))]
    operands: dict[str, Any] = phase.columns(record[None])
    return int(matmul_pages(phase, operands["rows"], operands["cols"], program.dims).weights[0])


def ring() -> Picture:
    program = decode(3)
    pages: list[str] = []
    for record in program.body.stream(WORKER):
        phase = program.forward.by_number[int(phase_number(record))]
        if phase.is_matmul:
            pages += [phase.name] * weight_pages(program, record)
    rows = -(-len(pages) // ROW_PAGES)
    left, top = 112, 66
    cell = (WIDTH - 14 - left) / ROW_PAGES
    out = Picture(top + 40 * rows + 50, "The pages of one layer in the ring of one block")
    short = {"qkv_rope": "QKV", "o_proj": "O projection", "gate_up_silu": "gate and up", "down_proj": "down projection"}
    counts = {name: len(list(found)) for name, found in groupby(pages)}
    legend(out, 26, [(COLOURS[name], f"{short[name]}: {count} pages") for name, count in counts.items()])
    for slot in range(ROW_PAGES):
        out.text(left + cell * (slot + 0.5), 56, f"slot {slot}", anchor="middle", quiet=True, size=12)
    for i, name in enumerate(pages):
        row, slot = divmod(i, ROW_PAGES)
        out.rect(left + cell * slot, top + 40 * row, cell - 3, 34, COLOURS[name])
        out.text(left + cell * slot + (cell - 3) / 2, top + 40 * row + 22, str(i), anchor="middle")
    for row in range(rows):
        first, last = row * ROW_PAGES, min((row + 1) * ROW_PAGES, len(pages)) - 1
        out.text(left - 10, top + 40 * row + 22, f"pages {first} to {last}", anchor="end", quiet=True, size=12)
    foot = top + 40 * rows
    rule = f"Page n lies in slot n mod {ROW_PAGES}. The loader fills it once the page above it has been released,"
    out.text(16, foot + 18, rule)
    out.text(16, foot + 36, "whether or not the two belong to the same instruction.")
    return out


def ranks() -> Picture:
    """Draw two tensor-parallel ranks. Each owns some rows: it adds both ranks' partial sums of its rows and normalises
    them."""
    options = Options(o="sharded", residual="dealt", norm="own", queue="none")
    run = Run(batch("llama-3.1-8b", 2, 256, options))
    out = Picture(506, "Two ranks exchange partial sums")
    short = {"o_partial": "O, partial sum", "o_reduce": "", "mlp_norm": "norm", "gate_up_silu": "gate, up"}
    entries = [
        ("purple", "partial sums of O"),
        ("red", "addition"),
        ("yellow", "norm"),
        ("orange", "weights of gate, up"),
    ]
    legend(out, 26, [*entries, ("wait", "waiting for a counter")])
    tops = 66, 288
    own = [[one for one in run.of(rank, 0) if one.instruction[0] == LAYER and one.phase in short] for rank in (0, 1)]
    waits = [
        next(one for one in shown if one.phase == "o_reduce" and one.kind is IntervalKind.COUNTER_WAIT) for shown in own
    ]
    # sent[i] is the store of rank i that ended the other rank's wait, so the list of waits is reversed.
    sent = [run.at(int(run.releasers[wait.number])) for wait in waits][::-1]
    [end] = [one.end for one in own[0] if one.phase == "mlp_norm" and one.kind is IntervalKind.STORE]
    axis = Axis(out, sent[0].begin - 7, end + 0.5)

    for rank, top in enumerate(tops):
        worker = int(run.rows[sent[rank].number]["worker"])
        sending = [one for one in run.of(rank, worker) if one.instruction == sent[rank].instruction]
        rows = f"rows {128 * rank} to {128 * rank + 127}"
        out.text(16, top, f"Rank {rank}, which owns {rows}", bold=True)
        axis.lane(top + 14, f"SM {worker}, consumers", labelled(sending, short, IntervalKind.COMPUTE))
        axis.lane(top + 46, f"SM {worker}, storer", [(sent[rank], "over NVLink")])
        axis.lane(top + 86, "SM 0, loads", labelled(own[rank], short, IntervalKind.LOAD))
        work = labelled(own[rank], short, IntervalKind.COUNTER_WAIT, IntervalKind.COMPUTE)
        axis.lane(top + 118, "SM 0, consumers", work)
        axis.lane(top + 150, "SM 0, storer", labelled(own[rank], short, IntervalKind.STORE))
    for rank, foot in ((0, 0), (1, 26)):  # the arrow to the other rank ends at the top or bottom of that rank's wait
        x = axis.x(waits[1 - rank].end)
        out.line((axis.x(sent[rank].end), tops[rank] + 59), (x, tops[1 - rank] + 118 + foot), arrow=True)
    axis.ticks(tops[1] + 182, 2)
    return out


PICTURES = {"pipeline": pipeline, "roles": roles, "overlap": overlap, "to-read": reading, "ring": ring, "ranks": ranks}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, draw in PICTURES.items():
        (DOCS / f"how-{name}.svg").write_text(str(draw()), encoding="utf-8")


if __name__ == "__main__":
    main()
