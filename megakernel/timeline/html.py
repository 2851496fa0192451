"""The timeline as one HTML file that opens from a disk: template, styles, script and packed data in one."""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import BY_OPCODE, INSTRUCTIONS, Buffer, Family
from ..isa import access as acc
from ..isa import record as rec
from ..program import Program
from ..trace import IntervalKind, Trace
from .resolve import Resolved, resolve
from .summary import summarise_resolved
from .waits import Causes, causes, finishes, releasers

_ACCESS_KINDS, _INDEXES = list(acc.Kind), list(acc.Index)
_OWNERS = -3  # beside OWN and EVERY: the ranks that own the rows


def write_html(program: Program, trace: Trace, path: Path) -> None:
    """Write the page; MegakernelError if the trace does not fit the program or the file cannot be written."""
    resolved = resolve(program, trace)
    cause = causes(program)
    finish = finishes(resolved)
    releaser = releasers(resolved, finish)
    columns = _columns(resolved, cause, releaser)
    meta = _meta(resolved, cause) | {
        "summary": summarise_resolved(resolved, cause, finish, releaser).to_json(),
        "columns": [[name, a.dtype.str[1:], a.size] for name, a in columns.items()],
    }
    # Widest elements first in `_columns`, so every column starts on a multiple of its own element size.
    packed = zlib.compress(b"".join(np.ascontiguousarray(a).tobytes() for a in columns.values()), 6)
    parts = {
        "STYLE": _asset("viewer.css"),
        "SCRIPT": _asset("viewer.js"),
        "META": json.dumps(meta, separators=(",", ":")).replace("</", "<\\/"),
        "DATA": base64.b64encode(packed).decode(),
    }
    page = _asset("viewer.html")
    for name, text in parts.items():
        page = page.replace(f"@@{name}@@", text)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as e:
        raise MegakernelError(f"cannot write timeline {path}: {e.strerror}") from e


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _meta(resolved: Resolved, cause: Causes) -> dict[str, Any]:
    program, header = resolved.program, resolved.trace.header
    return {
        "program": header.program,
        "source": header.source,
        "machine": program.machine,
        "ranks": program.ranks,
        "workers": program.workers,
        "layers": program.dims.layers,
        "tokens": program.dims.tokens,
        "unit_s": header.tick_s * _scale(resolved),
        "span": resolved.period // _scale(resolved),
        "segments": [len(program.numbered(s)[0]) for s in range(3)],
        "families": [[f.name.lower(), f.value] for f in Family],
        "kinds": [k.name.lower().replace("_", " ") for k in IntervalKind],
        "instructions": {
            i.opcode: {
                "name": i.name,
                "family": list(Family).index(i.family),
                "operands": i.operands,
                "semantics": i.semantics,
            }
            for i in INSTRUCTIONS
        },
        "buffers": [b.name for b in Buffer],
        "accesses": [k.value for k in _ACCESS_KINDS],
        "indexes": [i.value for i in _INDEXES],
        "copies": {acc.EVERY: "every rank", _OWNERS: "the rows' owners"},
        "causes": cause.names,
    }


def _scale(resolved: Resolved) -> int:
    """Ticks per unit of time in the page, so that any moment fits 32 bits."""
    return -(-resolved.period // 2**32)


def _columns(resolved: Resolved, cause: Causes, releaser: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Typed columns in the page's order: per interval, per record (all segments in a row) and per region."""
    program, rows, scale = resolved.program, resolved.rows, _scale(resolved)
    numbered = [program.numbered(s) for s in range(3)]
    records, ranks = (np.concatenate(parts) for parts in zip(*numbered, strict=True))
    start = np.cumsum([0, *(len(r) for r, _ in numbered)])
    region_start, regions = _regions(program, records, ranks)
    begin = resolved.begin // scale
    return {
        "begin": begin.astype(np.uint32),
        "length": (resolved.end // scale - begin).astype(np.uint32),
        "record": (start[resolved.segment] + rows["instruction"]).astype(np.uint32),
        "releaser": releaser.astype(np.int32),
        "records": records.astype(np.int32).ravel(),
        "regionStart": region_start.astype(np.uint32),
        "regions": regions.astype(np.int32).ravel(),
        "lane": resolved.lane.astype(np.uint16),
        "layer": rows["layer"].astype(np.uint16),
        "launch": resolved.launch.astype(np.uint16),
        "causesFirst": np.concatenate([cause.prologue, cause.first, cause.epilogue]).ravel(),
        "causesLater": np.concatenate([cause.prologue, cause.body, cause.epilogue]).ravel(),
        "kind": rows["kind"].astype(np.uint8),
        "slot": rows["slot"].astype(np.uint8),
    }


def _regions(
    program: Program, records: NDArray[np.int32], ranks: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Non-empty boxes of each record, as CSR: (buffer, access kind, row, row_end, col, col_end, index, rank).

    The rank is whose copy: a number, or OWN, EVERY or OWNERS.
    """
    owner, boxes = [np.zeros(0, np.int64)], [np.zeros((0, 8), np.int64)]
    opcodes = rec.opcode(records)
    for op, rank in itertools.product(np.unique(opcodes).tolist(), range(program.ranks)):
        mine = np.flatnonzero((opcodes == op) & (ranks == rank))
        instruction = BY_OPCODE[op]
        for a in instruction.accesses(instruction.columns(records[mine]), program.rank_dims(rank)):
            fixed = [np.full(len(mine), v) for v in (int(a.buffer), _ACCESS_KINDS.index(a.kind))]
            index = np.full(len(mine), _INDEXES.index(a.index))
            copy = np.broadcast_to(np.asarray(_OWNERS if a.rank is None else a.rank), len(mine))
            box = np.stack([*fixed, a.row, a.row_end, a.col, a.col_end, index, copy], axis=1)
            some = (a.row_end > a.row) & (a.col_end > a.col)
            owner.append(mine[some])
            boxes.append(box[some])
    owners, table = np.concatenate(owner), np.concatenate(boxes)
    order = np.argsort(owners, kind="stable")
    return np.searchsorted(owners[order], np.arange(len(records) + 1)), table[order]
