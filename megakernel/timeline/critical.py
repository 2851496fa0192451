"""Finds the critical path: the chain of instructions that determined the length of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..trace import IntervalKind, Role
from .resolve import Resolved
from .spans import Ints


@dataclass(frozen=True)
class ChainLink:
    """One instruction (link) on the critical path, the chain of instructions that determines a step's length.

    `begin_s` and `end_s` are seconds since the launch began, and `gap_s` is the time from the previous link's end to
    `begin_s`. `after` says what this link waited for. "wait" means a signal of the previous link, and "order" the
    previous link on the same worker. "start" means that this is the first link. `interval` is an interval's index.
    """

    rank: int
    worker: int
    instruction: str
    layer: int | None
    begin_s: float
    end_s: float
    gap_s: float
    after: str
    interval: int


@dataclass(frozen=True)
class CriticalPath:
    """The critical path of the last launch: the chain of instructions (links) that determines its length. `seconds` is
    this length. It is the sum of the links' times, `by_instruction`, and of the gaps between links, `gap_s`.

    A link ends as soon as the next link can continue. If the next link is on the same worker, this is the end of the
    COMPUTE interval. If the next link waits for a signal, this is the end of the STORE interval. The next link begins
    with its own COMPUTE interval, or at the previous link's end if this is later. Gaps come from signals, dispatch, and
    loads that are not hidden.
    """

    seconds: float
    by_instruction: dict[str, float]
    gap_s: float
    links: list[ChainLink]


def critical_path(resolved: Resolved) -> CriticalPath:
    """Return the critical path of the last launch. The search starts at the instruction that ended last. It goes back
    to the sender of the awaited signal, or to the same worker's previous instruction if that ended later."""
    launch, finish, releaser = resolved.launches - 1, resolved.finish, resolved.releaser
    nodes = finish[finish >= 0]
    nodes = nodes[resolved.launch[nodes] == launch]
    begin = _starts(resolved)
    done = _done(resolved)
    previous = _previous_on_lane(resolved, nodes, begin, done)
    released_by = np.full(len(finish), -1, dtype=np.int64)
    waits = np.flatnonzero(releaser >= 0)
    waits = waits[np.argsort(resolved.end[waits], kind="stable")]
    released_by[resolved.instance[waits]] = resolved.instance[releaser[waits]]

    origin, tick = int(resolved.launch_spans[0][launch]), resolved.tick_s
    node = int(resolved.instance[nodes[np.argmax(resolved.end[nodes])]])
    cut = int(resolved.end[finish[node]])
    total = cut - origin
    links: list[ChainLink] = []
    spent: dict[str, int] = {}
    gaps = 0
    seen = set()
    while node >= 0:
        seen.add(node)
        row, parent = int(finish[node]), int(released_by[node])
        choices = [(origin, "start", -1)]
        before = int(previous[node])
        if before >= 0 and before not in seen:
            choices.append((int(done[before]), "order", before))
        # A worker sends a signal first, and then reads the clock for the interval's end. So the sender may seem to end
        # after the wait that its signal ended. The begins of intervals are always right, so they are compared.
        if parent >= 0 and parent not in seen and begin[parent] <= begin[node]:
            choices.append((int(resolved.end[finish[parent]]), "wait", parent))
        let_go, after, next_node = max(choices[1:] or choices)
        let_go = min(let_go, cut)
        start = max(int(begin[node]), let_go)
        name = resolved.phase(row).name
        links.append(
            ChainLink(
                rank=int(resolved.rows["rank"][row]),
                worker=int(resolved.rows["worker"][row]),
                instruction=name,
                layer=resolved.layer(row),
                begin_s=(start - origin) * tick,
                end_s=(cut - origin) * tick,
                gap_s=(start - let_go) * tick,
                after=after,
                interval=row,
            )
        )
        spent[name] = spent.get(name, 0) + cut - start
        gaps += start - let_go
        node, cut = next_node, let_go
    links.reverse()
    by_instruction = {name: t * tick for name, t in sorted(spent.items(), key=lambda item: -item[1])}
    return CriticalPath(total * tick, by_instruction, gaps * tick, links)


def _done(resolved: Resolved) -> Ints:
    """Return the tick at which each executed instruction's worker can go on. It need not wait for its storer warp."""
    done = np.full(resolved.executions, -1)
    inline = ~resolved.kind(IntervalKind.STORE) | (resolved.rows["role"] != Role.STORER)
    np.maximum.at(done, resolved.instance[inline], resolved.end[inline])
    return np.where(done < 0, resolved.end[resolved.finish], done)


def _starts(resolved: Resolved) -> Ints:
    """Return when each executed instruction's COMPUTE interval begins, or its last interval if it never computes."""
    begin = np.full(resolved.executions, np.iinfo(np.int64).max)
    compute = resolved.kind(IntervalKind.COMPUTE)
    np.minimum.at(begin, resolved.instance[compute], resolved.begin[compute])
    lacking = (begin == np.iinfo(np.int64).max) & (resolved.finish >= 0)
    begin[lacking] = resolved.begin[resolved.finish[lacking]]
    return begin


def _previous_on_lane(resolved: Resolved, nodes: Ints, begin: Ints, done: Ints) -> Ints:
    """For each executed instruction, return the previous one of the same worker in the same launch, or -1."""
    instance = resolved.instance[nodes]
    order = np.lexsort((instance, done[instance], begin[instance], resolved.lane[nodes]))
    instance, lane = instance[order], resolved.lane[nodes[order]]
    same = lane[1:] == lane[:-1]
    previous = np.full(len(begin), -1, dtype=np.int64)
    previous[instance[1:][same]] = instance[:-1][same]
    return previous
