"""Prints what users see: results on standard output, everything else on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

# A text may contain a user's own words, so no part of it is interpreted as markup. If output goes to a file or a pipe,
# lines may have up to _WIDE characters.
_WIDE = 160
stdout = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else _WIDE)
stderr = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def emit(result: dict[str, Any]) -> None:
    """Print one JSON object on standard output. Infinity and NaN, which JSON lacks, become null."""
    encoded = msgspec.json.encode(result, enc_hook=float)  # msgspec does not know NumPy's numbers
    sys.stdout.write(msgspec.json.format(encoded, indent=0).decode() + "\n")


def bold(figure: str, rest: str) -> Text:
    """Return the line `figure` + `rest`, with its most important part, `figure`, in bold."""
    return Text.assemble((figure, "bold"), rest)


def speed(tokens: int | None, finish_reason: str | None, ttft_s: float | None, tpot_s: float | None) -> str:
    """Describe the speed of an answer in one line. Values that are None are left out. `ttft_s` is the time to the first
    token, and `tpot_s` the time per further token, in seconds."""
    said = [] if tokens is None else [f"{tokens} tokens"]
    said.append(f"finish: {finish_reason}")
    if ttft_s is not None:
        said.append(f"first token {ttft_s * 1e3:.0f} ms")
    if tpot_s:
        said.append(f"{1 / tpot_s:.1f} tokens/s")
    return " · ".join(said)


def rates(figures: dict[str, Any]) -> str:
    """Return a text with the achieved and the maximum rates, in GB/s and in GFLOP/s (GOP/s for integers)."""
    ceilings = figures["ceilings"]
    read = f"{figures['read_GBps']:.1f} of {ceilings['read_bytes_per_s'] / 1e9:.1f} GB/s"
    return f"{read}, {figures['gflops']:.0f} of {ceilings['flops'] / 1e9:.0f} G{ceilings['unit']}"


def rows(*pairs: tuple[str, str | Text]) -> None:
    """Print one line for each name and value, with the values aligned."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(Text(name), Text(value) if isinstance(value, str) else value)
    stdout.print(table)


_TEXT = ("ms", "phase", "bound by", "question", "what", "numbers of the book")


def table(*names: str) -> Table:
    """Return a table with columns `names`, in which numbers are aligned right and words are aligned left."""
    made = Table(box=None, pad_edge=False, header_style="dim")
    for i, name in enumerate(names):
        made.add_column(name, justify="left" if name in _TEXT else "right", overflow="fold", no_wrap=i == 0)
    return made


@contextmanager
def busy(what: str) -> Iterator[Callable[[], None]]:
    """Show a spinner on a terminal while the `with` block runs, or until the block calls the yielded function."""
    if not stderr.is_terminal:
        yield lambda: None
        return
    with stderr.status(what) as shown:
        yield shown.stop


@contextmanager
def progress(what: str, unit: str = "") -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal while the `with` block runs. The block moves the bar by calling the yielded
    function with (done, total). Without a terminal, these calls do nothing."""
    counted = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        counted,
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal,
    )
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def lowering_text(lowering: dict[str, str]) -> str:
    """Return the compiler's choices as text, such as `O sharded, residual dealt, norm own`. `lowering` maps each of
    these names to its choice. The first two say how ranks share the O projection and the residual; `norm` says where
    norms are computed."""
    return ", ".join(f"{'O' if name == 'o' else name} {how}" for name, how in lowering.items())
