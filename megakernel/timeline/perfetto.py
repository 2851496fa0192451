"""Writes the timeline as a Perfetto file (TrackEvent protobuf), for ui.perfetto.dev or an offline copy of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import whole_file
from ..trace import IntervalKind, Role
from .resolve import WAIT, WORK, Resolved
from .resources import RESOURCES, curves
from .spans import Floats, Ints

Packet = dict[str, Any]  # the fields of a TracePacket
# Slices of a Perfetto track must nest, so kinds of intervals that may overlap inside a worker have different tracks.
_TRACKS: tuple[tuple[str, tuple[IntervalKind, ...]], ...] = (
    ("compute", (IntervalKind.COMPUTE,)),
    ("store", (IntervalKind.STORE,)),
    ("wait", WAIT),
    ("load", (IntervalKind.LOAD,)),
    ("fetch", (IntervalKind.FETCH,)),
)
_BINS = 2048  # number of samples of a resource's rate over the whole trace


def write_perfetto(path: Path, resolved: Resolved) -> None:
    """Write the trace for the Perfetto viewer. It shows one process per rank, with one track per worker. Below a
    worker, there is a track for each kind of interval, on a GPU separately for each kind of warp.

    Times are nanoseconds since the first interval. An arrow leads from an instruction that ended a wait to the work
    after the wait. Each rank has a track for each resource, with its rate in FLOP/s or B/s.
    """
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket
    from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

    with whole_file(path, f"Perfetto trace {path}") as part, part.open("wb") as f:
        builder = StreamingTraceProtoBuilder(f)
        for packet in _packets(resolved):
            builder.write_packet(TracePacket(trusted_packet_sequence_id=1, **packet))


def _packets(resolved: Resolved) -> Iterator[Packet]:
    workers, ranks = resolved.program.workers, resolved.program.ranks
    clock_error_s = resolved.trace.header.clock_error_s
    clocks = f" (clock ±{clock_error_s * 1e6:.2g} µs)" if clock_error_s else ""
    starts, ends = _flows(resolved)
    amounts = curves(resolved, _BINS)
    used = amounts.any(axis=(0, 2))
    uuids = itertools.count(1)
    for rank in range(ranks):
        process = next(uuids)
        # Perfetto sorts processes by name, so all numbers of ranks have the same number of digits.
        name = f"rank {rank:0{len(str(ranks - 1))}}{clocks}"
        yield _track(process, process={"pid": rank + 1, "process_name": name})
        for resource in np.flatnonzero(used).tolist():
            yield from _counter(resolved, next(uuids), process, resource, amounts[rank, resource])
        for worker in range(workers):
            parent = next(uuids)
            yield _child(parent, process, f"rank {rank} worker {worker}", len(RESOURCES) + worker)
            for order, (name, chosen) in enumerate(_tracks(resolved, rank * workers + worker)):
                for nth, rows in enumerate(_rows(resolved, chosen)):
                    uuid = next(uuids)
                    yield _child(uuid, parent, f"{name} {nth + 1}" if nth else name, 16 * order + nth)
                    for i in rows:
                        yield from _slice(resolved, i, uuid, starts.get(i, []), ends.get(i, []))


def _tracks(resolved: Resolved, lane: int) -> Iterator[tuple[str, Ints]]:
    """Yield the tracks (name, intervals) of a worker: one per kind of interval, on a GPU also per kind of warp."""
    first, end = np.searchsorted(resolved.lane, [lane, lane + 1])
    kind, roles = resolved.rows["kind"][first:end], resolved.rows["role"][first:end]
    for role in Role:
        for name, kinds in _TRACKS:
            chosen = first + np.flatnonzero((roles == role) & np.isin(kind, kinds))
            if len(chosen):
                yield (name if role is Role.WORKER else f"{role.name.lower().replace('_', ' ')} {name}"), chosen


def _rows(resolved: Resolved, chosen: Ints) -> list[list[int]]:
    """Assign intervals, ordered by their begin, to as few rows as possible, so that those in one row do not overlap."""
    rows: list[list[int]] = []
    free: list[int] = []
    for i in chosen[np.argsort(resolved.begin[chosen], kind="stable")].tolist():
        row = next((r for r, at in enumerate(free) if at <= resolved.begin[i]), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(0)
        rows[row].append(i)
        free[row] = int(resolved.end[i])
    return rows


def _flows(resolved: Resolved) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return two dicts by interval: the ids of the arrows (flows) that begin there, and of those that end there. Arrows
    lead from the instruction that ended a wait to the first work after the wait."""
    work = np.flatnonzero(resolved.kind(*WORK))
    work = work[np.argsort(-resolved.begin[work], kind="stable")]
    first = dict(zip(resolved.instance[work].tolist(), work.tolist(), strict=True))
    starts: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for wait in np.flatnonzero(resolved.releaser >= 0).tolist():
        target = first.get(int(resolved.instance[wait]))
        if target is not None:
            starts.setdefault(int(resolved.releaser[wait]), []).append(wait + 1)
            ends.setdefault(target, []).append(wait + 1)
    return starts, ends


def _label(resolved: Resolved, i: int) -> str:
    kind = int(resolved.rows["kind"][i])
    if kind == IntervalKind.PAGE_WAIT:
        return "waits for a page"
    if kind != IntervalKind.COUNTER_WAIT:
        return resolved.phase(i).name
    cause, by = int(resolved.cause[i]), int(resolved.releaser[i])
    if cause >= 0:
        return f"waits for {resolved.causes.names[cause]}"
    return f"waits for {resolved.phase(by).name if by >= 0 else 'a signal of no phase'}"


def _track(uuid: int, **fields: Any) -> Packet:
    return {"track_descriptor": {"uuid": uuid, "child_ordering": "EXPLICIT", **fields}}


def _child(uuid: int, parent: int, name: str, order: int, **fields: Any) -> Packet:
    return _track(uuid, parent_uuid=parent, name=name, sibling_order_rank=order, **fields)


def _event(kind: str, track: int, ns: float, **fields: Any) -> Packet:
    return {"timestamp": round(ns), "track_event": {"type": f"TYPE_{kind}", "track_uuid": track, **fields}}


def _counter(resolved: Resolved, uuid: int, parent: int, resource: int, amount: Floats) -> Iterator[Packet]:
    """Yield a track of a resource's rate. `amount` has its FLOPs or bytes in each of many equal spans of time."""
    name, unit = RESOURCES[resource]
    yield _child(uuid, parent, name, resource, counter={"unit_name": unit})
    width_s = resolved.period * resolved.tick_s / len(amount)
    rates = np.append(amount / width_s, 0.0)
    for at in np.flatnonzero(np.diff(rates, prepend=np.nan) != 0).tolist():
        yield _event("COUNTER", uuid, at * width_s * 1e9, double_counter_value=float(rates[at]))


def _slice(resolved: Resolved, i: int, track: int, starts: list[int], ends: list[int]) -> Iterator[Packet]:
    ns, phase, layer = resolved.tick_s * 1e9, resolved.phase(i), resolved.layer(i)
    numbers = resolved.operands(i) | {"launch": int(resolved.rows["launch"][i])}
    numbers |= {} if layer is None else {"layer": layer}
    notes = [{"name": name, "int_value": value} for name, value in numbers.items()]
    notes += [] if resolved.rows["kind"][i] in WORK else [{"name": "phase", "string_value": phase.name}]
    yield _event(
        "SLICE_BEGIN",
        track,
        int(resolved.begin[i]) * ns,
        name=_label(resolved, i),
        categories=[phase.family.name.lower()],
        flow_ids=starts,
        terminating_flow_ids=ends,
        debug_annotations=notes,
    )
    yield _event("SLICE_END", track, int(resolved.end[i]) * ns)
