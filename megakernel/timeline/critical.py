"""The critical path: which instructions, one after the other, made the step as long as it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..trace import IntervalKind
from .resolve import Resolved


@dataclass(frozen=True)
class Link:
    """One instruction of the chain, in seconds since the launch began. `after` says what it had to follow.

    `instruction` is the name of its phase.

    `after` is "wait" (the previous link released it), "order" (the previous link is earlier in its own stream) or
    "start". `interval` is the row in the trace.
    """

    rank: int
    worker: int
    instruction: str
    layer: int | None
    begin_s: float
    end_s: float
    after: str
    interval: int


@dataclass(frozen=True)
class CriticalPath:
    """Of the last launch. `seconds` = sum of `by_instruction` + `gap_s`.

    An instruction's share is the time from its begin, or its predecessor's end if that is later, to its end; the
    gaps between are signals, dispatch and loads that nothing hid.
    """

    seconds: float
    by_instruction: dict[str, float]
    gap_s: float
    links: list[Link]


def critical_path(resolved: Resolved, finish: NDArray[np.int64], releaser: NDArray[np.int64]) -> CriticalPath:
    """Walk back from the launch's last interval: to the later of what released an instruction and its predecessor.

    finish: last interval of each instance (-1: not in the trace); releaser: of each interval (-1: none).
    """
    nodes = finish[finish >= 0]
    begin = _starts(resolved, finish)
    done = _done(resolved, finish)
    previous = _previous_on_lane(resolved, nodes, len(finish))
    released_by = np.full(len(finish), -1, dtype=np.int64)
    waits = np.flatnonzero(releaser >= 0)
    waits = waits[np.argsort(resolved.end[waits], kind="stable")]
    released_by[resolved.instance[waits]] = resolved.instance[releaser[waits]]

    launch = resolved.launches - 1
    here = nodes[resolved.launch[nodes] == launch]
    origin = int(resolved.begin[resolved.launch == launch].min())
    tick = resolved.trace.header.tick_s
    node = int(resolved.instance[here[np.argmax(resolved.end[here])]])
    links: list[Link] = []
    spent: dict[str, int] = {}
    total = int(resolved.end[finish[node]]) - origin
    while node >= 0:
        before = (("order", int(previous[node]), done), ("wait", int(released_by[node]), resolved.end[finish]))
        choices = [(int(over[n]), why, n) for why, n, over in before if n >= 0]
        # Clocks are read after a signal is sent, so a releaser may seem to end late; it never seems to begin late.
        end, after, parent = max((c for c in choices if begin[c[2]] < begin[node]), default=(origin, "start", -1))
        row = finish[node]
        links.append(
            Link(
                rank=int(resolved.rows["rank"][row]),
                worker=int(resolved.rows["worker"][row]),
                instruction=resolved.phase(row).name,
                layer=resolved.layer(row),
                begin_s=(int(begin[node]) - origin) * tick,
                end_s=(int(resolved.end[row]) - origin) * tick,
                after=after,
                interval=int(row),
            )
        )
        name = links[-1].instruction
        own = int(resolved.end[row]) - max(int(begin[node]), end)
        spent[name] = spent.get(name, 0) + max(own, 0)
        node = parent
    links.reverse()
    by_instruction = {name: t * tick for name, t in sorted(spent.items(), key=lambda item: -item[1])}
    return CriticalPath(total * tick, by_instruction, max(total - sum(spent.values()), 0) * tick, links)


def _done(resolved: Resolved, finish: NDArray[np.int64]) -> NDArray[np.int64]:
    """When each instance lets the next one of its stream go on: its last end but for what a storer still stores."""
    done = np.full(len(finish), -1)
    inline = ~resolved.stored
    np.maximum.at(done, resolved.instance[inline], resolved.end[inline])
    return np.where(done < 0, resolved.end[finish], done)


def _starts(resolved: Resolved, finish: NDArray[np.int64]) -> NDArray[np.int64]:
    """When each instance's COMPUTE begins; without one, its last interval."""
    begin = np.full(len(finish), np.iinfo(np.int64).max)
    compute = resolved.kind(IntervalKind.COMPUTE)
    np.minimum.at(begin, resolved.instance[compute], resolved.begin[compute])
    lacking = (begin == np.iinfo(np.int64).max) & (finish >= 0)
    begin[lacking] = resolved.begin[finish[lacking]]
    return begin


def _previous_on_lane(resolved: Resolved, nodes: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The instance that ended before each on the same lane in the same launch, or -1."""
    order = nodes[np.lexsort((resolved.end[nodes], resolved.lane[nodes], resolved.launch[nodes]))]
    same = (resolved.lane[order[1:]] == resolved.lane[order[:-1]]) & (
        resolved.launch[order[1:]] == resolved.launch[order[:-1]]
    )
    previous = np.full(count, -1, dtype=np.int64)
    previous[resolved.instance[order[1:]][same]] = resolved.instance[order[:-1]][same]
    return previous
