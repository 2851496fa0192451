"""Writes the timeline as one HTML file that works offline. It contains the styles, the scripts and the packed data."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import whole_file
from ..isa import OPERATIONS, RESULTS, Buffer, OperationFamily, Phase, accesses
from ..isa import access as acc
from ..isa import record as rec
from ..trace import EPILOGUE, PROLOGUE, IntervalKind, Role
from .compare import Comparison, identity, in_common, match
from .resolve import Resolved
from .resources import RESOURCES, curves, peaks
from .spans import Floats, Ints
from .states import State, pieces
from .summary import Summary
from .template import asset, fill, policy, timeline_script
from .waterfall import FAR

_ACCESS_KINDS, _INDEXES = list(acc.Kind), list(acc.Index)
_OWNERS = -3  # a third special value for a region's rank, besides OWN and EVERY: the ranks that store its rows
_LAYOUT = {
    "words": rec.WORDS,
    "operand": rec.OPERAND_WORD,
    "wait": rec.WAIT_WORD,
    "waits": rec.WAITS,
    "next": rec.NEXT,
    "counter": rec.COUNTER_MASK,
    "prologue": PROLOGUE,
    "epilogue": EPILOGUE,
}
_CURVE_MOST = 2**16 - 1  # curves are stored as integers; this one stands for the highest value
_MIN_BINS, _MAX_BINS = 512, 8192

Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class _Source:
    """A trace, and what the page shows of it. `places` maps a phase's number to its index in the page's list of phases.
    `peaks` has the peak rate of each of RESOURCES. `curves` [ranks, RESOURCES, bins] has the rates over time, as
    fractions of the peaks."""

    resolved: Resolved
    summary: Summary
    places: Ints
    peaks: list[float]
    curves: Floats

    @staticmethod
    def of(resolved: Resolved, summary: Summary, places: Ints) -> _Source:
        bin_s = resolved.period * resolved.tick_s / _bins(resolved)
        peak = peaks(resolved.machine, resolved.program.workers)
        # If the peak rate of a resource is unknown (0), divide by infinity, so that its fraction becomes 0.
        most = np.array([one or np.inf for one in peak])
        shares = curves(resolved, _bins(resolved)) / (most * bin_s)[:, None]
        return _Source(resolved, summary, places, peak, shares)


def write_html(path: Path, *shown: tuple[Resolved, Summary], comparison: Comparison | None = None) -> None:
    """Write the timeline's page to a file. Raises MegakernelError if the file cannot be written."""
    text = page(*shown, comparison=comparison)
    with whole_file(path, f"timeline {path}") as part:
        part.write_text(text, encoding="utf-8")


def page(*shown: tuple[Resolved, Summary], comparison: Comparison | None = None) -> str:
    """Return the HTML page of one trace, or of two traces, one below the other, with their comparison."""
    phases, places = in_common([resolved.program for resolved, _ in shown])
    sources = [_Source.of(*each, own) for each, own in zip(shown, places, strict=True)]
    # The page's unit of time is the least multiple of the first trace's tick with which every time fits into 32 bits.
    tick = sources[0].resolved.tick_s
    longest = max(s.resolved.period * s.resolved.tick_s for s in sources)
    unit_s = tick * float(np.ceil(longest / tick / 2**32))
    columns = _join(sources, unit_s)
    meta = _meta(sources, phases, unit_s) | {
        "columns": [[name, a.dtype.str[1:], a.size] for name, a in columns.items()],
        "comparison": asdict(comparison) if comparison else None,
    }
    # `_columns` puts columns with the widest elements first, so every column is aligned to its element size.
    packed = zlib.compress(b"".join(np.ascontiguousarray(a).tobytes() for a in columns.values()), 6)
    script = timeline_script()
    parts = {
        "POLICY": policy(script),
        "STYLE": asset("viewer.css"),
        "SCRIPT": script,
        "META": json.dumps(meta, separators=(",", ":")).replace("<", r"\u003c"),  # so that no text can end the element
        "DATA": base64.b64encode(packed).decode(),
    }
    return fill(asset("viewer.html"), parts)


def _meta(sources: list[_Source], phases: list[Phase], unit_s: float) -> dict[str, Any]:
    families = list(OperationFamily)
    return {
        "unit_s": unit_s,
        "span": max(_moments(s, unit_s)[1] for s in sources),
        "sources": [_about(s, unit_s) for s in sources],
        "layout": _LAYOUT,
        "families": [[f.name.lower(), f.value] for f in families],
        "kinds": [k.name.lower().replace("_", " ") for k in IntervalKind],
        "roles": [r.name.lower().replace("_", " ") for r in Role],
        "resources": RESOURCES,
        "curveMost": _CURVE_MOST,
        "outlier": FAR,
        "phases": [
            {"name": p.name, "family": families.index(p.family), "operands": p.operands, "meaning": _meaning(p)}
            for p in phases
        ],
        "buffers": [b.name for b in Buffer],
        "accesses": [k.value for k in _ACCESS_KINDS],
        "indexes": [i.value for i in _INDEXES],
        "copies": {acc.EVERY: "every rank", _OWNERS: "the rows' owners"},
        "causes": [name for s in sources for name in s.resolved.causes.names],
    }


def _meaning(phase: Phase) -> list[str]:
    named = {name: getattr(phase, name) for name in ("weights", "norm", "bias", "inputs", "output")}
    does = [OPERATIONS[phase.operation].meaning, *([RESULTS[phase.result].meaning] if phase.is_matmul else [])]
    return does + [f"{name}: {buffer.name}" for name, buffer in named.items() if buffer is not None]


def _about(source: _Source, unit_s: float) -> dict[str, Any]:
    resolved = source.resolved
    program = resolved.program
    return {
        "program": resolved.trace.header.program,
        "layers": program.dims.model.layers,
        "tokens": program.dims.bucket.tokens,
        "span": _moments(source, unit_s)[1],
        "lastLaunch": float(resolved.launch_spans[0][-1]) * resolved.tick_s,
        "bins": _bins(resolved),
        "peaks": source.peaks,
        "tops": source.curves.max(axis=(0, 2)).tolist(),
        "summary": asdict(source.summary),
    }


def _moments(source: _Source, unit_s: float) -> tuple[float, int]:
    """Return the length of a tick of the trace in the page's time units, and the length of the trace in these units."""
    factor = source.resolved.tick_s / unit_s
    return factor, int(source.resolved.period * factor) + 1


def _bins(resolved: Resolved) -> int:
    """Return the number of equal time bins for which curves have values: a power of two, larger for more intervals."""
    wanted = 1 << max(len(resolved) // 32, 1).bit_length()
    return min(max(wanted, _MIN_BINS), _MAX_BINS)


def _join(sources: list[_Source], unit_s: float) -> Columns:
    """Join the columns of all traces, one trace after another. The second trace's indices are shifted accordingly."""
    parts = [_columns(s, unit_s) for s in sources]
    starts = ("regionStart", "pieceStart")  # offsets, with one entry more than there are records or lanes
    shifted = dict.fromkeys(("record", "releaser", "pieceOf", "lane", "causesFirst", "causesLater", *starts), 0)
    for source, part in zip(sources, parts, strict=True):
        for name, by in shifted.items():
            part[name] = np.where(part[name] < 0, part[name], part[name] + by).astype(part[name].dtype)
        shifted["record"] += len(source.resolved.records)
        shifted["releaser"] = shifted["pieceOf"] = shifted["releaser"] + len(source.resolved)
        shifted["lane"] += source.resolved.lanes
        shifted["causesFirst"] += len(source.resolved.causes.names)
        shifted["causesLater"] = shifted["causesFirst"]
        for name in starts:
            shifted[name] = int(part[name][-1])
            part[name] = part[name] if source is sources[-1] else part[name][:-1]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return {"twin": _twins(sources), **joined}


def _columns(source: _Source, unit_s: float) -> Columns:
    """Return a trace's columns in the page's order. Word 0 of a record becomes its phase's index in the page's list."""
    resolved, cause, rows = source.resolved, source.resolved.causes, source.resolved.rows
    factor = _moments(source, unit_s)[0]
    region_start, regions = _regions(resolved)
    records = resolved.records.copy()
    records[:, 0] = source.places[rec.phase_number(records)]
    begin, end = np.floor(resolved.begin * factor), np.floor(resolved.end * factor)
    found = pieces(resolved)
    # The page draws loads separately from these pieces, and does not draw idle time.
    shown = np.flatnonzero(~found.of(State.LOAD, State.IDLE, State.END))
    of = found.interval[shown]
    tops = np.maximum(source.curves.max(axis=(0, 2)), np.finfo(float).tiny)
    return {
        "begin": begin.astype(np.uint32),
        "length": (end - begin).astype(np.uint32),
        "record": resolved.record.astype(np.uint32),
        "releaser": resolved.releaser.astype(np.int32),
        "records": records.ravel(),
        "pieceStart": np.searchsorted(found.lane[shown], np.arange(resolved.lanes + 1)).astype(np.uint32),
        "pieceOf": of.astype(np.uint32),
        "pieceAfter": (np.floor(found.begin[shown] * factor) - begin[of]).astype(np.uint32),
        "pieceBefore": (end[of] - np.floor(found.end[shown] * factor)).astype(np.uint32),
        "regionStart": region_start.astype(np.uint32),
        "regions": regions.astype(np.int32).ravel(),
        "lane": resolved.lane.astype(np.uint16),
        "layer": rows["layer"].astype(np.uint16),
        "launch": resolved.launch.astype(np.uint16),
        "causesFirst": cause.first.ravel(),
        "causesLater": cause.later.ravel(),
        "curves": np.round(source.curves / tops[:, None] * _CURVE_MOST).astype(np.uint16).ravel(),
        "kind": rows["kind"].astype(np.uint8),
        "slot": rows["slot"].astype(np.uint8),
        "role": rows["role"].astype(np.uint8),
    }


def _twins(sources: list[_Source]) -> NDArray[np.int32]:
    """For each COMPUTE interval, return the interval of the same instruction in the other trace; -1 means none."""
    total = sum(len(s.resolved) for s in sources)
    twin = np.full(total, -1, dtype=np.int32)
    if len(sources) == 2:
        rows = [np.flatnonzero(s.resolved.kind(IntervalKind.COMPUTE)) for s in sources]
        mine, theirs = match(*(identity(s.resolved, own, s.places) for s, own in zip(sources, rows, strict=True)))
        left, right = rows[0][mine], rows[1][theirs] + len(sources[0].resolved)
        twin[left], twin[right] = right, left
    return twin


def _regions(resolved: Resolved) -> tuple[Ints, Ints]:
    """Return the regions of buffers that each record (instruction) reads or writes, as two arrays. The first has the
    index of each record's first region in the second, which has all regions. A region is (buffer, access kind, row,
    row_end, col, col_end, index, rank). Its rank is a number, OWN, EVERY or _OWNERS (the ranks that own its rows)."""
    owner, boxes = [np.zeros(0, np.int64)], [np.zeros((0, 8), np.int64)]
    for phase, dims, mine, columns in resolved.program.by_phase():
        for a in accesses(phase, columns, dims):
            rank = _OWNERS if a.rank is None else a.rank
            what = int(a.buffer), _ACCESS_KINDS.index(a.kind)
            parts = (*what, a.row, a.row_end, a.col, a.col_end, _INDEXES.index(a.index), rank)
            box = np.stack([np.broadcast_to(part, len(mine)) for part in parts], axis=1)
            some = (a.row_end > a.row) & (a.col_end > a.col)
            owner.append(mine[some])
            boxes.append(box[some])
    owners, table = np.concatenate(owner), np.concatenate(boxes)
    order = np.argsort(owners, kind="stable")
    return np.searchsorted(owners[order], np.arange(len(resolved.records) + 1)), table[order]
