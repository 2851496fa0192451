"""Reads machine files, which describe hardware in TOML. With the key `base`, a file extends another one."""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ..errors import MegakernelError, file_errors, regular
from .hardware import Chip, Core, Costs, Curve, Hardware, Link, Node, Rates, Tiles
from .host import cpu_count, table

HOST = "host"
KNOWN_FOLDER = Path(__file__).with_name("known")
_SECTIONS: dict[str, type] = {
    "flops_per_s" if kind is Rates else kind.__name__.lower(): kind
    for kind in (Chip, Rates, Link, Node, Costs, Tiles, Core)
}
_OPTIONAL = {"costs", "tiles", "core"}
_NODE = re.compile(r"(.+)x(\d+)")

# The limits of numbers in machine files. Whole numbers count SMs, links or rows; they are at most 2^16, because a trace
# stores the number of an SM in 16 bits. All other numbers are limited so that their products do not overflow.
_Whole = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
_Number = Annotated[float, msgspec.Meta(ge=1e-30, le=1e30)]
_TYPES: dict[str, Any] = {
    "int": _Whole,
    "float": _Number,
    "float | None": _Number,
    "str": str,
    "tuple[float, ...]": tuple[_Number, ...],
}

Table = dict[str, Any]


def _section(kind: type) -> type:
    """Return what msgspec accepts as a section of a machine file: the fields of `kind`, and no others."""
    known = [(f.name, _TYPES[str(f.type)], *([] if f.default is MISSING else [f.default])) for f in fields(kind)]
    return msgspec.defstruct(kind.__name__, known, kw_only=True, forbid_unknown_fields=True)


# The paths through the machine code are data: the base of all GPUs says which there are.
_NAMES = tomllib.loads((KNOWN_FOLDER / "_gpu.toml").read_text())["paths"]
_PATH = Annotated[tuple[_Number, ...], msgspec.Meta(min_length=1, max_length=3)]
_PATHS: Any = msgspec.defstruct("Paths", [(name, _PATH) for name in _NAMES], forbid_unknown_fields=True)
_CURVES: Any = list[_section(Curve)]  # type: ignore[misc]
_KEYS: list[Any] = [
    *((name, _section(kind), *([None] if name in _OPTIONAL else [])) for name, kind in _SECTIONS.items()),
    ("paths", _PATHS, None),
    ("curve", _CURVES, []),
    ("source", Any, None),
]
_FILE = msgspec.defstruct("File", _KEYS, kw_only=True, forbid_unknown_fields=True)


def names() -> tuple[str, ...]:
    """Return the names of the machines that the package describes."""
    return tuple(sorted(path.stem for path in KNOWN_FOLDER.glob("*.toml") if not path.stem.startswith("_")))


def hardware(name: str, cores: int | None = None) -> Hardware:
    """Return the description of the machine `name`. A name is one of these: a known machine (`h100`), a known machine
    with this many GPUs in its node (`h100x4`), the path of a TOML file, or `host` (this computer, with `cores` cores or
    all of them).

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
    """Return the contents of a machine file, completed by those of its base, the base's base, and so on. `above` has
    the files whose base this file is."""
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
    """Raise MegakernelError if a file based on `host` lacks a rate, because the base has only an assumed one."""
    for section, key in (("chip", "hbm_bytes_per_s"), ("flops_per_s", "bf16"), ("flops_per_s", "fp32")):
        given = table.get(section)
        if not (isinstance(given, dict) and key in given):
            raise MegakernelError(
                f"machine file {path}: {section}.{key} is missing, and its base 'host' only assumes it: add it, or let"
                " megakernel doctor --calibrate write a file, which may be a base"
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
        file: Any = msgspec.convert(table, _FILE)
    except msgspec.ValidationError as e:
        raise MegakernelError(f"machine file {where}: {str(e)[:200]}") from e
    sections = ((kind, getattr(file, section)) for section, kind in _SECTIONS.items())
    built: dict[str, Any] = {k.__name__.lower(): k(**msgspec.structs.asdict(s)) for k, s in sections if s is not None}
    curves = tuple(Curve(**msgspec.structs.asdict(curve)) for curve in file.curve)
    for curve in curves:
        _check_curve(curve.message_bytes, curve.bus_bytes_per_s, f"machine file {where}: the sizes of a curve")
    if core := built.get("core"):
        rows = f"machine file {where}: the row counts of core"
        _check_curve(core.matmul_rows, core.matmul_flops_per_s, rows)
        _check_curve(core.attention_rows, core.attention_flops_per_s, rows)
    paths = file.paths and msgspec.structs.asdict(file.paths)
    return Hardware(name=name, curves=curves, paths=paths, **built)


def _check_curve(points: tuple[float, ...], values: tuple[float, ...], what: str) -> None:
    if not points or len(points) != len(values) or list(points) != sorted(set(points)):
        raise MegakernelError(f"{what} must be in ascending order, and there must be one rate for each")
