"""Where the time went: metrics, a page, a Perfetto file and a terminal table, from a program and its trace."""

from .compare import compare
from .html import write_html
from .perfetto import write_perfetto
from .summary import summarise
from .text import render, render_comparison, render_figures

__all__ = ["compare", "render", "render_comparison", "render_figures", "summarise", "write_html", "write_perfetto"]
