"""Shows from a program and its trace where the time went: as metrics, an HTML page, a Perfetto file or a terminal
table.
"""

from .compare import compare
from .html import page, write_html
from .launches import compare_launches
from .perfetto import write_perfetto
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
    "summarise",
    "write_html",
    "write_perfetto",
]
