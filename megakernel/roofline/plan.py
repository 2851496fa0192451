"""Every way to lay a model over so many GPUs, the impossible ones refused, the others by time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isqrt

from ..errors import MegakernelError
from ..machine import Hardware
from .layout import Layout, LayoutTime, decode_step, train_step
from .shapes import Shape


@dataclass(frozen=True)
class Refusal:
    """A layout that cannot be. `bytes_per_gpu` is None where something else than memory forbids it."""

    layout: Layout
    why: str
    bytes_per_gpu: float | None = None


@dataclass(frozen=True)
class Plan:
    """`ranked`: fastest first."""

    ranked: tuple[LayoutTime, ...]
    refused: tuple[Refusal, ...]


def plan(shape: Shape, hardware: Hardware, gpus: int, tokens: int, context: int, *, training: bool = False) -> Plan:
    """The layouts of `gpus` GPUs for a step.

    Training: a batch of `tokens` in sequences of `context`. Decoding: `tokens` sequences with `context` KV tokens each.
    Of equally fast layouts the one with fewer axes comes first, then the one that takes less memory. Raises
    MegakernelError where no layout is possible.
    """
    hardware.levels(gpus)  # whether so many can be joined at all
    ranked: list[LayoutTime] = []
    refused: list[Refusal] = []
    for layout in layouts(shape, gpus, training=training):
        reason = _impossible(shape, hardware, layout, tokens)
        if reason:
            refused.append(Refusal(layout, reason))
            continue
        step = train_step if training else decode_step
        time = step(shape, hardware, layout, tokens, context)
        if time.fits:
            ranked.append(time)
        else:
            refused.append(Refusal(layout, time.why, time.bytes_per_gpu))
    if not ranked:
        least = min(refused, key=lambda r: r.bytes_per_gpu or inf)
        raise MegakernelError(
            f"{shape.name} on {gpus} {hardware.name} with {tokens:,} tokens: no layout is possible; nearest is"
            f" {least.layout}, which {least.why}: take more GPUs or fewer tokens"
        )
    ranked.sort(key=lambda t: (float(f"{t.step_s:.9g}"), _axes(t.layout), t.bytes_per_gpu))
    return Plan(tuple(ranked), tuple(refused))


def layouts(shape: Shape, gpus: int, *, training: bool) -> Iterator[Layout]:
    """All factorisations of `gpus`: heads divide by TP, experts by EP, stages have at least a layer."""
    for tp in _divisors(gpus):
        if shape.heads % tp:
            continue
        for ep in _divisors(gpus // tp):
            if shape.experts % ep or (ep > 1 and shape.experts == 1):
                continue
            for pp in _divisors(gpus // tp // ep):
                if pp > shape.layers:
                    continue
                dp = gpus // tp // ep // pp
                copies = dp * ep > 1
                levels = ((0, 1, 3) if pp == 1 else (0, 1)) if training and copies else (0,)
                yield from (Layout(tp, ep, pp, dp, zero) for zero in levels)


def _impossible(shape: Shape, hardware: Hardware, layout: Layout, tokens: int) -> str | None:
    """What else than memory forbids a layout."""
    try:
        for gpus in (layout.tp, layout.tp * layout.ep):
            hardware.levels(gpus)
    except MegakernelError as e:
        return str(e)
    ways = layout.dp * layout.ep
    return f"has {ways} shares of {tokens:,} tokens" if ways > tokens else None


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def _axes(layout: Layout) -> int:
    return sum(ways > 1 for ways in (layout.tp, layout.ep, layout.pp, layout.dp))
