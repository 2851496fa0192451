"""Searches for sizes with which a step becomes faster (`compile --search`), in addition to the choices of `Fastest`.

The sizes are those of tiles and panels (groups of row blocks), and the delays of norms and reductions. The search
changes one at a time and keeps a change if the simulated step becomes faster, until the time is up. Results are kept in
the cache folder. The key is a hash of the initial program and of all that simulated times depend on.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megakernel.errors import whole_file
from megakernel.isa.dims import Units
from megakernel.library import load
from megakernel.machine import Machine
from megakernel.model.cache import cache_folder
from megakernel.program import Program
from megakernel.runtime.targets import target_of
from megakernel.scheduler.options import Options, Shape
from megakernel.scheduler.tune.fastest import Fastest

_LAGS, _CLAIMS = (1, 2, 3, 4, 6), (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Gain:
    """One change that made a step faster."""

    change: str
    step_s: float


@dataclass(frozen=True)
class Found:
    """The result of a search. `tried` is the number of different programs that were simulated. `cached` says that the
    result comes from an earlier search.
    """

    options: Options
    begin_s: float
    step_s: float
    gains: tuple[Gain, ...]
    tried: int
    cached: bool = False


def search(fastest: Fastest, tokens: int, seconds: float) -> Found:
    """Return the best options found within `seconds` for a bucket of `tokens` rows. They are never slower than the
    default options.

    The default options are always determined, however long that takes. If an earlier search had at least as many
    seconds, its result is returned.
    """
    stop = time.monotonic() + seconds
    best, known = fastest.options(tokens), dict[Options | str, float]()
    program = fastest.compile(best, tokens, 1)
    file = cache_folder() / "search" / f"{_key(program, fastest.machine)}.json"
    if earlier := _load(file, seconds):
        return earlier
    begin_s = best_s = fastest.seconds(best, tokens, known)
    gains: list[Gain] = []
    moves = _moves(best, program, fastest, tokens)
    while tried := next(moves, None):
        if time.monotonic() > stop:
            break
        what, options = tried
        step_s = fastest.seconds(options, tokens, known)
        if step_s < best_s:
            best, best_s = options, step_s
            gains.append(Gain(what, step_s))
            moves = _moves(best, program, fastest, tokens)
    found = Found(best, begin_s, best_s, tuple(gains), sum(isinstance(k, str) for k in known))
    _save(file, found, seconds)
    return found


def _moves(best: Options, program: Program, fastest: Fastest, tokens: int) -> Iterator[tuple[str, Options]]:
    """Yield (text, options) for each set of options that differs from `best` in one size or one choice. The text has
    the name and the new value of what differs.
    """
    dims, shape, machine = program.dims, best.shape, fastest.machine
    row_unit = target_of(dims).row_unit[Units(dims.units)]
    rows, cols = machine.tile_rows, machine.tile_cols
    sizes: dict[str, list[int]] = {
        "panel": sorted({n for n in (1, 2, 3, 4, 5, 6, 8, dims.row_blocks) if n <= dims.row_blocks}),
        "claims": list(_CLAIMS) if best.claimed else [],
        "tile_cols": [cols * n // 4 for n in (4, 3, 2, 1)],
        "tile_rows": [n for n in (rows, rows * 3 // 4, rows // 2, rows // 4) if n % row_unit == 0 and n],
        "reduce_lag": list(_LAGS),
        "norm_lag": list(_LAGS),
    }
    for name, values in sizes.items():
        for value in values:
            if value != getattr(shape, name):
                yield f"{name} {value}", replace(best, shape=replace(shape, **{name: value}))
    for changes in fastest.open(tokens):
        yield from ((_text(change), replace(best, **change)) for change in changes if "shape" not in change)


def _text(change: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in change.items())


def _key(program: Program, machine: Machine) -> str:
    """Return the cache key: a hash of the program, the machine, and the sources of the scheduler and the simulator."""
    digest = hashlib.sha256(f"{program.hash} {machine}".encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    digest.update(Path(load()._name).read_bytes())
    return digest.hexdigest()[:32]


def _load(file: Path, seconds: float) -> Found | None:
    try:
        kept = json.loads(file.read_text())
        if kept.pop("seconds") < seconds:
            return None
        options = kept.pop("options")
        options = Options(**options | {"shape": Shape(**options["shape"])})
        gains = tuple(Gain(**gain) for gain in kept.pop("gains"))
        return Found(options, gains=gains, **kept | {"cached": True})
    except (OSError, ValueError, KeyError, TypeError):
        return None  # the file does not exist or is incomplete


def _save(file: Path, found: Found, seconds: float) -> None:
    with whole_file(file, f"the search result to {file}") as part:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(asdict(found) | {"seconds": seconds}, indent=1))
