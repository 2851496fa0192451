"""Draws the roofline figure: FLOP/s over FLOPs per byte, both logarithmic, as one SVG without external references."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape
from math import ceil, floor, log10

from ..errors import MegakernelError
from ..isa import OperationFamily
from ..machine import Hardware

_WIDTH, _HEIGHT = 960, 600
_LEFT, _RIGHT, _TOP, _BOTTOM = 96, 28, 64, 60
_TITLE, _LEGEND = 24, 47  # baselines
_CHARACTER, _LINE = 6.6, 15.0  # width of a character and height of a line of a label, in pixels
_NEAR = 9.0  # points closer than this many pixels share one marker
_NAMES = 3  # maximum names in the label of a shared marker
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_ROOFS = {"fp4": "fp4 matrix", "fp8": "fp8 matrix", "bf16": "bf16 matrix", "fp32": "fp32"}
_STYLE = """
svg { font: 12px system-ui, sans-serif; background: #fff; color: #222; }
text { fill: currentColor; } .dim { opacity: .65; } .title { font-size: 16px; font-weight: 600; }
.grid { stroke: currentColor; opacity: .12; } .axis { stroke: currentColor; }
.roof { stroke: currentColor; stroke-width: 2; fill: none; } .other { stroke-width: 1; stroke-dasharray: 5 4; }
.mark { stroke: currentColor; stroke-width: 1; } .hollow { fill: none; stroke-width: 2; }
.lead { stroke: currentColor; opacity: .35; }
.label { paint-order: stroke; stroke: #fff; stroke-width: 4px; stroke-linejoin: round; }
@media (prefers-color-scheme: dark) {
  svg { background: #16181c; color: #e6e6e6; } .label { stroke: #16181c; }
}
"""


class Mark(Enum):
    """The kind of a point, and its shape: a dot, a diamond or a ring."""

    INSTRUCTION = "instruction"
    STEP = "whole step"
    ACHIEVED = "achieved"


@dataclass(frozen=True)
class Point:
    """A point of the figure. `flops_per_s` is what the machine allows or what was achieved.

    `flops_per_byte` counts bytes of main memory. A point for an instruction has the colour of the instruction's
    `family`.
    """

    label: str
    flops_per_byte: float
    flops_per_s: float
    mark: Mark = Mark.INSTRUCTION
    family: OperationFamily = OperationFamily.CONTROL


@dataclass(frozen=True)
class _Frame:
    """The powers of ten at which the axes begin and end. Converts values to positions in pixels."""

    x_low: int
    x_high: int
    y_low: int
    y_high: int

    def x(self, value: float) -> float:
        part = (log10(value) - self.x_low) / (self.x_high - self.x_low)
        return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        part = (log10(value) - self.y_low) / (self.y_high - self.y_low)
        return _HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM)


Box = tuple[float, float, float, float]  # left, top, right, bottom


def render_plot(hardware: Hardware, points: Sequence[Point], title: str, roof: str = "bf16") -> str:
    """Return the figure as SVG text. The rate `roof` is drawn as the roofline, and other rates as dashed lines."""
    for point in points:
        if not (point.flops_per_byte > 0 and point.flops_per_s > 0):
            raise MegakernelError(
                f"the point {point.label!r} cannot be drawn on a logarithmic scale: its figures must be positive"
            )
    frame = _frame(hardware, points)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="{_TITLE}">{escape(title)}</text>',
        f'<text class="dim" x="{_LEFT}" y="{_LEGEND}">{escape(_subtitle(hardware, roof))}</text>',
        *_axes(frame),
        *_roofs(hardware, frame, roof),
        *_marks(points, frame),
        *_legend(points),
        "</svg>",
    ]
    return "\n".join(out) + "\n"


def _frame(hardware: Hardware, points: Sequence[Point]) -> _Frame:
    """Choose axes that span whole decades and contain all points and all corners of the roofline."""
    rates = [r for name in _ROOFS if (r := getattr(hardware.rates, name))]
    corners = [rate / hardware.chip.hbm_bytes_per_s for rate in rates]
    xs = [p.flops_per_byte for p in points] + [min(corners) / 30, max(corners) * 5]
    low, high = floor(log10(min(xs))), ceil(log10(max(xs)))
    ys = [p.flops_per_s for p in points] + [max(rates) * 1.5, min(rates) / 10]
    return _Frame(low, high, floor(log10(min(ys))), ceil(log10(max(ys))))


def _subtitle(hardware: Hardware, roof: str) -> str:
    bytes_per_s = _si(hardware.chip.hbm_bytes_per_s, "B/s")
    flops = _si(hardware.flops_per_s(roof), "FLOP/s")
    return f"{hardware.name}: {flops} {roof}, {bytes_per_s}, flat from {hardware.intensity(roof):.0f} FLOPs per byte"


def _si(value: float, unit: str) -> str:
    for scale, prefix in _PREFIXES:
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _axes(frame: _Frame) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    out = []
    for decade in range(frame.x_low, frame.x_high + 1):
        x = frame.x(10.0**decade)
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        out.append(f'<text text-anchor="middle" x="{x:.1f}" y="{bottom + 18}">{10.0**decade:g}</text>')
    for decade in range(frame.y_low, frame.y_high + 1):
        y = frame.y(10.0**decade)
        out.append(f'<line class="grid" y1="{y:.1f}" y2="{y:.1f}" x1="{_LEFT}" x2="{right}"/>')
        label = _si(10.0**decade, "FLOP/s")
        out.append(f'<text text-anchor="end" x="{_LEFT - 8}" y="{y + 4:.1f}">{label}</text>')
    out.append(f'<path class="axis" fill="none" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>')
    middle = (_LEFT + right) / 2
    out.append(f'<text text-anchor="middle" x="{middle:.0f}" y="{_HEIGHT - 14}">FLOPs per byte of memory</text>')
    return out


def _roofs(hardware: Hardware, frame: _Frame, roof: str) -> list[str]:
    """Return SVG elements: the whole roofline for the rate `roof`, and a horizontal line for each other rate."""
    bandwidth = hardware.chip.hbm_bytes_per_s
    left, right = 10.0**frame.x_low, 10.0**frame.x_high
    peak = hardware.flops_per_s(roof)
    foot = max(left, 10.0**frame.y_low / bandwidth)
    corner = peak / bandwidth
    line = " ".join(
        f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in ((foot, foot * bandwidth), (corner, peak), (right, peak))
    )
    out = [f'<polyline class="roof" points="{line}"/>']
    for name, label in _ROOFS.items():
        rate = getattr(hardware.rates, name)
        if not rate or (name != roof and rate == peak):
            continue
        y = frame.y(rate)
        if name != roof:
            start = frame.x(rate / bandwidth)
            out.append(
                f'<line class="roof other" x1="{start:.1f}" x2="{frame.x(right):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
        out.append(
            f'<text class="dim" text-anchor="end" x="{frame.x(right) - 4:.1f}" y="{y - 6:.1f}">'
            f"{label}, {_si(rate, 'FLOP/s')}</text>"
        )
    return out


def _marks(points: Sequence[Point], frame: _Frame) -> list[str]:
    """Return SVG elements: the markers of all points, then their labels at places where they cover nothing else."""
    out: list[str] = []
    groups = list(_near(points, frame))
    taken: list[Box] = []
    for x, y, members in groups:
        taken.append((x - 8, y - 8, x + 8, y + 8))
        how = "achieved" if members[0].mark is Mark.ACHIEVED else "at most"
        tip = "\n".join(
            f"{p.label}: {how} {_si(p.flops_per_s, 'FLOP/s')} at {p.flops_per_byte:.3g} FLOPs per byte" for p in members
        )
        out.append(f"{_shape(members[0], x, y)}<title>{escape(tip)}</title></path>")
    for x, y, members in groups:
        more = f" and {len(members) - _NAMES} more" if len(members) > _NAMES else ""
        text = ", ".join(p.label for p in members[:_NAMES]) + more
        box, anchor = _place(x, y, text, taken)
        taken.append(box)
        at = box[0] if anchor == "start" else box[2]
        baseline = box[3] - 4
        if abs(baseline - y) > 2 * _LINE:
            out.append(f'<line class="lead" x1="{x:.1f}" y1="{y:.1f}" x2="{at:.1f}" y2="{baseline - 4:.1f}"/>')
        out.append(f'<text class="label" text-anchor="{anchor}" x="{at:.1f}" y="{baseline:.1f}">{escape(text)}</text>')
    return out


def _shape(point: Point, x: float, y: float) -> str:
    """Return the opening SVG tag of a point's marker."""
    at = f'transform="translate({x:.1f} {y:.1f})"'
    if point.mark is Mark.STEP:
        return f'<path class="mark hollow" {at} d="M0-11L11 0L0 11L-11 0Z">'
    if point.mark is Mark.ACHIEVED:
        return f'<path class="mark hollow" {at} d="M-7 0a7 7 0 1 0 14 0a7 7 0 1 0-14 0">'
    return f'<path class="mark" {at} fill="{point.family.value}" d="M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0">'


def _legend(points: Sequence[Point]) -> list[str]:
    """Return the SVG elements of the legend, which is one row under the title, aligned to the right. The legend has a
    marker for each family of instructions in the figure and for each other kind of point.
    """
    kinds = dict.fromkeys((p.mark, p.family if p.mark is Mark.INSTRUCTION else OperationFamily.CONTROL) for p in points)
    out, x = [], float(_WIDTH - _RIGHT)
    for mark, family in reversed(kinds):
        text = family.name.lower() if mark is Mark.INSTRUCTION else mark.value
        x -= len(text) * _CHARACTER
        out.append(f'<text x="{x:.1f}" y="{_LEGEND}">{text}</text>')
        out.append(f"{_shape(Point('', 1, 1, mark, family), x - 16, _LEGEND - 4)}</path>")
        x -= 44
    return out


def _near(points: Sequence[Point], frame: _Frame) -> Iterable[tuple[float, float, list[Point]]]:
    """Return (x, y, points) of each marker. Points of the same kind that are too close together share a marker."""
    groups: list[tuple[float, float, list[Point]]] = []
    for point in points:
        x, y = frame.x(point.flops_per_byte), frame.y(point.flops_per_s)
        for gx, gy, members in groups:
            first = members[0]
            same = (first.mark, first.family) == (point.mark, point.family)
            if same and abs(gx - x) < _NEAR and abs(gy - y) < _NEAR:
                members.append(point)
                break
        else:
            groups.append((x, y, [point]))
    return groups


def _place(x: float, y: float, text: str, taken: Sequence[Box]) -> tuple[Box, str]:
    """Return (box, anchor) of a label. It lies beside its marker at (x, y), or as far above or below as necessary."""
    width = len(text) * _CHARACTER
    for step in range(40):
        shift = (step + 1) // 2 * _LINE * (1 if step % 2 else -1)
        top = y - _LINE / 2 + shift
        for anchor, left in (("start", x + 14), ("end", x - 14 - width)):
            box = (left, top, left + width, top + _LINE)
            inside = box[0] > _LEFT and box[2] < _WIDTH - 2 and box[1] > _TOP and box[3] < _HEIGHT - _BOTTOM
            if inside and not any(_overlap(box, other) for other in taken):
                return box, anchor
    return (x + 14, y - _LINE / 2, x + 14 + width, y + _LINE / 2), "start"


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
