"""Shows where the time of a step went, from a program and its trace: as figures, an HTML page, a Perfetto file or a
table."""

from .compare import compare, compare_launches
from .html import page, write_html
from .perfetto import write_perfetto
from .resolve import resolve
from .summary import summarise
from .text import render, render_comparison, render_figures, render_launches

__all__ = [
    "compare",
    "compare_launches",
    "page",
    "render",
    "render_comparison",
    "render_figures",
    "render_launches",
    "resolve",
    "summarise",
    "write_html",
    "write_perfetto",
]
