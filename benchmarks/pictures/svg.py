"""Draws SVG pictures that are readable in light and dark mode."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH = 830  # width of the text column on GitHub, in pixels
_CHARACTER = 6.9  # mean width of a character of 13-pixel text

# Colours in light and dark mode. All text in a mode has one colour, so every fill must contrast with it.
_THEMES = {
    "light": {
        "page": "#ffffff",
        "ink": "#1f2328",
        "quiet": "#59636e",
        "line": "#b7bfc8",
        "box": "#eef1f4",
        "blue": "#9fcdf0",
        "purple": "#d3bdf0",
        "orange": "#f7c873",
        "green": "#9fdcc0",
        "red": "#f5a9a0",
        "yellow": "#f0e27a",
    },
    "dark": {
        "page": "#0d1117",
        "ink": "#f0f6fc",
        "quiet": "#a3adb8",
        "line": "#505a66",
        "box": "#21262d",
        "blue": "#1c5d92",
        "purple": "#5f4394",
        "orange": "#855600",
        "green": "#17694a",
        "red": "#9c3a2e",
        "yellow": "#685e00",
    },
}


def _style() -> str:
    def rules(theme: dict[str, str]) -> str:
        fills = "".join(f".{name}{{fill:{colour}}}" for name, colour in theme.items())
        strokes = f".edge{{stroke:{theme['line']}}}.arrow{{stroke:{theme['ink']}}}.hatch{{stroke:{theme['quiet']}}}"
        return f"text{{fill:{theme['ink']}}}{fills}{strokes}"

    return f"{rules(_THEMES['light'])}@media(prefers-color-scheme:dark){{{rules(_THEMES['dark'])}}}"


_HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M0 0.5L8 4L0 7.5z" class="ink"/></marker>'
    '<pattern id="wait" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M0 0V6" class="hatch" stroke-width="1.6"/></pattern>'
)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


class Picture:
    """An SVG picture, WIDTH pixels wide, to which methods add shapes. `str` of it is the file's content."""

    def __init__(self, height: float, title: str) -> None:
        self._height, self._parts = (
            height,
            [f"<title>{escape(title)}</title>", '<rect class="page" width="100%" height="100%"/>'],
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "start",
        quiet: bool = False,
        bold: bool = False,
        size: int = 13,
    ) -> None:
        style = (' class="quiet"' if quiet else "") + (' font-weight="600"' if bold else "")
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{style}>{escape(words)}</text>'
        )

    def rect(self, x: float, y: float, width: float, height: float, fill: str, label: str = "") -> None:
        """Draw a rectangle, with a label in its middle if it fits. `fill` names a colour of _THEMES, or is "wait"
        (hatched).
        """
        look = 'fill="url(#wait)"' if fill == "wait" else f'class="{fill} edge"'
        outline = ' class="edge" stroke-width="1"' if fill == "wait" else ' stroke-width="1"'
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height:.1f}" rx="2" {look}{outline}/>'
        )
        if label and len(label) * _CHARACTER + 4 < width:
            self.text(x + width / 2, y + height / 2 + 4.5, label, anchor="middle")

    def line(
        self, *points: tuple[float, float], strong: bool = False, arrow: bool = False, dashed: bool = False
    ) -> None:
        look = 'class="arrow" stroke-width="1.4"' if strong or arrow else 'class="edge" stroke-width="1"'
        head = ' marker-end="url(#head)"' if arrow else ""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(f'<path d="{_path(points)}" fill="none" {look}{head}{dash}/>')

    def polygon(self, points: Sequence[tuple[float, float]], fill: str) -> None:
        self._parts.append(f'<path d="{_path(points)}Z" class="{fill}"/>')

    def __str__(self) -> str:
        size = f'viewBox="0 0 {WIDTH} {self._height:g}" width="{WIDTH}" height="{self._height:g}"'
        font = 'font-family="system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif" font-size="13"'
        opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
        return "\n".join([opening, f"<style>{_style()}</style><defs>{_HEAD}</defs>", *self._parts, "</svg>"]) + "\n"
