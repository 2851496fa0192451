"""Draws the roofline plot with matplotlib: FLOP/s against FLOPs per byte, on logarithmic axes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ..errors import MegakernelError, whole_file
from ..isa import OperationFamily
from ..machine import Hardware
from ..units import scaled

_ROOFS = {"fp4": "fp4 matrix", "fp8": "fp8 matrix", "int8": "8-bit integers", "bf16": "bf16 matrix", "fp32": "fp32"}
_STYLE: Any = {
    **{"svg.fonttype": "none", "svg.hashsalt": "roofline", "font.size": 9.0, "font.family": "sans-serif"},
    "text.parse_math": False,  # names may contain dollar signs
}
_GAP = 0.045  # least distance between two labels, as a fraction of the axes' height
_PAGE = """<!doctype html><meta charset=utf-8><title>Roofline</title>
<meta http-equiv=Content-Security-Policy content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<style>body{margin:0}svg{display:block;width:100vw;height:100vh}</style>
"""


class Mark(Enum):
    """What a point shows. The value is matplotlib's name of its marker: a dot, a diamond or a ring."""

    INSTRUCTION = "o"
    STEP = "D"
    ACHIEVED = "8"


@dataclass(frozen=True)
class Point:
    """A point of the plot. `flops_per_s` is a rate that the machine allows, or a rate that was achieved.
    `flops_per_byte` counts bytes of main memory. `family` (a group of operations) gives the point its colour."""

    label: str
    flops_per_byte: float
    flops_per_s: float
    mark: Mark = Mark.INSTRUCTION
    family: OperationFamily = OperationFamily.CONTROL


def write_plot(path: Path, hardware: Hardware, points: Sequence[Point], title: str, roof: str = "bf16") -> None:
    """Write the plot to `path`, as an HTML page if its name ends in .html, otherwise as an SVG file. One roofline is
    drawn solid: that of the type `roof`. The machine's other rates are dashed lines. The labels of the points are on
    the right, the highest rate first. Raises MegakernelError if matplotlib is missing, if a point is not positive, or
    if the file cannot be written."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as e:
        raise MegakernelError(
            f"--plot needs matplotlib, and {e.name} is missing: pip install 'megakernel[plot]'"
        ) from e

    for point in points:
        if not (point.flops_per_byte > 0 and point.flops_per_s > 0):
            raise MegakernelError(
                f"the point {point.label!r} cannot be drawn on a logarithmic scale: its figures must be positive"
            )
    with rc_context(_STYLE):
        figure = Figure(figsize=(10, 6), layout="constrained")
        axes = figure.add_subplot(xscale="log", yscale="log", xlabel="FLOPs per byte of memory")
        peak, bandwidth = hardware.flops_per_s(roof), hardware.chip.hbm_bytes_per_s
        flat = f"flat from {hardware.intensity(roof):.0f} FLOPs per byte"
        subtitle = f"{hardware.name}: {scaled(peak, _unit(roof))} {roof}, {scaled(bandwidth, 'B/s')}, {flat}"
        axes.set_title(f"{title}\n{subtitle}", loc="left")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.set_major_formatter(lambda value, _: scaled(value, "FLOP/s"))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _draw_roofs(axes, hardware, points, roof)
        _draw_points(axes, points)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    svg = out.getvalue()
    with whole_file(path, f"plot {path}") as part:
        part.write_text(_PAGE + svg[svg.index("<svg") :] if path.suffix == ".html" else svg)


def _unit(roof: str) -> str:
    return "OP/s" if roof == "int8" else "FLOP/s"


def _draw_roofs(axes: Any, hardware: Hardware, points: Sequence[Point], roof: str) -> None:
    """Draw the roofline of the rate `roof`, and a horizontal line for each other rate. Equal rates share a line."""
    bandwidth, peak = hardware.chip.hbm_bytes_per_s, hardware.flops_per_s(roof)
    rates = {name: rate for name in _ROOFS if (rate := getattr(hardware.rates, name))}
    right = max([p.flops_per_byte for p in points] + [max(rates.values()) / bandwidth]) * 5
    left = min([p.flops_per_byte for p in points] + [min(rates.values()) / bandwidth / 15]) / 2
    axes.plot([left, peak / bandwidth, right], [left * bandwidth, peak, peak], color="black")
    for rate in dict.fromkeys(rates.values()):
        names = [roof] if rate == peak else [name for name in rates if rates[name] == rate]
        if rate != peak:
            axes.plot([rate / bandwidth, right], [rate, rate], color="black", linewidth=0.8, linestyle="dashed")
        words = f"{', '.join(_ROOFS[name] for name in names)}, {scaled(rate, _unit(names[0]))}"
        axes.annotate(words, (right, rate), (0, 3), textcoords="offset points", ha="right", color="0.35")
    rates_seen = [*rates.values(), *(p.flops_per_s for p in points)]
    axes.set(xlim=(left, right), ylim=(min([left * bandwidth, *rates_seen]) / 2, max(rates_seen) * 2))


def _draw_points(axes: Any, points: Sequence[Point]) -> None:
    """Draw markers, a legend, and labels to the right of the axes, each joined with its marker by a line."""
    groups: dict[tuple[Any, ...], list[Point]] = {}  # points at the same place share a marker and a label
    for point in points:
        place = f"{point.flops_per_byte:.2g}", f"{point.flops_per_s:.2g}"
        groups.setdefault((*place, point.mark, point.family), []).append(point)
    kinds: set[str] = set()
    below = 1.0 + _GAP
    for number, members in enumerate(sorted(groups.values(), key=lambda members: -members[0].flops_per_s)):
        point = members[0]
        at = point.flops_per_byte, point.flops_per_s
        plain = point.mark is Mark.INSTRUCTION
        kind = point.family.name.lower() if plain else point.mark.name.lower()
        look = {"color": point.family.value} if plain else {"color": "black", "fillstyle": "none", "markersize": 10}
        axes.plot(*at, point.mark.value, **look, label=None if kind in kinds else kind)
        kinds.add(kind)
        beside = axes.transAxes.inverted().transform(axes.transData.transform(at))[1]
        below = min(max(beside, _GAP * (len(groups) - number)), below - _GAP)
        axes.annotate(
            f"{', '.join(p.label for p in members)}: {scaled(point.flops_per_s, 'FLOP/s')}",
            at,
            (1.02, below),
            textcoords="axes fraction",
            va="center",
            arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.7, "relpos": (0, 0.5)},
        )
    axes.legend(loc="upper left", frameon=False)
