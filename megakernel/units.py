"""Numbers with units, as text. A number that rounds to 1,000 of a unit is shown in the next larger unit."""

from __future__ import annotations

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
# The units of figures, by the ending of a figure's name. Times, whose names end in _s, have no prefixes.
UNITS = {
    "flops_per_s": "FLOP/s",
    "bytes_per_s": "B/s",
    "per_s": "/s",
    "bytes": "B",
    "flops": "FLOP",
    "hz": "Hz",
    "s": "",
}


def _prefix(value: float, digits: int) -> tuple[float, str]:
    """Return the size and the name of the decimal prefix for `value`, rounded to `digits` significant digits."""
    rounded = float(f"{value:.{digits}g}")
    return next(((size, prefix) for size, prefix in _PREFIXES if rounded >= size), (1.0, ""))


def scaled(value: float, unit: str = "") -> str:
    """Return a number with three significant digits, a decimal prefix such as M, and its unit."""
    size, prefix = _prefix(value, 3)
    return f"{value / size:.3g} {prefix}{unit}"


def bytes_text(count: float) -> str:
    """Return a size with its unit, such as 98.4 MB."""
    size, prefix = _prefix(count, 4)
    return f"{count / size:.1f} {prefix}B" if prefix else f"{count:.0f} B"


def seconds(value: float) -> str:
    """Return a time as text, in a unit that leaves 1 to 3 digits before the decimal point."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if float(f"{value:.3g}") >= scale:
            return f"{value / scale:.3g} {unit}" if value < 1000 * scale else f"{value / scale:.0f} {unit}"
    return f"{value / 1e-9:.3g} ns"


def figure(name: str, value: float | str) -> tuple[str, str]:
    """Return a figure's name without its unit, and its value as text. Without a unit, the value is a number or a
    word."""
    unit = next((unit for unit in UNITS if name == unit or name.endswith(f"_{unit}")), "")
    if isinstance(value, str):
        text = value
    elif unit:
        text = scaled(value, UNITS[unit]) if UNITS[unit] else seconds(value)
    else:
        text = f"{value:,.5g}" if value % 1 else f"{value:,.0f}"
    return (name.removesuffix(unit).rstrip("_") or name).replace("_", " "), text
