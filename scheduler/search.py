"""Searches for the fastest options. The cost model or the simulator predicts how long a step takes with them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megakernel.scheduler.options import CHOICES, Options

Change = dict[str, Any]
# Returns the predicted seconds of a step with some options. The second argument is a limit: if a step takes at least
# that long, the result may be any number from the limit up.
Predict = Callable[[Options, float], float]

_VALUES: dict[str, tuple[Any, ...]] = {**CHOICES, "interleave": (True, False)}


def search(best: Options, choices: Sequence[Sequence[Change]], predict: Predict) -> Options:
    """Return the fastest options that a local search finds from `best`. A choice is a list of alternative changes. The
    search goes through the choices in turn, again and again, and takes the fastest change of each. It stops when every
    choice has been tried since the last improvement."""
    best_s, since = predict(best, math.inf) if choices else 0.0, 0
    for changes in itertools.cycle(choices):
        found = best
        for change in changes:
            tried = replace(best, **change)
            seconds = predict(tried, best_s)
            if seconds < best_s:
                found, best_s = tried, seconds
        since = since + 1 if found == best else 1
        best = found
        if since >= len(choices):
            break
    return best


def products(*names: str) -> list[Change]:
    """Return all combinations of values for the options `names`."""
    values = [[value for value in _VALUES[name] if value != "auto"] for name in names]
    return [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values)]
