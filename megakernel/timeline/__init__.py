"""Where the time went: metrics, a page, a Perfetto file and a terminal table, from a program and its trace."""

from .html import write_html
from .perfetto import write_perfetto
from .summary import Summary, summarise
from .text import render

__all__ = ["Summary", "render", "summarise", "write_html", "write_perfetto"]
