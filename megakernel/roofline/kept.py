"""Stores the measured maximum rates of this machine in the cache folder, in one file that all processes share."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from ..errors import MegakernelError, file_errors, regular, whole_file
from ..machine import cpu_count, processor
from ..settings import cache_folder
from .ceilings import Measured, last_level_cache

_LARGEST_FILE = 1 << 20
_Kept = dict[str, dict[str, Measured]]  # the measurements of each machine by number of threads
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
    return found if found and found.threads == threads else None


def keep(machine: str, found: Measured) -> None:
    """Store a measurement beside those of other machines. If the folder cannot be written, this is logged."""
    everything = _read()
    everything.setdefault(machine, {})[str(found.threads)] = found
    try:
        with file_errors(f"make the cache folder {path().parent}"):
            path().parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path(), f"this machine's ceilings to {path()}") as part:
            part.write_bytes(msgspec.json.format(msgspec.json.encode(everything), indent=1) + b"\n")
    except MegakernelError as e:
        log.warning("%s; they are measured again next time", e)


def _read() -> _Kept:
    try:
        with regular(path()).open("rb") as file:
            return msgspec.json.decode(file.read(_LARGEST_FILE), type=_Kept)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:
        why = e.strerror if isinstance(e, OSError) else str(e)
        log.warning("cannot use the ceilings in %s: %s; they are measured anew", path(), " ".join(str(why).split()))
        return {}
