"""Shows on a terminal how many prompts are finished, as a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megakernel.serving.engine.engine import Step


@contextmanager
def progress(prompts: int, wanted: bool) -> Iterator[Callable[[Step, int], None]]:
    """Show a progress bar if it is `wanted` and standard error is a terminal.

    Yields a function. Call this function after each step, with the step and the number of prompts that it finished.
    """
    console = Console(stderr=True)
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(
        *columns, TextColumn("{task.fields[rate]}"), console=console, disable=not wanted or not console.is_terminal
    )
    tokens = 0
    with bar:
        task = bar.add_task("", total=prompts, rate="")

        def advance(step: Step, finished: int) -> None:
            nonlocal tokens
            tokens += len(step.tokens)
            elapsed = bar.tasks[0].elapsed
            bar.update(task, advance=finished, rate=f"{tokens / elapsed:,.0f} tokens/s" if elapsed else "")

        yield advance
