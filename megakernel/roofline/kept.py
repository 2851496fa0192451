"""Stores the measured maximum rates of this machine in the cache folder, in one file that all processes share."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from ..errors import MegakernelError, file_errors, regular, whole_file
from ..machine import cpu_count, processor
from ..model.cache import cache_folder
from .ceilings import Measured, last_level_cache

_LARGEST_FILE = 1 << 20
# Stored rates above this are ignored. Otherwise a wrong rate would stay forever, because only a higher one replaces it.
_MOST = 1e18
log = logging.getLogger(__name__)


def path() -> Path:
    return cache_folder() / "ceilings.json"


def this_machine(simd: str) -> str:
    """Return a name for this machine's processor and instruction set, because machines may share the folder."""
    return f"{processor()}, {cpu_count()} cores, {last_level_cache() >> 20} MiB of cache, {simd}"


def recall(machine: str, threads: int) -> Measured | None:
    """Return the stored measurement for `threads` threads, or None if there is none. If the file is damaged, this is
    logged, and the result is None."""
    found = _read().get(machine, {}).get(str(threads))
    return None if found is None else _measured(found, threads)


def keep(machine: str, found: Measured) -> None:
    """Store a measurement beside those of other machines. If the folder cannot be written, this is logged."""
    everything = _read()
    everything.setdefault(machine, {})[str(found.threads)] = asdict(found)
    try:
        with file_errors(f"make the cache folder {path().parent}"):
            path().parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path(), f"this machine's ceilings to {path()}") as part:
            part.write_text(json.dumps(everything, indent=1) + "\n")
    except MegakernelError as e:
        log.warning("%s; they are measured again next time", e)


def _read() -> dict[str, dict[str, object]]:
    try:
        with regular(path()).open("rb") as file:
            text = file.read(_LARGEST_FILE + 1)
        found = json.loads(text) if len(text) <= _LARGEST_FILE else None
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:
        return _damaged(e.strerror or str(e) if isinstance(e, OSError) else "it is not JSON")
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        return _damaged("it is not a table of machines")
    return found


def _damaged(why: str) -> dict[str, dict[str, object]]:
    log.warning("cannot use the ceilings in %s: %s; they are measured anew", path(), why)
    return {}


def _measured(found: Any, threads: int) -> Measured | None:
    """Return stored data as a Measured, or None if `keep` cannot have written them."""
    try:
        one = Measured(**found)
        date.fromisoformat(one.date)
        rates = (one.read_bytes_per_s, one.cache_bytes_per_s, one.flops, one.integer_ops)
        known = one.others is None or 0 <= one.others <= 1
        if (
            one.threads == threads
            and one.probes >= 1
            and known
            and all(isinstance(rate, float) and 1 < rate < _MOST for rate in rates)
        ):
            return one
    except (ValueError, TypeError):
        pass
    _damaged("a measurement in it is impossible")
    return None
