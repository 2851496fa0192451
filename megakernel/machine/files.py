"""Reads machine files, which describe hardware in TOML. With the key `base`, a file extends another one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ..errors import MegakernelError, file_errors, regular
from .hardware import Hardware
from .host import cpu_count, table

HOST = "host"
KNOWN_FOLDER = Path(__file__).with_name("known")
_NODE = re.compile(r"(.+)x(\d+)")

# The names of paths (parts of the interpreter's machine code). The machine file that all GPUs extend lists them.
_PATHS = tomllib.loads((KNOWN_FOLDER / "_gpu.toml").read_text())["paths"].keys()

Table = dict[str, Any]


def names() -> tuple[str, ...]:
    """Return the names of the machines that the package describes."""
    return tuple(sorted(path.stem for path in KNOWN_FOLDER.glob("*.toml") if not path.stem.startswith("_")))


def hardware(name: str, cores: int | None = None) -> Hardware:
    """Return the description of the machine `name`. A name is a known machine (`h100`), a known machine with another
    number of GPUs in its node (`h100x4`), the path of a TOML file, or `host`. `host` is this computer. It has `cores`
    cores, by default all.

    The files in `known/` show the format of a TOML file. A file that extends another machine has the line `base =
    NAME`, and only the values that differ; a list replaces the base's whole list. All figures must be positive. Raises
    MegakernelError for an unknown name or an invalid file.
    """
    if name == HOST:
        return _hardware(HOST, table(cores or cpu_count()), HOST)
    if name.endswith(".toml") or name in names():
        path = Path(name) if name.endswith(".toml") else KNOWN_FOLDER / f"{name}.toml"
        return _hardware(path.stem, _merged(path, ()), name)
    match = _NODE.fullmatch(name)
    if match and match[1] in names():
        chip, gpus = hardware(match[1]), int(match[2])
        if not 0 < gpus <= chip.node.gpus:
            raise MegakernelError(
                f"{name} names a single node, but a node of {match[1]} has 1 to {chip.node.gpus} GPUs, not {gpus}"
            )
        return replace(chip, node=replace(chip.node, gpus=gpus))
    raise MegakernelError(
        f"unknown machine {name!r}: choose from host, {', '.join(names())}, a node such as h100x8, or a .toml file"
    )


def _merged(path: Path, above: tuple[Path, ...]) -> Table:
    """Return the contents of a machine file. Values that it lacks come from its base, then from the base's base, and so
    on. `above` lists the files that extend this file, directly or through other files."""
    try:
        with file_errors(f"read machine file {path}"):
            table = tomllib.loads(regular(path).read_text())
    # ValueError covers invalid TOML, text that is not UTF-8, and integers with too many digits. RecursionError means
    # that values are nested too deeply.
    except (ValueError, RecursionError) as e:
        raise MegakernelError(f"machine file {path} is not valid TOML: {str(e)[:200]}") from e
    base = table.pop("base", None)
    if base is None:
        return table
    if base == HOST:
        _check_rates(table, path)
    below = _base(base, path, (*above, path))
    for key, value in table.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            below[key] = {**below[key], **value}
        else:
            below[key] = value
    return below


def _check_rates(table: Table, path: Path) -> None:
    """Raise MegakernelError if a file based on `host` lacks a rate: it must not inherit a rate that is only assumed."""
    for section, key in (("chip", "hbm_bytes_per_s"), ("flops_per_s", "bf16"), ("flops_per_s", "fp32")):
        given = table.get(section)
        if not (isinstance(given, dict) and key in given):
            raise MegakernelError(
                f"machine file {path}: {section}.{key} is missing, and its base 'host' has only an assumed value: add"
                " it, or measure this machine with benchmarks/calibration/calibrate.py and use that file as the base"
            )


def _base(base: object, path: Path, above: tuple[Path, ...]) -> Table:
    if not isinstance(base, str):
        raise MegakernelError(f"machine file {path}: base must be a name in quotes")
    if base == HOST:
        return table(cpu_count())
    if base.endswith(".toml"):
        below = path.parent / base
    else:
        below = KNOWN_FOLDER / f"{base}.toml"
        if not below.exists():
            raise MegakernelError(f"machine file {path}: unknown base {base!r}: choose from {', '.join(names())}")
    if below.resolve() in {p.resolve() for p in above}:
        raise MegakernelError(f"machine file {path}: its base {base!r} refers back to this file")
    return _merged(below, above)


def _hardware(name: str, table: Table, where: str) -> Hardware:
    try:
        found = msgspec.convert(table | {"name": name}, Hardware)
    except msgspec.ValidationError as e:
        raise MegakernelError(f"machine file {where}: {str(e)[:200]}") from e
    if found.paths is not None and (wrong := sorted(found.paths.keys() ^ _PATHS)):
        raise MegakernelError(f"machine file {where}: entries of [paths] are unknown or missing: {', '.join(wrong)}")
    return found
