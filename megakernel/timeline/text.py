"""Prints the summary of a trace in the terminal, on one screen."""

from __future__ import annotations

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..isa import OperationFamily
from ..units import scaled, seconds
from .compare import Comparison
from .summary import Summary
from .waterfall import Cause

_WAITS = 6  # maximum number of rows of the table of waits
_WIDE = 110  # terminal columns needed to show both tables side by side

# Control operations are black in charts, and invisible on a black terminal. So they get the terminal's text colour.
_STYLES = {f: "default" if f is OperationFamily.CONTROL else f.value for f in OperationFamily}


def render(summary: Summary, console: Console) -> None:
    """Print a summary: the waterfall, work and waits by phase, resources, overlaps and critical path."""
    console.print(Group(_headline(summary), Text(), _waterfall(summary, console.width), Text()))
    console.print(_tables(_instructions(summary), _waits(summary), console.width))
    if summary.resources:
        console.print(_resources(summary, console.width))
        if summary.without_attention:
            console.print(Text("without attention: this trace does not contain its work, so record it again", "dim"))
        if any(r.fraction > 1 for r in summary.resources):
            console.print(Text("a rate exceeds its peak: the machine's description or the clock is wrong", "bold red"))
        console.print()
    console.print(_overlap(summary))


def render_comparison(comparison: Comparison, console: Console) -> None:
    """Print a comparison of two traces: the time of the step, and then the instructions that are in both, by phase."""
    c = comparison
    table = _table("Second against first", "", f"first, {c.first}", f"second, {c.second}", "ratio", "matched")
    table.add_row("step", *map(seconds, c.step_s), _times(c.ratio), "")
    for i in c.instructions:
        table.add_row(i.name, seconds(i.first_mean_s), seconds(i.second_mean_s), _times(i.ratio), f"{i.count:,}")
    console.print(table)
    if c.only_first or c.only_second:
        console.print(Text(f"{c.only_first:,} instructions only in the first, {c.only_second:,} only in the second"))


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"× {ratio:.3g}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _headline(s: Summary) -> Text:
    text = Text.assemble(
        (f"{seconds(s.step_s)} per step", "bold"),
        f"  {s.source} trace · {s.machine} · {s.ranks} × {s.workers} workers"
        f" · {s.launches} launch{'es' if s.launches > 1 else ''} · {s.intervals:,} intervals",
    )
    if s.clock_error_s:
        text.append(f" · clocks of ranks agree within ±{seconds(s.clock_error_s)}")
    if s.dropped:
        text.append(f"  {s.dropped:,} intervals dropped: what follows is incomplete", "bold red")
    return text


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def _instructions(s: Summary) -> Table:
    table = _table("Work", "phase", "count", "total", "median", "outliers", "share")
    for i in s.instructions:
        name = Text.assemble(("■ ", _STYLES[OperationFamily[i.family.upper()]]), i.name)
        far = f"{i.outliers:,}: {seconds(i.outliers_s)}" if i.outliers else ""
        table.add_row(name, f"{i.count:,}", seconds(i.total_s), seconds(i.median_s), far, percent(i.share))
    return table


def _waits(s: Summary) -> Table:
    table = _table("Waits", "phase ← waited for", "count", "total", "share")
    for w in s.waits[:_WAITS]:
        table.add_row(f"{w.instruction} ← {w.cause}", f"{w.count:,}", seconds(w.total_s), percent(w.share))
    if len(s.waits) > _WAITS:
        rest = s.waits[_WAITS:]
        total, share = sum(w.total_s for w in rest), sum(w.share for w in rest)
        table.add_row(f"{len(rest)} more", f"{sum(w.count for w in rest):,}", seconds(total), percent(share))
    return table


_CAUSES = 6  # maximum number of causes of waits that have their own row in the waterfall


def _waterfall(s: Summary, width: int) -> Table:
    """Return a table of the waterfall's bars, drawn so that each bar begins where the previous one ends."""
    names = {Cause.LEAST: "least time, bound by {}", Cause.RESOURCE: "{} needs more"}
    rows = [(names.get(bar.kind, "{}").format(bar.name), bar.seconds) for bar in s.waterfall.bars]
    waits = [n for n, bar in enumerate(s.waterfall.bars) if bar.kind is Cause.WAIT]
    if len(waits) > _CAUSES:
        first, last = waits[_CAUSES - 1], waits[-1] + 1
        rows[first:last] = [(f"{last - first} other waits", sum(t for _, t in rows[first:last]))]
    table = _table("Why is it not at the limit?", "from the least time to the step", "", "of the step", "")
    table.columns[-1].justify = "left"
    cells = max(10, min(width - 70, 60))
    before = 0.0
    for name, t in rows:
        begin, end = (round(cells * x / s.step_s) for x in (before, before + t))
        before += t
        table.add_row(Text(name), seconds(t), percent(t / s.step_s), " " * begin + "█" * (end - begin))
    table.add_row(Text("the step", "bold"), seconds(s.step_s), percent(before / s.step_s), "")
    if s.waterfall.beyond:
        least = seconds(s.waterfall.least_s)
        table.caption = f"The least time is {least}: the machine's description or the clock is wrong."
    return table


_BLOCKS = " ▁▂▃▄▅▆▇█"


def _resources(s: Summary, width: int) -> Table:
    table = _table("Resources", "resource", "rate", "of peak", "highest", "over the trace")
    table.columns[-1].justify = "left"
    cells = max(16, min(width - 56, 96))
    for r in s.resources:
        parts = [float(part.mean()) for part in np.array_split(np.array(r.curve), cells)]
        top = max(parts)
        line = "".join(_BLOCKS[round(8 * part / top)] for part in parts) if top else ""
        table.add_row(r.name, scaled(r.rate, r.unit), percent(r.fraction), percent(top), Text(line, "dim"))
    return table


def _tables(left: Table, right: Table, width: int) -> RenderableType:
    if width < _WIDE:
        return Group(left, Text(), right, Text())
    grid = Table.grid(padding=(0, 4))
    grid.add_row(left, right)
    return Group(grid, Text())


def _overlap(s: Summary) -> Table:
    path = s.critical_path
    table = Table.grid(padding=(0, 2))
    rows = (
        (
            "workers busy",
            percent(s.busy),
            f"waiting {percent(s.wait)}, busiest {1 + s.imbalance:.2f} times the mean",
        ),
        ("loads hidden", percent(s.overlap.inside_worker), "of load time before its own compute, hidden by other work"),
        ("loads under compute", percent(s.overlap.loads_under_compute), "of load time, its own compute included"),
        ("memory under compute", percent(s.overlap.across_workers), "of memory-bound time, beside compute-bound work"),
        ("phases overlapping", percent(s.overlap.phases), "of compute time, two or more (layer, phase) at once"),
        ("ranks overlapping", percent(s.overlap.across_ranks), "of compute time, ranks in two or more phases at once"),
        ("exposed communication", percent(s.exposed_communication), "of the step, blocked on another rank"),
        (
            "critical path",
            seconds(path.seconds),
            ", ".join(f"{name} {percent(t / path.seconds)}" for name, t in list(path.by_instruction.items())[:4])
            + f", gaps {percent(path.gap_s / path.seconds)}",
        ),
    )
    for name, value, note in rows:
        table.add_row(Text(name), Text(value, "bold"), Text(note, "dim"))
    return table
