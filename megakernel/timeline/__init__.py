"""Shows from a program and its trace where a step's time went: as figures, HTML page, Perfetto file or table."""

from .compare import compare
from .html import page, write_html
from .perfetto import write_perfetto
from .resolve import machine_name, resolve
from .summary import summarise
from .text import render, render_comparison
