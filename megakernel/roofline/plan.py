"""Finds all layouts of a model over a number of GPUs. Possible layouts are sorted by time, impossible ones have a
reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd, inf, isqrt

from ..errors import MegakernelError
from ..machine import Hardware
from .layout import Layout, LayoutTime, decode_step, train_step
from .shapes import Shape

_MOST_GPUS = 1 << 24


@dataclass(frozen=True)
class Refusal:
    """A layout that is impossible. `bytes_per_gpu` is None if the reason is not memory."""

    layout: Layout
    why: str
    bytes_per_gpu: float | None = None


@dataclass(frozen=True)
class Plan:
    """`ranked`: fastest first."""

    ranked: tuple[LayoutTime, ...]
    refused: tuple[Refusal, ...]


def plan(shape: Shape, hardware: Hardware, gpus: int, tokens: int, context: int, *, training: bool = False) -> Plan:
    """Return all layouts that use all `gpus` GPUs for a step. Layouts with idle GPUs are included if they are faster
    than all of those.

    Training has a batch of `tokens` in sequences of `context`. Decoding has `tokens` sequences with `context` KV tokens
    each. Among equally fast layouts, one that uses fewer of the axes TP, EP, PP and DP comes first, then one that takes
    less memory. Raises MegakernelError if no layout is possible.
    """
    if gpus > _MOST_GPUS:
        raise MegakernelError(f"{gpus:,} GPUs exceed the planner's limit of {_MOST_GPUS:,}")
    hardware.levels(gpus)  # raises an error if the machine has no network for this many GPUs
    ranked: list[LayoutTime] = []
    refused: list[Refusal] = []
    for layout in layouts(shape, gpus, training=training):
        time = price(shape, hardware, layout, tokens, context, training=training)
        if isinstance(time, Refusal):
            refused.append(time)
        else:
            ranked.append(time)
    fastest = min((time.step_s for time in ranked), default=inf)
    for layout in _idling(shape, gpus, hardware.node.gpus, training=training):
        time = price(shape, hardware, layout, tokens, context, training=training)
        if isinstance(time, LayoutTime) and time.step_s < fastest:
            ranked.append(time)
    if not ranked:
        least = min(refused, key=lambda r: r.bytes_per_gpu or inf)
        raise MegakernelError(
            f"{shape.name} on {gpus} {hardware.name} with {tokens:,} tokens: no layout is possible; the nearest is"
            f" {least.layout}, but {least.why}; use more GPUs or fewer tokens"
        )
    ranked.sort(key=lambda t: (float(f"{t.step_s:.9g}"), _axes(t.layout), t.bytes_per_gpu))
    return Plan(tuple(ranked), tuple(refused))


def price(
    shape: Shape, hardware: Hardware, layout: Layout, tokens: int, context: int, *, training: bool
) -> LayoutTime | Refusal:
    """Return the time of one layout, or the reason why the layout is impossible."""
    reason = _impossible(shape, hardware, layout, tokens)
    if reason:
        return Refusal(layout, reason)
    step = train_step if training else decode_step
    time = step(shape, hardware, layout, tokens, context)
    return time if time.fits else Refusal(layout, f"it {time.why}", time.bytes_per_gpu)


@dataclass(frozen=True)
class Loss:
    """A layout compared with the best one, whose step is `slower_s` seconds shorter. `rank` counts from 1. `cause` is
    the part of the step that contributes most to `slower_s`, and `cause_s` is this part's contribution.
    """

    time: LayoutTime
    rank: int
    factor: float
    slower_s: float
    cause: str
    cause_s: float


def asked(
    shape: Shape, hardware: Hardware, layout: Layout, found: Plan, tokens: int, context: int, *, training: bool
) -> Loss:
    """Compare a layout that the user asks for with the best of `found`. Raises MegakernelError if it is impossible.

    If a layout for training has `zero` = 0, ZeRO-1 is tried first, then ZeRO-3, then unsharded state. The first of
    these that is possible is compared.
    """
    if (shape.heads % layout.tp) or (shape.experts % layout.ep) or layout.pp > shape.layers:
        raise MegakernelError(
            f"{layout}: TP must divide {shape.heads} heads, EP must divide {shape.experts} experts, and PP must be at"
            f" most {shape.layers}, the number of layers"
        )
    if layout.zero == 3 and layout.pp > 1:
        raise MegakernelError(f"{layout} would gather its weights for each microbatch: use zero=1")
    depths: tuple[int, ...] = (layout.zero,)
    if training and not layout.zero:
        depths = tuple(sorted((one.zero for one in _with_state(layout, training=True)), key=(1, 3, 0).index))
    several = [
        price(shape, hardware, replace(layout, zero=zero), tokens, context, training=training) for zero in depths
    ]
    times = [time for time in several if isinstance(time, LayoutTime)]
    if not times:
        raise MegakernelError(f"{layout} is not possible: {several[0].why}")
    time, best = times[0], found.ranked[0]
    slower = time.step_s - best.step_s
    causes = {"bubbles and hops between stages": time.fixed_s - best.fixed_s}
    causes[_binding(time)] = time.overlapped_s - best.overlapped_s
    cause = max(causes, key=lambda name: causes[name])
    rank = 1 + sum(other.step_s < time.step_s for other in found.ranked)
    return Loss(time, rank, time.step_s / best.step_s, slower, cause, causes[cause])


def _binding(time: LayoutTime) -> str:
    """Return the name of the slowest among the overlapping parts of a step: arithmetic, memory, network levels."""
    times = {"arithmetic": time.math_s, "memory": time.memory_s}
    times |= {f"the {name} network": seconds for name, seconds in time.comms_s.items()}
    return max(times, key=lambda name: times[name])


def _idling(shape: Shape, gpus: int, node: int, *, training: bool) -> Iterator[Layout]:
    """Layouts that leave some GPUs idle, with equal pipeline stages and as many replicas as possible.

    A layout that needs more than one node fills whole nodes.
    """
    for tp in _divisors(shape.heads):
        for ep in _divisors(shape.experts):
            for pp in _divisors(shape.layers):
                inner = tp * ep * pp
                if inner > gpus:
                    continue
                dp = gpus // inner
                if dp * inner > node:
                    whole = node // gcd(inner, node)
                    dp = max(dp // whole * whole, node // inner)
                if dp and dp * inner < gpus:
                    yield from _with_state(Layout(tp, ep, pp, dp), training=training)


def _with_state(layout: Layout, *, training: bool) -> Iterator[Layout]:
    """Yield the layout once for each possible sharding of its training state (see `Layout.zero`)."""
    copies = layout.dp * layout.ep > 1
    levels = ((0, 1, 3) if layout.pp == 1 else (0, 1)) if training and copies else (0,)
    yield from (replace(layout, zero=zero) for zero in levels)


def layouts(shape: Shape, gpus: int, *, training: bool) -> Iterator[Layout]:
    """All factorisations of `gpus` in which TP divides the heads, EP divides the experts, and each stage has at least
    one layer.
    """
    for tp in _divisors(gpus):
        if shape.heads % tp:
            continue
        for ep in _divisors(gpus // tp):
            if shape.experts % ep:
                continue
            for pp in _divisors(gpus // tp // ep):
                if pp > shape.layers:
                    continue
                dp = gpus // tp // ep // pp
                yield from _with_state(Layout(tp, ep, pp, dp), training=training)


def _impossible(shape: Shape, hardware: Hardware, layout: Layout, tokens: int) -> str | None:
    """Return a reason, other than memory, why a layout is impossible; None if there is none."""
    try:
        for gpus in (layout.tp, layout.tp * layout.ep, layout.gpus):
            hardware.levels(gpus)
    except MegakernelError as e:
        return str(e)
    ways = layout.dp * layout.ep
    return f"it has {ways} shares of {tokens:,} tokens" if ways > tokens else None


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def _axes(layout: Layout) -> int:
    return sum(ways > 1 for ways in (layout.tp, layout.ep, layout.pp, layout.dp))
